"""Checkpoints of DeepSpeed continue here, and ours continue in DeepSpeed: the next step is the same."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from megatron_ds.compat.conversion.convert_checkpoint import run_tool
from megatron_ds.compat.conversion.deepspeed import format as deepspeed_format
from megatron_ds.compat.conversion.deepspeed.checkpoint import (
    read_engine_folder,
)
from megatron_ds.compat.conversion.filling import fill, plan_filling
from megatron_ds.compat.conversion.formats import Wishes, detected, format_of
from megatron_ds.config import parse
from megatron_ds.errors import CheckpointError
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.training.run_checkpoint import all_pieces
from tests.harness import deepspeed_checkpoints as harness
from tests.harness import deepspeed_modules as modules
from tests.harness import deepspeed_runs as runs
from tests.harness.layout_comparison import merge, parse_layout, train_layout
from tests.harness.limits import HUNG
from tests.harness.threads import run_ranks
from tests.harness.warm import warm_python

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.processes, harness.needs_deepspeed]
THIRDS = Wishes(qkv_packing="thirds")
LR = 0.00125  # of the third step: WarmupLR over 8 steps to 0.01
LLAMA_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 12,
    "vocab_size": modules.VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def made():
    """The folders of all cases, with the config.json of the transformers models."""
    folder = harness.made()
    for case in ("llama1", "llama3"):
        (folder / case / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    return folder


def close(found, expected, tolerance=1e-5):
    assert expected and found.keys() >= expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name].float(),
            tensor,
            rtol=0,
            atol=tolerance,
            msg=lambda m, name=name: f"{name}: {m}",
        )


# ------------------------------------------------------------------------------------------- what is read
@pytest.mark.parametrize(
    "case",
    [
        case
        for case in runs.CASES
        if case[-1] != "0" and not case.startswith(("small0", "mds", "experts"))
    ],
)
def test_weights_are_the_masters_that_deepspeed_shows(made, case):
    raw = read_engine_folder(made / case / "global_step2")
    for name, tensor in harness.next_step(made / case / "next.pt")["before"].items():
        assert torch.equal(raw.tensors["weight"][name].read(), tensor), name
    assert (
        raw.progress.iteration == raw.progress.num_updates == 2
        and raw.progress.samples == 8
    )
    assert raw.settings["lr_scheduler"] == {"last_batch_iteration": 1}


def test_frozen_and_shared_parameters_and_buffers_are_read_at_every_stage(made):
    for stage in (0, 2, 3):
        raw = read_engine_folder(made / f"small{stage}" / "global_step2")
        assert raw.settings["shared"] == {"head.weight": "embed.weight"}
        assert torch.equal(
            raw.tensors["buffer"]["offset"].read(), torch.linspace(-1, 1, 6)
        )
        torch.manual_seed(3)
        assert torch.equal(
            raw.tensors["weight"]["frozen.weight"].read(), modules.Small().frozen.weight
        )
        assert "frozen.weight" not in raw.tensors["exp_avg"]


# ----------------------------------------------------------------------------- our engine continues
@pytest.mark.parametrize(
    "case, stage, ranks",
    [
        ("small0", 3, 2),
        ("small2", 0, 1),
        ("small2", 2, 4),
        ("small3", 1, 2),
        ("small3", 3, 1),
    ],
)
def test_the_next_step_of_an_engine_equals_that_of_deepspeed(made, case, stage, ranks):
    loss, weights, (counters, client, _) = harness.our_next_step(
        case, made / case, stage, ranks
    )
    theirs = harness.next_step(made / case / "next.pt")
    assert loss == pytest.approx(theirs["loss"], abs=1e-5)
    close(weights, theirs["after"])
    assert counters == (2, 8, 0, LR, 1.0) and client == {"iteration": 2}


@pytest.mark.parametrize(
    "case", ["small0_fp16", "small1_fp16", "small3_bf16", "small1_bf16_fp32"]
)
def test_training_in_16_bits_continues_with_the_masters_and_the_loss_scale(made, case):
    loss, weights, (counters, *_) = harness.our_next_step(case, made / case, 1, 2)
    assert counters[4] == (256 if "fp16" in case else 1)
    theirs = harness.next_step(made / case / "next.pt")
    assert loss == pytest.approx(theirs["loss"], rel=2e-3)  # of 16 bits
    before = read_engine_folder(made / case / "global_step2").tensors["weight"]
    after = (
        harness.step_of_torch(
            made / case / "global_step2" / "mp_rank_00_model_states.pt"
        )
        if case == "small0_fp16"
        else theirs["after"]
    )
    for name, weight in after.items():
        start = before[name].read().float().view(weight.shape)
        step, expected = weights[name] - start, weight - start
        assert (step - expected).norm() < 0.02 * expected.norm(), (
            name
        )  # of gradients in 16 bits


def test_weights_alone_leave_counters_and_scheduler(made):
    _, _, (counters, *_) = harness.our_next_step(
        "small2", made / "small2", 1, 1, load_optimizer_states=False
    )
    assert counters[:3] == (0, 0, 0)


# -------------------------------------------------------------------------------- our GPT continues
def gpt_step(checkpoint, layout: str, tmp_path):
    """(loss, whole weights) of one step of a run of ours at a layout, from a checkpoint in our terms."""
    request = parse_layout(layout, mbs="1")
    options = {
        name: value
        for name, value in checkpoint.model.items()
        if name not in ("hidden_dropout", "attention_dropout")
    }
    job = options | {
        "mock_data": True,
        "seq_length": 8,
        "global_batch_size": 4,
        "lr": LR,
        "adam_eps": 1e-4,
        "lr_decay_style": "constant",
        "train_iters": 9,
        "weight_decay": 0.1,
        "clip_grad": 0.5,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "make_vocab_size_divisible_by": 4,
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    config = parse(
        ["--config", str(tmp_path / "job.yaml"), *request.flags],
        world_size=request.world_size,
    )
    samples = modules.tokens_of(runs.STEPS)

    def load(engine):
        fill(
            plan_filling(all_pieces(engine), checkpoint.tensors),
            engine.mesh.coordinates,
        )
        engine.optimizer.load_extra_state(
            {"num_updates": checkpoint.progress.num_updates}
        )
        engine.optimizer.after_load()

    def main(rank, world):
        mesh = Mesh(
            config.grid(request.world_size), rank, world.connect, torch.device("cpu")
        )
        return train_layout(config, mesh, 1, samples, watch=load)

    trace, weights = merge(run_ranks(request.world_size, main))
    return trace.losses[0], weights


def after_in_our_terms(checkpoint, theirs, folder, wishes=THIRDS):
    """The weights after DeepSpeed's step under our names."""
    raw = deepspeed_format.read_raw(folder, wishes)
    after = {
        name.removeprefix("tied_modules.embed."): tensor
        for name, tensor in theirs["after"].items()
    }
    names = {
        name: name if name in after else name.partition(".")[2]
        for name in raw.tensors["weight"]
    }
    assert sorted(names.values()) == sorted(after), (
        "a tied weight is stored once, in the first layer's file"
    )
    stored = {
        name: replace(tensor, read=lambda name=name: after[names[name]])
        for name, tensor in raw.tensors["weight"].items()
    }
    found = deepspeed_format.in_our_terms(
        replace(raw, tensors={"weight": stored}), folder, wishes
    )
    return {name: tensor.read() for name, tensor in found.tensors["weight"].items()}


@pytest.mark.parametrize(
    "case, layout",
    [("llama1", "tp=2"), ("llama3", "pp=2,dp=2,zero=1"), ("mds_pipe1", "tp=2")],
)
def test_the_next_step_of_a_run_equals_that_of_deepspeed(made, case, layout, tmp_path):
    folder = made / case
    assert (
        detected(folder).name == detected(folder / "global_step2").name == "deepspeed"
    )
    checkpoint = deepspeed_format.read(folder, THIRDS)
    loss, weights = gpt_step(checkpoint, layout, tmp_path)
    theirs = harness.next_step(folder / "next.pt")
    assert loss == pytest.approx(theirs["loss"], abs=1e-5)
    close(weights, after_in_our_terms(checkpoint, theirs, folder))


# ------------------------------------------------------------------------------ DeepSpeed continues
@pytest.fixture(scope="module")
def read_back(made, tmp_path_factory):
    """What DeepSpeed computes after it loaded universal folders that were made of checkpoints of ours.

    case → (content of its files, the checkpoint of ours). They are read at other stages than they were saved.
    """
    folder, own, words = tmp_path_factory.mktemp("universal"), {}, []
    for case, reader in (
        ("llama1", "llama3"),
        ("llama3", "llama1"),
        ("mds_pipe2_bf16", "mds_pipe2_bf16"),
    ):
        first = deepspeed_format.read(made / case, THIRDS)
        format_of("megatron_ds").write(first, folder / f"own {case}", Wishes())
        own[case] = format_of("megatron_ds").read(folder / f"own {case}", Wishes())
        format_of("deepspeed-universal").write(own[case], folder / case, Wishes())
        words += [reader, folder / case, folder / f"{case}.pt"]
    harness.run_deepspeed("read", *words)
    return {
        case: (harness.next_step(folder / f"{case}.pt"), checkpoint)
        for case, checkpoint in own.items()
    }


@pytest.mark.parametrize("case", ["llama1", "llama3", "mds_pipe2_bf16"])
def test_deepspeed_continues_from_a_universal_folder_of_ours_as_from_its_own(
    made, read_back, case
):
    found, theirs = read_back[case][0], harness.next_step(made / case / "next.pt")
    assert found["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    close(found["before"], theirs["before"])
    # DeepSpeed's reader at stage 3 gives the groups of parameters one common counter of steps, so it makes
    # the step of the first group only as before.
    first_group = {
        name: tensor
        for name, tensor in theirs["after"].items()
        if case != "llama1" or tensor.dim() > 1
    }
    close(found["after"], first_group)
    if theirs["logits"] is not None:
        torch.testing.assert_close(found["logits"], theirs["logits"], rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------- hostile files
def swap(folder):
    first, second = sorted(folder.glob("*optim_states.pt"))
    first.rename(folder / "kept")
    second.rename(first)
    (folder / "kept").rename(second)


def truncate(folder):
    file = sorted(folder.glob("*optim_states.pt"))[0]
    file.write_bytes(file.read_bytes()[:-400])


class Code:
    def __reduce__(self):
        return os.system, ("touch executed",)


def with_code(folder):
    file = sorted(folder.glob("*optim_states.pt"))[0]
    torch.save({"optimizer_state_dict": Code()}, file)


def without_a_rank(folder):
    sorted(folder.glob("*optim_states.pt"))[1].unlink()


def of_another_save(folder):
    file = sorted(folder.glob("*optim_states.pt"))[1]
    content = torch.load(file, weights_only=False)
    for state in content["optimizer_state_dict"]["base_optimizer_state"][
        "state"
    ].values():
        state["step"] += 1
    torch.save(content, file)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (swap, "Files of several checkpoints or ranks are mixed up"),
        (truncate, "is refused or damaged"),
        (with_code, "names (posix|nt).system"),
        (of_another_save, r"have made \[2, 3\] steps"),
        (
            without_a_rank,
            "has optim_states of 1 data-parallel ranks, and 2 ranks saved it",
        ),
    ],
)
def test_a_spoiled_checkpoint_is_refused_and_nothing_is_written_or_executed(
    made, spoil, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made / "llama1", tmp_path / "spoiled")
    spoil(tmp_path / "spoiled" / "global_step2")
    with pytest.raises(CheckpointError, match=message):
        run_tool(["--load", "spoiled", "--save", "target"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spoiled"]


def test_files_of_another_model_and_an_unknown_packing_are_refused(made, tmp_path):
    shutil.copytree(made / "llama3", tmp_path / "other")
    other = json.dumps(LLAMA_CONFIG | {"intermediate_size": 20})
    (tmp_path / "other" / "config.json").write_text(other)
    with pytest.raises(
        CheckpointError,
        match="not have the shape that the settings describe: .*gate_proj",
    ):
        deepspeed_format.read(tmp_path / "other", Wishes())
    with pytest.raises(CheckpointError, match="--qkv-packing thirds"):
        deepspeed_format.read(made / "mds_pipe1", Wishes())
    with pytest.raises(CheckpointError, match="21 parameters that the module lacks"):
        harness.our_next_step("small0", made / "llama1", 0, 1)


# ------------------------------------------------------------------------------------------- the page
def test_the_commands_of_the_page_run(made, tmp_path, monkeypatch):
    page = (
        (ROOT / "docs/start/migrate.md")
        .read_text(encoding="utf-8")
        .replace("\\\n", " ")
    )
    commands = [
        line.split()
        for line in page.splitlines()
        if " --load saved " in line or line.endswith("--to deepspeed-universal")
    ]
    shutil.copytree(made / "llama1", tmp_path / "saved")
    monkeypatch.chdir(tmp_path)
    assert len(commands) == 3
    for words in commands:
        if words[0] == "torchrun":
            script = str(ROOT / words[3])
            done = subprocess.run(
                [
                    warm_python(),
                    "-m",
                    "torch.distributed.run",
                    *words[1:3],
                    script,
                    *words[4:],
                ],
                capture_output=True,
                text=True,
                timeout=HUNG,
            )
            assert done.returncode == 0, done.stderr[-3000:]
            assert (tmp_path / "runs/a/iter_0000003").is_dir()
        else:
            assert run_tool(words[2:]) == 0
    assert (
        tmp_path / "universal/global_step2_universal/zero/lm_head.weight/fp32.pt"
    ).is_file()
