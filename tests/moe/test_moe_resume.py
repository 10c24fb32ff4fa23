"""Runs with experts that stop and go on, on real ranks; starts from other checkpoints; upcycled ones."""

from functools import partial

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.data.tokenizers import build_tokenizer
from megatron_ds.errors import CheckpointError
from megatron_ds.extensions.upcycling.upcycle_checkpoint import run_tool
from megatron_ds.training.run_checkpoint import check_same_run
from megatron_ds.training.run_description import describe_run
from tests.harness.pretraining import (
    MOCK,
    STEPS,
    losses,
    run_file,
    run_pretrain,
    saved_state,
    train,
)
from tests.harness.spoilers import state_written_instead_of_training
from tests.training.test_resume import HALF, halfway

pytestmark = pytest.mark.processes

EXPERTS = (
    "--num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-dtype fp64"
).split()
ONE_STEP = ["--exit-interval", "1"]
JOB = [*MOCK, *EXPERTS]
EP2_TP2 = "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel".split()
BIAS = "weight/decoder.layers.0.mlp.router.expert_bias"


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Six steps at EP 2 × TP 2 with a checkpoint after three."""
    folder = tmp_path_factory.mktemp("whole")
    train(4, [*JOB, *EP2_TP2, "--save", folder, "--save-interval", HALF])
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Weights of a dense model after one step."""
    folder = tmp_path_factory.mktemp("dense")
    train(1, [*MOCK, *ONE_STEP, "--save", folder, "--no-save-optim"])
    return folder


@pytest.mark.quick
@pytest.mark.parametrize(
    "ranks, flags",
    [(4, ["--expert-model-parallel-size", "4", "--zero-stage", "1"]), (1, [])],
    ids=["ep4 zero1", "one rank"],
)
def test_another_layout_goes_on_with_the_same_loss(tmp_path, whole_run, ranks, flags):
    halfway(whole_run, tmp_path / "half")
    train(
        ranks, [*JOB, *flags, "--load", tmp_path / "half", "--save", tmp_path / "rest"]
    )
    rest, whole = losses(tmp_path / "rest"), saved_state(whole_run, STEPS)
    assert list(rest) == [4, 5, 6]
    assert rest == pytest.approx(
        {step: losses(whole_run)[step] for step in rest}, rel=1e-6
    )
    assert whole[BIAS].any()
    for name, tensor in saved_state(tmp_path / "rest", STEPS).items():
        if not name.endswith(
            "linear_qkv.bias"
        ):  # whose key part is rounding noise divided by itself
            torch.testing.assert_close(tensor, whole[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("flag, step", [("--finetune", 0), ("--no-load-optim", STEPS)])
def test_weights_alone_are_loaded_with_the_bias_of_experts(
    tmp_path, whole_run, flag, step
):
    path = tmp_path / "state.pt"
    train(
        1,
        [*JOB, "--load", whole_run, flag],
        spoil=partial(state_written_instead_of_training, path=str(path)),
    )
    (progress, state), saved = torch.load(path), saved_state(whole_run, STEPS)
    assert progress["step"] == step and state.keys() == saved.keys()
    for name, tensor in state.items():
        assert torch.equal(
            tensor,
            saved[name] if name.startswith("weight/") else torch.zeros_like(tensor),
        ), name


def test_a_save_without_optimizer_state_keeps_the_bias(tmp_path, whole_run):
    train(
        4,
        [
            *JOB,
            "--load",
            whole_run,
            "--finetune",
            *ONE_STEP,
            "--save",
            tmp_path,
            *"--no-save-optim --expert-model-parallel-size 4 --zero-stage 3".split(),
        ],
    )
    state, before = saved_state(tmp_path, 1), saved_state(whole_run, STEPS)
    assert {name.partition("/")[0] for name in state} == {"weight"}
    moved = (
        state[BIAS] - before[BIAS]
    )  # by one update of ±0.001, or 0 where it was balanced
    assert moved.any() and moved.abs().max().item() == pytest.approx(1e-3, rel=1e-3)


def description(flags, folder="x"):
    config = parse([*MOCK, "--load", str(folder), *flags])
    about = describe_run(
        config, config, build_tokenizer(config.data, config.model), "id"
    )
    return config.checkpoint, about | {
        "progress": {"step": 1},
        "optimizer": {"num_updates": 1},
    }


@pytest.mark.parametrize(
    "there, here, difference",
    [
        (
            EXPERTS,
            ["--num-experts", "8", *EXPERTS[2:]],
            r"model\.experts: checkpoint \[4, 4\], this run \[8, 8\]",
        ),
        (
            EXPERTS,
            [*EXPERTS, "--moe-layer-freq", "2"],
            r"model\.experts: checkpoint \[4, 4\], this run \[4, 0\]",
        ),
        (
            EXPERTS,
            [*EXPERTS, "--moe-router-topk", "3"],
            r"model\.moe_router_topk: checkpoint 2, this run 3",
        ),
        (
            EXPERTS,
            [*EXPERTS, "--moe-ffn-hidden-size", "64"],
            r"model\.expert_ffn_size: checkpoint 128, this run 64",
        ),
        (EXPERTS, [], r"model\.experts: checkpoint \[4, 4\], this run \[0, 0\]"),
    ],
    ids=["number", "layers", "k", "width", "dense run"],
)
@pytest.mark.parametrize("finetune", [[], ["--finetune"]], ids=["resume", "finetune"])
def test_other_experts_are_refused_by_one_field_with_both_values(
    there, here, difference, finetune
):
    (_, saved), (wanted, now) = description(there), description([*here, *finetune])
    check_same_run(saved, description([*there, *finetune])[1], wanted)
    with pytest.raises(CheckpointError, match=difference) as caught:
        check_same_run(saved, now, wanted)
    assert str(caught.value).count(
        ": checkpoint "
    ) == 1 and "Give the flags it was saved with" in str(caught.value)


def test_a_run_with_experts_refuses_a_dense_checkpoint_and_names_the_tool(dense):
    refused = run_pretrain(1, [*JOB, "--load", dense, "--finetune"])[0]
    assert refused.code == 2 and "Traceback" not in refused.err
    assert "model.experts: checkpoint [0, 0], this run [4, 4]" in refused.err
    assert refused.err.count(": checkpoint ") == 1
    assert f"megatron-ds upcycle --load {dense} --save" in refused.err


def test_an_upcycled_checkpoint_begins_with_the_loss_of_the_dense_model(
    tmp_path, dense
):
    run_tool(
        [
            "--load",
            str(dense),
            "--save",
            str(tmp_path / "new"),
            *"--num-experts 4 --moe-upcycling-granularity 2".split(),
        ]
    )
    begin = ["--hidden-dropout", "0", "--attention-dropout", "0"]
    train(
        1,
        [
            *MOCK,
            *begin,
            *ONE_STEP,
            "--load",
            dense,
            "--finetune",
            "--save",
            tmp_path / "dense",
        ],
    )
    run_json = tmp_path / "new" / "iter_0000001" / "run.json"
    train(
        2,
        [
            "--config",
            run_json,
            *begin,
            *ONE_STEP,
            "--save",
            tmp_path / "moe",
            "--expert-model-parallel-size",
            "2",
        ],
    )
    assert losses(tmp_path / "moe") == pytest.approx(
        losses(tmp_path / "dense"), rel=1e-6
    )
    train(
        1,
        [
            "--config",
            run_json,
            *begin,
            *"--no-finetune --no-load-optim --exit-interval 2".split(),
            "--save",
            tmp_path / "on",
        ],
    )
    assert (
        list(losses(tmp_path / "on")) == [2]
        and run_file(tmp_path / "on", 2)["progress"]["samples"] == 8
    )
