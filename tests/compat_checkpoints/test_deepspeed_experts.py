"""Checkpoints of DeepSpeed with experts continue here with its next step, at any expert-parallel size."""

import shutil

import pytest
import torch

from megatron_ds.compat.conversion.deepspeed.checkpoint import (
    read_engine_folder,
)
from megatron_ds.errors import CheckpointError
from tests.harness import deepspeed_checkpoints as harness
from tests.harness import deepspeed_runs as runs

pytestmark = [pytest.mark.processes, harness.needs_deepspeed]
CASES = [case for case in runs.CASES if case.startswith("experts")]
STEP = "global_step2"


@pytest.fixture(scope="module")
def made():
    """The folder with all cases."""
    return harness.made(experts=True)


@pytest.mark.parametrize("case", CASES)
def test_weights_of_all_experts_are_the_masters_that_deepspeed_shows(made, case):
    raw = read_engine_folder(made / case / STEP)
    before = harness.next_step(made / case / "next.pt")["before"]
    assert (
        raw.tensors["weight"].keys() == before.keys() == raw.tensors["exp_avg"].keys()
    )
    for name, tensor in before.items():
        found = raw.tensors["weight"][name].read()
        assert torch.equal(
            found.half().float() if case == "experts0_fp16" else found, tensor
        ), name
    assert len(raw.tensors["buffer"]) == 8 and raw.progress.samples == 16


@pytest.mark.parametrize(
    "case, stage, ranks",
    [("experts0", 0, 1), ("experts0", 2, 4), ("experts1", 3, 2), ("experts1", 1, 4)],
)
def test_the_next_step_of_an_engine_with_experts_equals_that_of_deepspeed(
    made, case, stage, ranks
):
    loss, weights, (counters, *_) = harness.our_next_step(
        case, made / case, stage, ranks
    )
    theirs = harness.next_step(made / case / "next.pt")
    assert loss == pytest.approx(theirs["loss"], abs=1e-5) and counters[:2] == (2, 16)
    for name, tensor in theirs["after"].items():
        assert not torch.equal(tensor, theirs["before"][name]), name
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5, msg=name)


def test_without_the_moments_the_next_step_is_another(made):
    _, weights, (counters, *_) = harness.our_next_step(
        "experts1", made / "experts1", 1, 2, load_optimizer_states=False
    )
    after = harness.next_step(made / "experts1" / "next.pt")["after"]
    assert (
        max(
            float((weights[name] - tensor).abs().max())
            for name, tensor in after.items()
        )
        > 1e-3
    )
    assert counters[:2] == (0, 0)


@pytest.mark.parametrize("case", ["experts0_fp16", "experts2_bf16"])
def test_experts_in_16_bits_continue_with_their_masters(made, case):
    _, weights, _ = harness.our_next_step(case, made / case, 1, 2)
    raw = read_engine_folder(made / case / STEP).tensors["weight"]
    theirs = harness.next_step(made / case / "next.pt")["after"]
    for name, tensor in theirs.items():
        start = raw[name].read()
        assert start.dtype == torch.float32
        step, expected = weights[name] - start, tensor - start
        if case == "experts2_bf16":  # in fp16 DeepSpeed shows rounded weights
            assert (step - expected).norm() < 0.05 * expected.norm(), name


# ---- Files that are missing, mixed up or damaged.


def expert(folder, layer, number):
    return folder / f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt"


def exchange(one, other):
    kept = one.with_name("kept")
    one.rename(kept)
    other.rename(one)
    kept.rename(other)


def changed(path, change):
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def widen(content):
    name = next(name for name in content if name.endswith("up.weight"))
    content[name] = torch.ones(7, 6)


SPOILED = {
    "missing": (
        "experts1",
        lambda folder: expert(folder, 1, 2).unlink(),
        "1 of 8 files of experts are missing, first that of layer 1, expert 2",
    ),
    "all missing": (
        "experts1",
        lambda folder: [path.unlink() for path in folder.glob("layer_*")],
        "records .4, 4. experts in its layers. Copy the missing files",
    ),
    "swapped": (
        "experts1",
        lambda folder: exchange(expert(folder, 0, 1), expert(folder, 0, 3)),
        "holds expert 3 of blocks.0, and by its name expert 1 of blocks.0: files are swapped",
    ),
    "swapped layers": (
        "experts0",
        lambda folder: exchange(expert(folder, 0, 1), expert(folder, 1, 1)),
        "holds expert 1 of blocks.1, and by its name expert 1 of blocks.0",
    ),
    "shape": (
        "experts0",
        lambda folder: changed(expert(folder, 0, 3), widen),
        "or shapes: up.weight",
    ),
    "extra": (
        "experts0",
        lambda folder: shutil.copy(expert(folder, 1, 3), expert(folder, 1, 4)),
        "the model has 2 layers with .4, 4. experts",
    ),
    "other tensor": (
        "experts0",
        lambda folder: changed(
            expert(folder, 1, 0), lambda content: content.update(adapter=torch.ones(2))
        ),
        "holds 'adapter', which is no tensor of an expert",
    ),
    "rank": (
        "experts0",
        lambda folder: (folder / "expp_rank_1_mp_rank_00_optim_states.pt").unlink(),
        "2 expert-parallel ranks saved it, and there are expp_rank files of 1",
    ),
    "first rank": (
        "experts0",
        lambda folder: (folder / "expp_rank_0_mp_rank_00_optim_states.pt").unlink(),
        "1 expp_rank files are missing, first that of expert-parallel rank 0",
    ),
    "swapped ranks": (
        "experts0",
        lambda folder: exchange(*sorted(folder.glob("expp_rank_*"))),
        "another expert-parallel rank or save than .*: files are swapped",
    ),
    "swapped shards": (
        "experts1",
        lambda folder: exchange(*sorted(folder.glob("zero_pp_*optim*"))[:2]),
        "mixed up",
    ),
    "shard": (
        "experts1",
        lambda folder: sorted(folder.glob("zero_pp_*optim*"))[3].unlink(),
        "has optim_states of 3 data-parallel ranks, and 4 ranks saved it",
    ),
    "order of ranks": (
        "experts1",
        lambda folder: changed(
            folder / "mp_rank_00_model_states.pt",
            lambda content: content["ds_config"].update(
                use_data_before_expert_parallelism=True
            ),
        ),
        "not read with use_data_before_expert_parallelism",
    ),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_a_spoiled_checkpoint_is_refused(made, spoiled, tmp_path):
    case, spoil, message = SPOILED[spoiled]
    shutil.copytree(made / case / STEP, tmp_path / STEP)
    read_engine_folder(tmp_path / STEP)
    spoil(tmp_path / STEP)
    with pytest.raises(CheckpointError, match=message):
        read_engine_folder(tmp_path / STEP)


@pytest.mark.parametrize("case", ["experts0_fp16", "experts2_bf16"])
def test_masters_of_other_experts_are_refused_when_they_are_read(made, case, tmp_path):
    name = "blocks.0.deepspeed_moe.experts.deepspeed_experts.2.up.weight"
    shutil.copytree(made / case / STEP, tmp_path / STEP)
    changed(expert(tmp_path / STEP, 0, 2), lambda content: content[name].mul_(1.1))
    weights = read_engine_folder(tmp_path / STEP).tensors["weight"]
    with pytest.raises(
        CheckpointError,
        match="not what the weight was rounded from.*expert-parallel rank",
    ):
        weights[name].read()
