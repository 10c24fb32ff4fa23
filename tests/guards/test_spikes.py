"""--skip-spikes: the update of a step with a large gradient is dropped, alike on all ranks, and its samples are
recorded."""

import contextlib
import json
import math
import random
from functools import partial

import numpy as np
import pytest

from megatron_ds.data.loading.loader import Loader
from megatron_ds.extensions.guards.spikes import Spike, SpikeGuard
from tests.harness.pretraining import (
    GLOBAL_BATCH,
    MOCK,
    losses,
    records,
    run_file,
    run_pretrain,
    same_bits,
    saved_state,
    train,
)

pytestmark = pytest.mark.processes

LENGTH = 10
FACTOR, QUANTILE, WINDOW = 1.01, 0.5, 3
TRAIN = [*MOCK, "--train-iters", LENGTH]
SKIP = (
    f"--skip-spikes {FACTOR} --skip-spikes-quantile {QUANTILE} "
    f"--skip-spikes-window {WINDOW}"
).split()


def spikes_of(folder) -> list[int]:
    return [record["step"] for record in records(folder, "spike")]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    train(1, [*TRAIN, *SKIP, "--save", folder])
    return folder


# ------------------------------------------------------------------ the rule
@pytest.mark.parametrize("quantile, window", [(0.5, 4), (0.9, 7), (1.0, 1), (0.01, 5)])
def test_the_bound_is_that_of_numpy(quantile, window):
    """Over random norms; those beyond the bound stay out of the window."""
    dice = random.Random(window)
    guard = SpikeGuard(1.3, quantile, window)
    kept, found = [], 0
    for _ in range(200):
        norm = dice.lognormvariate(0, 0.4)
        bound = math.inf
        if len(kept) >= window:
            bound = 1.3 * np.quantile(kept[-window:], quantile, method="inverted_cdf")
        assert guard.bound == bound
        spike = guard.count(norm)
        assert (spike is not None) == (norm > bound)
        found += spike is not None
        kept += [norm] if spike is None else []
    assert 5 < found < 195


def test_a_norm_that_is_not_finite_is_no_spike_and_is_not_kept():
    guard = SpikeGuard(2.0, 1.0, 1)
    assert guard.count(1.0) is None
    for norm in (math.nan, math.inf):
        assert guard.count(norm) is None
    assert guard.state() == {"norms": [1.0], "in_a_row": 0}
    assert guard.count(2.5) == Spike(2.5, 2.0, 1)
    assert guard.count(3.5) == Spike(3.5, 2.0, 2)


def test_state_goes_through_json_to_the_bit_and_into_another_window():
    guard = SpikeGuard(2.0, 0.5, 4)
    for norm in (0.1, 1 / 3, 0.7, 0.9, 50.0):
        guard.count(norm)
    state = json.loads(json.dumps(guard.state()))
    same, smaller = SpikeGuard(2.0, 0.5, 4), SpikeGuard(2.0, 0.5, 2)
    same.load_state(state)
    smaller.load_state(state)
    assert same.state() == guard.state() and same.in_a_row == 1
    assert list(smaller.norms) == [0.7, 0.9]


# ------------------------------------------------------------------ runs
@contextlib.contextmanager
def trained_by_hand(rank: int, *, path):
    """A plain loop in place of the trainer's: it leaves out the updates of spikes. Writes losses and spikes."""
    from megatron_ds.training.trainer import Trainer

    def run(self):
        optimizer = self.replica.optimizer
        kept, means, spikes = [], [], []
        p = self.progress
        while p.step < LENGTH:
            batch = self.replica.batches.training(self.loaders.train, p, GLOBAL_BATCH)
            optimizer.begin_step()
            found = self.replica.executor.run(batch.split(1), 1 / GLOBAL_BATCH)
            entries = self.replica.executor.entries
            means.append(self.replica.metrics.reduce(found, entries).loss)
            measured = optimizer.measure().tolist()
            norm = math.sqrt(measured[0])
            recent = sorted(kept[-WINDOW:])
            spike = len(recent) == WINDOW and norm > FACTOR * recent[WINDOW // 2]
            if spike:
                spikes.append(p.step + 1)
            else:
                kept.append(norm)
                rates = {name: rate(p) for name, rate in self.learning_rates.items()}
                optimizer.update(measured, rates, self.weight_decay(p))
            p = p.after(GLOBAL_BATCH, batch.tokens.numel(), skipped=spike)
        path.write_text(json.dumps([means, spikes]))
        return "finished"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "run", run)
        yield


def test_the_run_is_that_of_a_loop_which_leaves_the_updates_out(whole_run, tmp_path):
    path = tmp_path / "by_hand.json"
    train(1, TRAIN, spoil=partial(trained_by_hand, path=path))
    means, spikes = json.loads(path.read_text())
    assert list(losses(whole_run).values()) == means
    assert spikes_of(whole_run) == spikes and len(spikes) > 2


def test_a_spike_is_counted_and_its_samples_are_recorded(whole_run):
    progress = run_file(whole_run, LENGTH)["progress"]
    found = records(whole_run, "spike")
    assert progress["skipped_steps"] == len(found)
    assert (
        progress["scheduled_samples"] == progress["samples"] - len(found) * GLOBAL_BATCH
    )
    of_step = {record["step"]: record for record in records(whole_run)}
    for spike in found:
        first = (spike["step"] - 1) * GLOBAL_BATCH
        assert spike["first_sample"] == first
        assert spike["samples"] == first + GLOBAL_BATCH
        assert spike["sample_ids"] == list(range(first, first + GLOBAL_BATCH))
        assert spike["grad_norm"] == of_step[spike["step"]]["grad_norm"]
        assert spike["grad_norm"] > spike["norm_bound"]


LAYOUTS = {
    "zero2": (2, ["--zero-stage", "2", "--ddp-bucket-size", "1000"]),
    "tp2-sp": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "pp2-zero1": (
        4,
        ["--pipeline-model-parallel-size", "2", "--zero-stage", "1"],
    ),
    "zero3": (2, ["--zero-stage", "3"]),
    "dp4": (4, []),
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.all] * (i > 2))
        for i, name in enumerate(LAYOUTS)
    ],
)
def test_all_layouts_drop_the_same_updates(layout, whole_run, tmp_path):
    """Ranks that decided differently would hold different weights from then on, which is an error."""
    ranks, flags = LAYOUTS[layout]
    alike = ["--check-weight-hash-across-dp-replicas-interval", "1"]
    train(ranks, [*TRAIN, *SKIP, *flags, *alike, "--save", tmp_path])
    assert spikes_of(tmp_path) == spikes_of(whole_run)
    assert losses(tmp_path) == pytest.approx(losses(whole_run), rel=1e-4)


@pytest.mark.parametrize("ranks, flags", [(1, []), (2, ["--zero-stage", "1"])])
def test_a_resumed_run_decides_as_the_whole_one(ranks, flags, whole_run, tmp_path):
    """From a checkpoint amid spikes: at the same layout to the bit, at another with the same decisions."""
    middle = LENGTH - 2
    words = [*TRAIN, *SKIP, "--save", tmp_path, "--load", tmp_path]
    train(1, [*words, "--exit-interval", middle])
    assert run_file(tmp_path, middle)["spikes"]["in_a_row"] > 0
    train(ranks, [*words, *flags])
    assert spikes_of(tmp_path) == spikes_of(whole_run)
    if ranks == 1:
        ours, theirs = (run_file(run, LENGTH) for run in (tmp_path, whole_run))
        assert ours["spikes"] == theirs["spikes"]
        assert losses(tmp_path) == losses(whole_run)
        assert same_bits(saved_state(tmp_path, LENGTH), saved_state(whole_run, LENGTH))


def test_a_run_of_spikes_alone_stops_with_the_reason(tmp_path):
    flags = ["--skip-spikes-limit", "3", "--log-interval", "100"]
    (ended,) = run_pretrain(1, [*TRAIN, *SKIP, *flags, "--save", tmp_path])
    assert ended.code == 2 and "Traceback" not in ended.err
    assert "3 steps in a row were spikes, up to iteration 10" in ended.err
    assert spikes_of(tmp_path)[-3:] == [8, 9, 10]


def test_samples_are_named_as_the_dataset_numbers_them():
    dataset = list(range(7))
    loader = Loader(dataset, None, micro_batch_size=1, order=lambda at, n: (3 * at) % n)
    assert loader.indices(2, 4) == [6, 2, 5, 1]
