"""`TrainingLength`: when a run ends, and its number of steps and samples.

A length in samples leaves out the last samples if they are fewer than a batch, as in Megatron. A length in
tokens ends with the step that reaches it, as in Megatron-DeepSpeed; an additional length in iterations or
samples is an upper bound.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..config import RunConfig
from ..config.training_schedule import make_batch_size, token_count
from ..progress.ramps import BatchSize, Progress, TokenCount, count_steps

START = Progress()


@dataclass(frozen=True)
class TrainingLength:
    """iters, samples, tokens: the limits; None for no limit.

    count        tokens of the progress that the limit counts
    tokens_at    step, from 0 → tokens of one of its samples, times `num_layers`
    is_settled   whether tokens_at is the same at a step and at all later ones
    """

    batch_size: BatchSize
    iters: int | None
    samples: int | None
    tokens: int | None
    count: TokenCount
    num_layers: int
    tokens_at: Callable[[int], int]
    is_settled: Callable[[int], bool]

    def is_reached(self, progress: Progress) -> bool:
        """Return whether the run ends: a limit is reached, or the next batch would exceed `samples`."""
        return (
            self.iters is not None
            and progress.step >= self.iters
            or self.samples is not None
            and progress.samples + self.batch_size(progress) > self.samples
            or self.tokens is not None
            and self.count(progress) >= self.tokens
        )

    def steps_after(self, progress: Progress = START) -> int:
        """Steps from `progress` to the end."""
        return self._rest(progress)[0]

    def samples_after(self, progress: Progress = START) -> int:
        """Samples from `progress` to the end."""
        return self._rest(progress)[1]

    def _rest(self, progress: Progress) -> tuple[int, int]:
        """(steps, samples) from `progress` to the end."""
        most = left = math.inf  # steps; tokens times layers
        if self.iters is not None:
            most = max(0, self.iters - progress.step)
        if self.samples is not None:
            most = min(
                most, count_steps(self.batch_size, self.samples, progress.samples)
            )
        if self.tokens is not None:
            seen = (
                progress.tokens * self.num_layers
                if self.count.layers is None
                else progress.layer_tokens
            )
            left = self.tokens * self.num_layers - seen
        # Steps with the same batch size and length are counted together.
        steps = 0
        n = progress.samples
        while steps < most and left > 0:
            size = self.batch_size.at(n)
            step = progress.step + steps
            of_step = size * self.tokens_at(step) if left < math.inf else 0
            alike = min(most - steps, _steps_within(self.batch_size.until(n) - n, size))
            if left < math.inf:
                alike = min(alike, -(-left // of_step)) if self.is_settled(step) else 1
            advanced = int(alike)
            steps = steps + advanced
            n = n + advanced * size
            left = left - advanced * of_step
        return steps, n - progress.samples


def _steps_within(samples: float, size: int) -> float:
    return -(-samples // size) if samples < math.inf else math.inf


def make_length(
    config: RunConfig, batch_size: BatchSize | None = None
) -> TrainingLength:
    """Return the length that a configuration describes. batch_size: by default `make_batch_size(config)`."""
    model = config.model
    train = config.train
    kept = config.kept_tokens
    full = config.model.seq_length
    lengths = config.sequence_lengths

    # Tokens of a sample change with the lengths of sequences and with the tokens that blocks keep.
    def tokens_at(step: int) -> int:
        length = full if lengths is None else min(full, lengths.at(step + 1))
        rows = 1 if lengths is None else lengths.rows(full, length)
        return rows * (
            kept.layer_tokens(step, length) if kept else model.num_layers * length
        )

    # Once both have reached their final values, the remaining steps are equal.
    def is_settled(step: int) -> bool:
        if kept is not None and kept.kept_at(step) != kept.kept.maximum:
            return False
        return lengths is None or lengths.is_settled(step + 1)

    return TrainingLength(
        batch_size or make_batch_size(config),
        train.train_iters,
        train.train_samples,
        train.train_tokens,
        token_count(config),
        model.num_layers,
        tokens_at,
        is_settled,
    )


def planned_steps(config: RunConfig, batch_size: BatchSize | None = None) -> int:
    """Optimizer steps of the whole training; 0 for a run that only evaluates."""
    return make_length(config, batch_size).steps_after()
