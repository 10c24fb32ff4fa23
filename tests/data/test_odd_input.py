"""Odd but legal: what looks like a mistake and is none trains like anything else."""

import pytest

from tests.harness.pretraining import (
    GLOBAL_BATCH,
    MOCK,
    TINY,
    records,
    saved_state,
    train,
)

pytestmark = pytest.mark.processes

TP2, PP2, PP4 = (
    ["--tensor-model-parallel-size", "2"],
    *(["--pipeline-model-parallel-size", n] for n in "24"),
)
SAMPLES = [*TINY, "--mock-data", "--lr-warmup-iters", "0"]
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--num-query-groups 2 --untie-embeddings-and-output-weights"
).split()


def losses(tmp_path, ranks: int, argv) -> list[float]:
    folder = tmp_path / f"on {ranks} with {len(argv)}"
    train(ranks, [*argv, "--metrics-path", str(folder / "metrics.jsonl")])
    return [record["loss"] for record in records(folder)]


@pytest.mark.parametrize(
    "flags, steps",
    [
        (["--global-batch-size", "1"], 6),
        (["--seq-length", "1", "--max-position-embeddings", "1"], 6),
        (["--vocab-size", "1"], 6),
        (["--vocab-size", "61", "--make-vocab-size-divisible-by", "7"], 6),
        (["--num-layers", "1", "--num-attention-heads", "1", "--kv-channels", "5"], 6),
        (["--optimizer", "sgd", "--sgd-momentum", "0"], 6),
        (
            "--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.1".split(),
            6,
        ),
        (["--fp16", "--loss-scale", "128"], 6),
        (["--lr-decay-style", "inverse-square-root"], 6),
        (["--num-workers", "0", "--clip-grad", "0", "--log-interval", "2"], 3),
        (["--eval-interval", "1000", "--eval-iters", "1"], 6),
    ],
)
def test_one_process_trains_with(tmp_path, flags, steps):
    assert len(losses(tmp_path, 1, [*MOCK, *flags])) == steps


@pytest.mark.parametrize(
    "ranks, flags",
    [
        (
            4,
            [*PP4, "--num-layers", "4", "--global-batch-size", "2"],
        ),  # fewer micro-batches than stages
        (4, [*PP4, "--num-layers", "4"]),  # a layer for each stage
        (4, [*PP4, "--pipeline-layout", "E|t|t|L"]),  # the embedding by itself
        (3, ["--global-batch-size", "9"]),
        (
            4,
            [
                *TP2,
                *"--make-vocab-size-divisible-by 128 --label-smoothing 0.1 --zero-stage 1".split(),
            ],
        ),
        (2, [*TP2, "--seq-length", "1", "--max-position-embeddings", "1"]),
        (4, [*TP2, *PP2, *LLAMA, "--sequence-parallel"]),
        (2, [*PP2, "--optimizer", "sgd", "--calculate-per-token-loss"]),
    ],
)
def test_the_layout_does_not_show_in_the_loss_with(tmp_path, ranks, flags):
    model = [
        flag for i, flag in enumerate(flags) if not {flag, flags[i - 1]} & LAYOUT_FLAGS
    ]
    ours, alone = (
        losses(tmp_path, ranks, [*MOCK, *flags]),
        losses(tmp_path, 1, [*MOCK, *model]),
    )
    assert ours == pytest.approx(alone, rel=1e-6) and len(ours) == 6


LAYOUT_FLAGS = {
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--pipeline-layout",
    "--zero-stage",
    "--sequence-parallel",
}


def test_samples_that_fill_no_batch_are_left_over(tmp_path):
    assert (
        len(losses(tmp_path, 1, [*SAMPLES, "--train-samples", "23"]))
        == 23 // GLOBAL_BATCH
    )


def test_a_growing_batch_counts_the_same_steps_on_two_ranks(tmp_path):
    growing = [*SAMPLES, "--train-samples", "30", "--rampup-batch-size", "2", "2", "12"]
    alone, both = losses(tmp_path, 1, growing), losses(tmp_path, 2, growing)
    assert both == pytest.approx(alone, rel=1e-6) and len(alone) > 30 // GLOBAL_BATCH


@pytest.mark.parametrize("ranks, layout", [(1, []), (2, PP2)])
def test_no_iterations_only_evaluate_and_save_what_was_loaded(tmp_path, ranks, layout):
    saved, again = tmp_path / "saved", tmp_path / "again"
    train(1, [*MOCK, "--save", str(saved), "--eval-iters", "2", "--eval-interval", "3"])
    only = [
        *MOCK,
        *layout,
        *"--train-iters 0 --lr-warmup-iters 0 --eval-iters 2 --eval-interval 3".split(),
    ]
    train(
        ranks,
        [*only, "--load", str(saved), "--metrics-path", str(again / "metrics.jsonl")],
    )
    assert [r["step"] for r in records(again, "validation")] == [6] and records(
        again, "train"
    ) == []
    assert records(again, "test")[0]["loss"] == pytest.approx(
        records(saved, "test")[0]["loss"], rel=1e-6
    )


def test_no_iterations_and_nothing_to_load_save_the_initial_weights(tmp_path):
    first = [*MOCK, "--train-iters", "0", "--lr-warmup-iters", "0", "--save"]
    train(1, [*first, str(tmp_path / "one")])
    train(2, [*first, str(tmp_path / "two"), *TP2])
    one, two = (saved_state(tmp_path / name, 0) for name in ("one", "two"))
    assert (
        all((one[name] == two[name]).all() for name in one) and one.keys() == two.keys()
    )
