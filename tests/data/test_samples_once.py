"""A run that is killed and goes on elsewhere trains on every sample once: told by a log of what each rank was
given."""

import json
from functools import partial

import numpy as np
import pytest

from megatron_ds.data.samples.gpt_corpus import open_gpt_dataset
from megatron_ds.data.text.indexed import IndexedDataset, IndexedWriter
from tests.harness.pretraining import SEQ_LENGTH, TINY, VOCAB, run_pretrain, train
from tests.harness.spoilers import samples_logged

pytestmark = pytest.mark.processes

SAMPLES, SAVED_EVERY = 48, 2  # batches of 4, 4, 4, 4, then of 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    draw, prefix = np.random.default_rng(6), tmp_path_factory.mktemp("corpus") / "text"
    with IndexedWriter(prefix, np.uint16) as writer:
        for length in draw.integers(3, 60, size=60):
            writer.add_document(draw.integers(0, VOCAB, length))
    return prefix


def logged(path):
    """{step: {place in the stream: tokens}} of one process group's life; tensor-parallel ranks must agree."""
    steps = {}
    for step, _, rows in map(json.loads, path.read_text().splitlines()):
        for place, tokens in rows:
            assert steps.setdefault(step, {}).setdefault(place, tokens) == tokens
    return steps


@pytest.mark.quick
def test_a_run_killed_twice_and_resumed_with_other_ranks_sees_each_sample_once(
    tmp_path, corpus
):
    job = [
        *TINY,
        "--data-path",
        corpus,
        "--split",
        "100,0,0",
        "--train-samples",
        SAMPLES,
        "--rampup-batch-size",
        4,
        4,
        16,
        "--save",
        tmp_path / "run",
        "--load",
        tmp_path / "run",
        "--save-interval",
        SAVED_EVERY,
    ]
    at = job.index("--lr-warmup-iters")
    job[at : at + 2] = []
    job[job.index("--global-batch-size") + 1] = "8"
    lives = [  # ranks, flags, step in which a rank is killed, its number
        (2, ["--num-workers", "3", "--zero-stage", "1"], 4, 1),  # DP 2
        (
            2,
            ["--tensor-model-parallel-size", "2", "--data-readers", "first"],
            7,
            0,
        ),  # DP 1
        (1, ["--micro-batch-size", "4", "--num-workers", "0"], None, 0),
    ]
    paths = [tmp_path / f"life{i}.jsonl" for i in range(len(lives))]
    for path, (ranks, flags, kill_at, victim) in zip(paths, lives):
        spoil = partial(samples_logged, path=str(path), kill_at=kill_at, victim=victim)
        if kill_at is None:
            train(ranks, [*job, *flags], spoil=spoil)
        else:
            with pytest.raises(RuntimeError, match="code -9"):
                run_pretrain(ranks, [*job, *flags], spoil=spoil)

    told = [logged(path) for path in paths]
    begins = [min(steps) for steps in told]
    # from the last checkpoint, each time
    assert begins == [1, 3, 7] and [max(steps) for steps in told] == [4, 7, 8]
    trained = {}  # what is in the weights at the end: later lives win
    for steps in told:
        trained |= steps
    assert [len(trained[step]) for step in sorted(trained)] == [4] * 4 + [8] * 4
    places = [place for step in sorted(trained) for place in sorted(trained[step])]
    assert places == list(range(SAMPLES))
    dataset = open_gpt_dataset(
        IndexedDataset(corpus),
        range(60),
        title="GPTDataset-train",
        seq_length=SEQ_LENGTH,
        num_samples=SAMPLES,
        seed=1234,
        cache=tmp_path / "cache",
    )
    for rows in trained.values():
        for place, tokens in rows.items():
            assert tokens == dataset[place]["tokens"][:-1].tolist()
    # trained again, the same
    assert (
        told[0][3] == told[1][3]
        and told[0][4] == told[1][4]
        and told[1][7] == told[2][7]
    )
