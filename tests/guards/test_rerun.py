"""--rerun-bad-steps: a flipped bit of one rank is found and named, and training goes on as if it had not been."""

import contextlib
from functools import partial

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.guards.rerun import (
    DETERMINISTIC,
    TRANSIENT,
    UNREPEATABLE,
    Comparison,
)
from megatron_ds.progress.ramps import Progress
from megatron_ds.training.moments import Computed
from megatron_ds.training.step_metrics import StepReport
from megatron_ds.zero.gradient_checksum import GradientChecksum
from megatron_ds.zero.settings import ZeroSettings
from tests.harness.pretraining import (
    MOCK,
    losses,
    records,
    run_pretrain,
    same_bits,
    saved_state,
    train,
)
from tests.harness.spoilers import poisoned
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.processes

LENGTH, STEP = 4, 3
TRAIN = [*MOCK, "--train-iters", LENGTH]
RERUN = ["--rerun-bad-steps"]
ALWAYS = [*RERUN, "--rerun-steps-interval", "1"]
HIGHEST, LOWEST = 30, 0  # bits of an fp32 number, of its exponent and of its fraction


@contextlib.contextmanager
def bit_flipped(rank: int, *, victim: int, bit: int, of_zero: bool = False):
    """One bit of one gradient of the victim flips in the first run of a step, before gradients are summed.

    of_zero: the gradient was zero
    """
    from megatron_ds.training import trainer
    from megatron_ds.zero.buckets import GradientStore

    train_step, clear_rest = trainer.train_step, GradientStore._clear_rest
    left = []

    def spoiled_step(engine, batch, progress, **options):
        if progress.step + 1 == STEP and rank == victim:
            left.append(bit)
        return train_step(engine, batch, progress, **options)

    def spoiled(self, b, whole):
        clear_rest(self, b, whole)
        places = (whole == 0).nonzero() if of_zero else range(1)
        if left and len(places):
            whole.view(torch.int32)[int(places[0])] ^= 1 << left.pop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", spoiled_step)
        patch.setattr(GradientStore, "_clear_rest", spoiled)
        yield


LAYOUTS = {
    "dp2": (2, []),
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "pp2-zero2": (4, "--pipeline-model-parallel-size 2 --zero-stage 2".split()),
    "zero1": (2, ["--zero-stage", "1"]),
    "zero3": (2, ["--zero-stage", "3"]),
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.all] * (i > 2))
        for i, name in enumerate(LAYOUTS)
    ],
)
def test_a_flipped_bit_is_found_and_its_rank_is_named(layout, tmp_path):
    """The lowest bit: only the comparison of bits finds it. The end is that of a run without the fault."""
    ranks, flags = LAYOUTS[layout]
    victim = ranks - 1
    clean, spoiled = tmp_path / "clean", tmp_path / "spoiled"
    words = [*TRAIN, *flags, *ALWAYS]
    train(ranks, [*TRAIN, *flags, "--save", clean])
    ended = train(
        ranks,
        [*words, "--save", spoiled],
        spoil=partial(bit_flipped, victim=victim, bit=LOWEST),
    )
    (found,) = records(spoiled, "rerun")
    assert (found["step"], found["verdict"]) == (STEP, TRANSIENT)
    assert [place.split()[0] for place in found["ranks"]] == [str(victim)]
    assert f"a fault of the hardware on rank {victim} (" in ended[0].out
    assert losses(spoiled) == losses(clean)
    assert same_bits(saved_state(spoiled, LENGTH), saved_state(clean, LENGTH))


def test_without_the_flag_the_same_bit_changes_the_run(tmp_path):
    clean, spoiled = tmp_path / "clean", tmp_path / "spoiled"
    spoil = partial(bit_flipped, victim=0, bit=HIGHEST)
    train(1, [*TRAIN, "--save", clean])
    run_pretrain(1, [*TRAIN, "--save", spoiled], spoil=spoil)
    assert records(spoiled, "rerun") == [] and losses(spoiled) != losses(clean)


def test_a_spike_is_computed_again_before_it_is_dropped(tmp_path):
    """The highest bit of the exponent makes 2.0 of a zero. The second run is no spike, so its update is made."""
    skip = "--skip-spikes 1.3 --skip-spikes-window 2".split()
    clean, spoiled = tmp_path / "clean", tmp_path / "spoiled"
    train(1, [*TRAIN, "--save", clean])
    train(
        1,
        [*TRAIN, *RERUN, *skip, "--save", spoiled],
        spoil=partial(bit_flipped, victim=0, bit=HIGHEST, of_zero=True),
    )
    (found,) = records(spoiled, "rerun")
    assert found["verdict"] == TRANSIENT and found["why"].startswith("spike")
    assert records(spoiled, "spike") == [] and losses(spoiled) == losses(clean)
    assert same_bits(saved_state(spoiled, LENGTH), saved_state(clean, LENGTH))


def test_what_repeats_is_no_fault_of_the_hardware(tmp_path):
    """A sample whose loss is not a number: the same in the second run, and then treated as without the flag."""
    spoil = partial(
        poisoned,
        module="decoder.layers.1",
        samples=range(8, 12),
        value=float("nan"),
    )
    ended = train(
        2,
        [*TRAIN, *RERUN, "--check-for-nan", "continue", "--save", tmp_path],
        spoil=spoil,
    )
    (found,) = records(tmp_path, "rerun")
    assert (found["step"], found["verdict"]) == (STEP, DETERMINISTIC)
    assert found["ranks"] == [] and found["loss"] is None
    assert "is skipped (--check-for-nan continue)" in ended[0].out


# ------------------------------------------------------------------ the comparison
def computed(loss: float) -> Computed:
    report = StepReport(loss, 16.0, False)
    return Computed(Progress(), report, [loss * loss, 0.0], loss)


@pytest.mark.parametrize(
    "results, verdict, named",
    [
        ([1.0, 1.0], DETERMINISTIC, ()),
        ([float("nan"), float("nan")], DETERMINISTIC, ()),
        ([2.0, 1.0, 1.0], TRANSIENT, ("1",)),
        ([1.0, 2.0, 1.0], TRANSIENT, ("1",)),
        ([1.0, 2.0, 3.0], UNREPEATABLE, ()),
    ],
)
def test_verdicts(results, verdict, named):
    """On two ranks; the gradients of rank 1 differ where the result is not 1."""

    def rank_of(rank, world):
        checksum = GradientChecksum(torch.device("cpu"))
        mesh = StubMesh(rank, world.group("world", range(2), rank))
        comparison = Comparison("a reason", mesh, checksum)
        left = list(results)

        def run():
            checksum.begin()
            value = left.pop(0)
            checksum.add(torch.tensor([value if rank else 1.0, -3.0]))
            return computed(value)

        found = None
        while found is None:
            last = run()
            found = comparison.add(last)
        return last, found, left

    for last, found, left in run_ranks(2, rank_of):
        assert left == [] and found.verdict == verdict
        assert tuple(place.split()[0] for place in found.ranks) == named
        assert last.bits == computed(results[-1]).bits


class StubMesh:
    def __init__(self, rank, world):
        self.rank = rank
        self._world = world

    def group(self, name):
        return self._world


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_counts_in_the_checksum(dtype):
    values = torch.randn(7).to(dtype)
    checksum = GradientChecksum(values.device)
    found = set()
    for bit in range(8 * values.itemsize):
        words = values.clone().view({2: torch.int16, 4: torch.int32}[values.itemsize])
        words[3] ^= torch.tensor(1 << bit).to(words.dtype)
        checksum.begin()
        checksum.add(words.view(dtype))
        found.add(int(checksum.total))
    checksum.begin()
    checksum.add(values)
    assert int(checksum.total) not in found


def test_optimizers_whose_exchange_counts_gradients_are_refused():
    config = parse(
        [*map(str, MOCK), *RERUN, "--optimizer", "onebit_adam", "--freeze-step", "1"], 1
    )
    with pytest.raises(ConfigError, match="--rerun-bad-steps"):
        ZeroSettings.from_config(config)
