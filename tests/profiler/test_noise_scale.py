"""--grad-noise-scale: the estimator, and its numbers in runs, whose training stays the same."""

import random

import pytest

from megatron_ds.config import parse
from megatron_ds.config.rules.training import TRAINING_RULES
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.profiler.noise_scale import (
    KEPT,
    Estimate,
    NoiseScale,
    estimate,
)
from tests.harness.pretraining import MOCK, records, same_bits, saved_state, train
from tests.zero.test_asked_numbers import scalars

pytestmark = pytest.mark.processes

ASKED = ["--grad-noise-scale", "--grad-noise-scale-interval", "1"]
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1 "
    "--moe-aux-loss-coeff 0.01"
).split()


@pytest.mark.parametrize("small, large", [(1, 2), (3, 7), (8, 512)])
def test_expected_norms_give_signal_and_noise(small, large):
    square = lambda samples: 0.25 + 40.0 / samples  # |G|² + tr(Σ) / b
    found = estimate(square(small), square(large), small, large)
    assert found == Estimate(pytest.approx(0.25), pytest.approx(40.0))


def test_the_running_estimate_approaches_the_truth():
    """Gradients of 30 dimensions, of a known mean and variance; the truth is 30 · 4 / (30 · 0.09) samples."""
    dice, scale = random.Random(3), NoiseScale()
    assert scale.samples is None
    mean = lambda samples: [dice.gauss(0.3, 2 / samples**0.5) for _ in range(30)]
    found = []
    for _ in range(600):
        parts = [mean(4) for _ in range(16)]
        whole = [sum(column) / 16 for column in zip(*parts)]
        scale.add(sum(x * x for x in parts[0]), sum(x * x for x in whole), 4, 64)
        found.append(scale.samples)
    scale.add(float("inf"), 1.0, 4, 64)
    settled = sorted(x for x in found[50:] if x is not None)
    assert (
        settled[len(settled) // 2] == pytest.approx(44.4, rel=0.1)
        and scale.samples == found[-1]
    )


def test_a_gradient_that_cannot_be_told_from_noise_has_no_scale():
    scale = NoiseScale()
    scale.add(8.0, 1.0, 1, 4)  # 4 · 1 < 1 · 8
    assert scale.samples is None


def parts(folder) -> tuple[list[float], list[float]]:
    """(signal, noise) of each step."""
    found = scalars(folder / "tb")
    return found["grad-noise-scale/signal"], found["grad-noise-scale/noise"]


def test_the_number_is_that_of_separate_runs_and_changes_nothing(tmp_path):
    """The first micro-batch alone, as the whole batch of another run, has the small gradient."""
    words = [*MOCK, *EXPERTS, "--fp16", "--initial-loss-scale", "64"]
    run = lambda name, *flags: train(
        1, [*words, "--train-iters", "3", "--save", tmp_path / name, *flags]
    )
    run("asked", *ASKED, "--tensorboard-dir", tmp_path / "tb")
    run("plain")
    run("first", "--global-batch-size", "1")
    norms = {
        name: records(tmp_path / name)[0]["grad_norm"] for name in ("asked", "first")
    }
    one = estimate(norms["first"] ** 2, norms["asked"] ** 2, 1, 4)
    signal, noise = parts(tmp_path)
    assert (signal[0], noise[0]) == (
        pytest.approx(one.signal, rel=1e-3),
        pytest.approx(one.noise, rel=1e-3),
    )
    mean = lambda values: sum(x * KEPT ** (2 - i) for i, x in enumerate(values))
    logged = records(tmp_path / "asked")[2].get("grad_noise_scale")
    expected = max(mean(noise), 0) / mean(signal) if mean(signal) > 0 else None
    assert logged == (None if expected is None else pytest.approx(expected, rel=1e-4))
    assert same_bits(
        saved_state(tmp_path / "asked", 3), saved_state(tmp_path / "plain", 3)
    )


def test_layouts_measure_the_same(tmp_path):
    found = []
    for i, (ranks, flags) in enumerate(
        [
            (1, ["--micro-batch-size", "2"]),
            (2, ["--zero-stage", "3"]),
            (2, ["--micro-batch-size", "2", "--pipeline-model-parallel-size", "2"]),
            (
                2,
                (
                    "--micro-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
                    "--calculate-per-token-loss"
                ).split(),
            ),
        ]
    ):
        train(
            ranks,
            [
                *MOCK,
                *ASKED,
                *flags,
                "--train-iters",
                "3",
                "--tensorboard-dir",
                tmp_path / str(i) / "tb",
            ],
        )
        found.append(sum(parts(tmp_path / str(i)), []))
    assert len(found[0]) == 6
    for each in found[1:]:
        assert each == pytest.approx(found[0], rel=1e-3)


def test_a_step_of_one_micro_batch_is_refused():
    words = [*MOCK, "--grad-noise-scale", "--micro-batch-size", "2"]
    with pytest.raises(
        ConfigError, match="one micro-batch of --micro-batch-size 2 on each of 2"
    ):
        parse(words, 2, rules=TRAINING_RULES)
