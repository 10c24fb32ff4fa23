"""`Batches`: this rank's batches of a run, ready for the model, for training, evaluation and comparisons.

read       the samples of this rank: ranks along dp read different ones, all others read the same
lengths    shorten the sequences, if a curriculum over lengths is configured
keeping    how many tokens the layers keep that drop some
to         the device: from page-locked memory, so before anything is cut out of it
cut        the tokens of each sequence that this rank holds
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..batch.batch import Batch
from ..config import RunConfig
from ..config.training_schedule import make_token_drop
from ..features import Provided
from ..mpu.context import SequenceSlice
from ..mpu.group import Group
from ..mpu.mesh import Mesh
from ..progress.ramps import Progress
from ..progress.sequence_lengths import SequenceLengths
from ..progress.token_drop import TokenDrop

SHORTENED_BATCHES: Provided[Any] = Provided("shortened batches")


class BatchSource(Protocol):
    """A `Loader`, or one that several ranks share."""

    def batch(
        self, first: int, size: int, rank: int, ranks: int, training: bool = True
    ) -> Batch:
        """The samples of `rank` among `ranks` of the `size` samples from position `first` of the run on."""

    def indices(self, first: int, size: int) -> list[int]:
        """Where in the dataset the `size` samples from position `first` of the run on are."""


@dataclass(frozen=True)
class Batches:
    """Reads the batches of this rank.

    samples  the group whose ranks read different samples
    """

    samples: Group  # its ranks read different samples
    part: SequenceSlice
    device: torch.device
    drop: TokenDrop | None
    lengths: SequenceLengths | None  # None: whole samples
    shorten: Callable[[Batch, int], Batch] | None  # to a length

    def training(self, source: BatchSource, progress: Progress, size: int) -> Batch:
        """This rank's samples of the next global batch of `size` samples."""
        batch = self._read(source, progress.samples, size, training=True)
        if self.lengths is not None:
            batch = self.shorten(batch, self.lengths.at(progress.step + 1))
        return self._ready(batch.keeping(self.drop, progress.step))

    def evaluation(self, source: BatchSource, first: int, size: int) -> Batch:
        """This rank's samples of the global batch from `first` on; no sequence or token is dropped."""
        return self._ready(self._read(source, first, size, training=False))

    def _read(
        self, source: BatchSource, first: int, size: int, training: bool
    ) -> Batch:
        return source.batch(
            first, size, self.samples.rank, self.samples.size, training=training
        )

    def _ready(self, batch: Batch) -> Batch:
        return batch.to(self.device).cut(self.part)


def make_batches(config: RunConfig, mesh: Mesh, part: SequenceSlice) -> Batches:
    """The batches of a rank, as configured."""
    lengths = config.curriculum.lengths(config.model.seq_length)
    return Batches(
        mesh.samples,
        part,
        mesh.device,
        make_token_drop(config),
        lengths,
        None if lengths is None else SHORTENED_BATCHES.find()(lengths),
    )
