"""`Batches`: this rank's batches of a run, ready for the model, for training, evaluation and comparisons.

read       the samples of this rank: ranks along dp read different ones, all others read the same
lengths    shorten the sequences, if their lengths change from step to step
keeping    how many tokens the layers keep that process a part of each sequence
to         the device: from page-locked memory, so before anything is cut out of it
cut        the tokens of each sequence that this rank holds
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from ..batch.batch import Batch
from ..config import RunConfig
from ..data.kind import Collator, Dataset
from ..features import Lengths
from ..mpu.context import SequenceSlice
from ..mpu.group import Group
from ..mpu.mesh import Mesh
from ..progress.kept_tokens import KeptTokens
from ..progress.ramps import Progress
from ..progress.sequence_lengths import SequenceLengths


class BatchSource(Protocol):
    """A `Loader`, or one that several ranks share."""

    @property
    def dataset(self) -> Dataset:
        """The samples."""

    @property
    def collate(self) -> Collator:
        """The function that makes batches of samples."""

    def batch(
        self, first: int, size: int, rank: int, ranks: int, /, *, training: bool = True
    ) -> Batch:
        """Return the samples of `rank` among `ranks` of the `size` samples from position `first` of the run on."""

    def indices(self, first: int, size: int) -> list[int]:
        """Return where in the dataset the `size` samples from position `first` of the run on are."""


@dataclass(frozen=True)
class Batches:
    """Reads the batches of this rank.

    samples  the group whose ranks read different samples
    """

    samples: Group  # its ranks read different samples
    part: SequenceSlice
    device: torch.device
    kept: KeptTokens | None
    lengths: SequenceLengths | None  # None: whole samples
    changed: Lengths | None

    def training(self, source: BatchSource, progress: Progress, size: int) -> Batch:
        """This rank's samples of the next global batch of `size` samples."""
        batch = self._read(source, progress.samples, size, training=True)
        if self.lengths is not None and self.changed is not None:
            length = self.lengths.at(progress.step + 1)
            batch = self.changed.shortened(self.lengths, batch, length)
        return self._ready(batch.keeping(self.kept, progress.step))

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
    """Return the batches of a rank, as configured."""
    return Batches(
        mesh.samples,
        part,
        mesh.device,
        config.kept_tokens,
        config.sequence_lengths,
        config.changed_lengths,
    )
