"""Runs that stop and go on, on real ranks: the same bits at the same layout, the same loss at others."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch

from megatron_ds.checkpoint.load import latest
from megatron_ds.data.text.indexed import IndexedWriter
from tests.harness.pretraining import (
    GLOBAL_BATCH,
    MOCK,
    STEPS,
    TINY,
    VOCAB,
    losses,
    run_file,
    run_pretrain,
    same_bits,
    saved_state,
    train,
)
from tests.harness.spoilers import killed_in_save, state_written_instead_of_training

pytestmark = pytest.mark.processes

HALF = STEPS // 2
TP2_PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel".split()
FP16 = f"--fp16 --initial-loss-scale {2.0**24} --hysteresis 1 --loss-scale-window 2".split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of random lengths, so that samples begin inside documents and the shuffle matters."""
    draw, prefix = np.random.default_rng(5), tmp_path_factory.mktemp("corpus") / "text"
    with IndexedWriter(prefix, np.uint16) as writer:
        for length in draw.integers(3, 60, size=40):
            writer.add_document(draw.integers(0, VOCAB, length))
    return [
        "--data-path",
        str(prefix),
        *f"--split 100,0,0 --train-iters {STEPS}".split(),
    ]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Six steps on TP 2 × PP 2 × SP with a checkpoint after three."""
    folder = tmp_path_factory.mktemp("whole")
    train(4, [*MOCK, *TP2_PP2, "--save", folder, "--save-interval", HALF])
    return folder


def assert_same_run(a, b, steps=STEPS):
    """The last checkpoints, and all that was told of the steps on the way."""
    assert same_bits(saved_state(a, steps), saved_state(b, steps))
    one, other = run_file(a, steps), run_file(b, steps)
    assert (
        one["progress"] == other["progress"] and one["optimizer"] == other["optimizer"]
    )
    assert losses(a) == losses(b)


@pytest.mark.quick
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "ranks, flags",
    [
        (4, TP2_PP2),
        (2, ["--zero-stage", "1", *FP16]),
        (
            2,
            (
                "--pipeline-model-parallel-size 2 --bf16 --untie-embeddings-and-output-weights "
                "--eod-mask-loss"
            ).split(),
        ),
    ],
    ids=["fp32 tp2 pp2 sp", "fp16 dp2 zero1", "bf16 pp2"],
)
def test_a_run_that_stops_and_goes_on_has_the_bits_of_one_that_never_stopped(
    tmp_path, corpus, ranks, flags
):
    job = [*TINY, *corpus, *flags]
    train(ranks, [*job, "--save", tmp_path / "whole"])
    stopping = [
        *job,
        "--save",
        tmp_path / "parts",
        "--load",
        tmp_path / "parts",
        "--exit-interval",
        HALF,
    ]
    train(ranks, stopping)
    assert (
        list(losses(tmp_path / "parts")) == [1, 2, 3]
        and latest(tmp_path / "parts") == HALF
    )
    train(ranks, stopping)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    if "--fp16" in flags:
        halfway, end = (
            run_file(tmp_path / "parts", step)["optimizer"]["loss_scale"]
            for step in (HALF, STEPS)
        )
        assert end not in (halfway, 2.0**24), (
            "the scale never moved: the test shows nothing of it"
        )


def test_a_lost_scaler_state_or_data_position_would_show(tmp_path):
    """The test above compares what it should: resuming with the optimizer's state forgotten gives other
    bits."""
    job = [
        *MOCK,
        "--save",
        tmp_path / "parts",
        "--load",
        tmp_path / "parts",
        "--exit-interval",
        HALF,
    ]
    train(1, job)
    train(1, [*MOCK, "--save", tmp_path / "whole"])
    train(1, [*job, "--no-load-optim"])
    assert not same_bits(
        saved_state(tmp_path / "whole", STEPS), saved_state(tmp_path / "parts", STEPS)
    )


@pytest.mark.quick
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "ranks, flags",
    [
        (1, []),
        (2, ["--zero-stage", "1"]),
        (4, ["--pipeline-model-parallel-size", "2", "--zero-stage", "1"]),
        (2, ["--tensor-model-parallel-size", "2", "--recompute-granularity", "full"]),
    ],
    ids=["one rank", "dp2 zero1", "pp2 dp2 zero1", "tp2"],
)
def test_another_layout_goes_on_with_the_same_loss(tmp_path, whole_run, ranks, flags):
    halfway(whole_run, tmp_path / "half")
    train(
        ranks, [*MOCK, *flags, "--load", tmp_path / "half", "--save", tmp_path / "rest"]
    )
    rest = losses(tmp_path / "rest")
    assert list(rest) == [4, 5, 6]
    assert rest == pytest.approx(
        {step: losses(whole_run)[step] for step in rest}, rel=1e-6
    )
    whole = saved_state(whole_run, STEPS)
    for name, tensor in saved_state(tmp_path / "rest", STEPS).items():
        if not name.endswith(
            "linear_qkv.bias"
        ):  # whose key part is rounding noise divided by itself
            torch.testing.assert_close(tensor, whole[name], rtol=1e-3, atol=1e-5)


def halfway(whole, folder):
    """A copy of a run's folder as it was after its first checkpoint."""
    folder.mkdir()
    shutil.copytree(whole / f"iter_{HALF:07d}", folder / f"iter_{HALF:07d}")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(HALF))
    return folder


def test_run_json_runs_the_job_again(tmp_path, whole_run):
    saved = whole_run / f"iter_{STEPS:07d}" / "run.json"
    train(4, ["--config", saved, "--save", tmp_path / "again"])
    assert_same_run(whole_run, tmp_path / "again")


def test_run_json_of_a_job_that_is_not_done_finishes_it(tmp_path):
    folder = tmp_path / "run"
    train(2, [*MOCK, "--save", folder, "--load", folder, "--exit-interval", HALF])
    before = losses(folder)
    train(2, ["--config", folder / f"iter_{HALF:07d}" / "run.json"])
    assert (
        list(losses(folder)) == [1, 2, 3, 4, 5, 6]
        and losses(folder).items() >= before.items()
    )


def loaded(tmp_path, flags):
    """(progress, state) of a run of one rank that has just loaded."""
    path = tmp_path / "state.pt"
    train(
        1,
        [*MOCK, *flags],
        spoil=partial(state_written_instead_of_training, path=str(path)),
    )
    return torch.load(path)


def test_finetune_takes_the_weights_and_begins_anew(tmp_path, whole_run):
    progress, state = loaded(tmp_path, ["--load", whole_run, "--finetune"])
    saved = saved_state(whole_run, STEPS)
    assert set(progress.values()) == {0}
    for name, tensor in state.items():
        assert torch.equal(
            tensor,
            saved[name] if name.startswith("weight/") else torch.zeros_like(tensor),
        ), name


def test_finetune_may_use_other_data(tmp_path, whole_run, corpus):
    other = [*TINY, *corpus, "--load", str(whole_run)]
    refused = run_pretrain(1, other)[0]
    assert refused.code == 2 and "mock_data" in refused.err
    train(1, [*other, "--finetune"])


def test_no_load_optim_keeps_the_place_and_forgets_the_moments(tmp_path, whole_run):
    progress, state = loaded(tmp_path, ["--load", whole_run, "--no-load-optim"])
    saved = saved_state(whole_run, STEPS)
    assert progress["step"] == STEPS and progress["samples"] == STEPS * GLOBAL_BATCH
    for name, tensor in state.items():
        assert torch.equal(
            tensor,
            saved[name] if name.startswith("weight/") else torch.zeros_like(tensor),
        ), name


def test_loading_takes_all_of_the_state_otherwise(tmp_path, whole_run):
    _, state = loaded(tmp_path, ["--load", whole_run])
    assert same_bits(state, saved_state(whole_run, STEPS))


def test_a_checkpoint_without_optimizer_state_says_so(tmp_path):
    train(1, [*MOCK, "--save", tmp_path / "weights", "--no-save-optim"])
    assert {
        name.partition("/")[0] for name in saved_state(tmp_path / "weights", STEPS)
    } == {"weight"}
    refused = run_pretrain(1, [*MOCK, "--load", tmp_path / "weights"])[0]
    assert (
        refused.code == 2
        and "exp_avg" in refused.err
        and "--no-load-optim" in refused.err
    )
    loaded(tmp_path, ["--load", tmp_path / "weights", "--no-load-optim"])


def test_a_checkpoint_of_another_model_is_refused_naming_each_field_with_both_values(
    whole_run,
):
    job = without(without(MOCK, "--num-layers"), "--hidden-size")
    zero, one = run_pretrain(
        2,
        [
            *job,
            *"--num-layers 3 --hidden-size 64 --swiglu".split(),
            "--load",
            whole_run,
        ],
    )
    assert zero.code == one.code == 2
    for field in (
        "num_layers: checkpoint 2, this run 3",
        "hidden_size: checkpoint 32, this run 64",
        "head_dim: checkpoint 8, this run 16",
        "activation: checkpoint 'gelu', this run 'swiglu'",
    ):
        assert field in zero.err
    assert "Traceback" not in zero.err and one.err == "", "one rank tells it for all"


def without(job, flag):
    """The job's flags without one that takes a value."""
    return [word for before, word in zip(["", *job], job) if flag not in (before, word)]


@pytest.mark.parametrize(
    "what, flags", [("tokenizer", ["--vocab-size", "60"]), ("seed", ["--seed", "99"])]
)
def test_another_tokenizer_or_data_order_is_refused(whole_run, what, flags):
    refused = run_pretrain(1, [*without(MOCK, flags[0]), *flags, "--load", whole_run])[
        0
    ]
    assert refused.code == 2 and what in refused.err


@pytest.mark.parametrize(
    "victim, change", [(1, 1), (0, 6)], ids=["before it writes", "rank 0, all written"]
)
def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_previous_checkpoint(
    tmp_path, whole_run, victim, change
):
    folder = halfway(whole_run, tmp_path / "run")
    job = [
        *MOCK,
        "--tensor-model-parallel-size",
        "2",
        "--save",
        folder,
        "--load",
        folder,
        "--save-interval",
        "2",
    ]
    with pytest.raises(RuntimeError, match=f"rank {victim} of 2 died in .*code -9"):
        run_pretrain(
            2, job, spoil=partial(killed_in_save, step=4, change=change, victim=victim)
        )
    assert latest(folder) == HALF
    train(2, job)
    assert latest(folder) == STEPS and list(losses(folder)) == [4, 5, 6]
    assert losses(folder) == pytest.approx(
        {step: losses(whole_run)[step] for step in (4, 5, 6)}, rel=1e-6
    )
    assert not [path for path in folder.iterdir() if path.name.startswith(".iter")]
    json.loads((folder / f"iter_{STEPS:07d}" / "run.json").read_text())
