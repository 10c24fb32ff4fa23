"""`StepSize`: how much a step has trained on, with the layers that see a part of each sequence."""

from dataclasses import dataclass

from ..batch.batch import Batch
from ..config import RunConfig


@dataclass(frozen=True)
class StepSize:
    """What a step has trained on.

    samples       sequences, over all ranks;  length: tokens of each
    kept          tokens of a sequence that the blocks see which drop some; None: all
    layer_tokens  tokens of one sequence, counted once for each block that sees them
    """

    samples: int
    length: int
    kept: int | None = None
    layer_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of whole sequences."""
        return self.samples * self.length


class StepSizes:
    """Measures the steps of a run."""

    def __init__(self, config: RunConfig):
        self._layers = config.model.num_layers
        self._kept = config.kept_tokens

    def of(self, batch: Batch, size: int, step: int) -> StepSize:
        """Return what a step trains on, over all ranks.

        batch: of this rank; size: of the global batch, in samples; step: the steps before it
        """
        rows = size * batch.rows_per_sample
        length = batch.whole_length
        kept = self._kept
        if kept is None:
            return StepSize(rows, length, layer_tokens=self._layers * length)
        return StepSize(
            rows, length, kept.kept_at(step, length), kept.layer_tokens(step, length)
        )
