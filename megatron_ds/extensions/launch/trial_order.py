"""Which trial an autotuner makes next, where it does not go stage by stage: "autotuning.tuner_type" of DeepSpeed.

    random        in a random order, the same in each search
    model_based   the one for which a model of the time of an update, fitted to the trials so far, predicts the most

The program is the user's, so its time cannot be planned before it runs. The model adds up what an update costs for each
micro-batch, for each sample, and for the traffic of its ZeRO stage:

    seconds = a · micro-batches + b · samples + c · traffic,    a, b, c ≥ 0
"""

import random
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

SEED = 1234
# Passes over the parameters that ranks send in an update of n micro-batches: gradients once, or for each micro-batch
# in stages 2 and 3; updated weights once, or in stage 3 for each forward and backward.
TRAFFIC: dict[int, Callable[[int], int]] = {
    0: lambda n: 2,
    1: lambda n: 2,
    2: lambda n: n + 1,
    3: lambda n: 3 * n,
}


class Timed(Protocol):
    """A stage, samples and number of the micro-batches of an update, and what was measured, if it was."""

    stage: int
    micro: int
    steps: int
    numbers: dict[str, float]


def features(trial: Timed) -> list[float]:
    """Return what the time of an update is proportional to: micro-batches, samples and traffic."""
    samples = trial.micro * trial.steps
    traffic = TRAFFIC[trial.stage](trial.steps)
    return [float(trial.steps), float(samples), float(traffic)]


def fitted(measured: Sequence[Timed]) -> np.ndarray:
    """Return a, b and c of the trials, none negative: by least squares over those that are not held at 0.

    Each trial counts with its relative error. numbers["latency"] is in milliseconds.
    """
    seconds = np.array([trial.numbers["latency"] / 1000 for trial in measured])
    rows = np.array([features(trial) for trial in measured]) / seconds[:, None]
    free = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(rows[:, free], np.ones(len(rows)), rcond=None)
        kept = [at for at, value in zip(free, found, strict=True) if value > 0]
        if len(kept) == len(free):
            break
        free = kept
    constants = np.zeros(3)
    constants[free] = found
    return constants


def predicted(trial: Timed, constants: np.ndarray) -> float:
    """Return the seconds of an update."""
    return float(np.dot(features(trial), constants))


def random_choice(left: Sequence[Timed], measured: Sequence[Timed], metric: str) -> int:
    """Return the number of a trial of `left`."""
    return random.Random(SEED + len(left)).randrange(len(left))


def model_choice(left: Sequence[Timed], measured: Sequence[Timed], metric: str) -> int:
    """Return the number of the trial of `left` that is predicted to be the best; of equal ones, the first.

    Until two trials are measured these are the first and the last of `left`.
    """
    if len(measured) < 2:
        return len(measured) * (len(left) - 1)
    constants = fitted(measured)

    def worth(at: int) -> float:
        trial = left[at]
        seconds = predicted(trial, constants)
        if metric == "latency":
            return -seconds
        return trial.micro * trial.steps / seconds

    return max(range(len(left)), key=worth)


CHOICES = {"random": random_choice, "model_based": model_choice}
