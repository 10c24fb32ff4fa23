"""`SecondReading`: samples that a rank reads are read once more, by a rank with another copy of the corpora.

Copies of large corpora on several hosts are not read in full before training. So while it trains, a rank also reads
the samples of a *partner* whose files are another copy, and all ranks compare hashes of what they read:

    copies of two hosts                      A   A   B   B
    data-parallel rank                       0   1   2   3
    trains on, and hashes, the samples of    0   1   2   3
    reads and hashes those of its partner    2   3   0   1

Ranks with the same samples, such as those of a tensor-parallel group, compare theirs, too. The hashes of COMPARED
batches are exchanged together, and before each save, so that no checkpoint has steps whose samples differed.
"""

import hashlib
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...batch.batch import Batch
from ...data.kind import Collator, Dataset, Sample
from ...data.loading.loader import Loader
from ...errors import DataError
from ...mpu.collectives import all_gather_object
from ...mpu.mesh import Mesh
from ...training.loaders import Loaders
from ...training.sample_hash import hash_of_sample
from ...training.samples import SharedReader

COMPARED = 16
# position in the stream of the run → hash of the sample
Hashes = Mapping[int, str]


def with_second_reading(loaders: Loaders, copies: Sequence[str], mesh: Mesh) -> Loaders:
    """Loaders that compare the samples of ranks with different copies. Collective over the world.

    copies: for each rank of the world, what identifies its copy of the files
    """
    of_ranks = all_gather_object(mesh.samples.rank, mesh.group("world"))
    # Of ranks with the same samples, the first stands for all.
    first = dict(reversed(list(zip(of_ranks, copies))))
    partners = partners_of([first[rank] for rank in range(mesh.samples.size)])

    partner = partners[mesh.samples.rank]
    checked = {}
    for name, loader in vars(loaders).items():
        if loader is not None:
            checked[name] = SecondReading(loader, partner, mesh, name)
    return Loaders(**checked)


def partners_of(copies: Sequence[str]) -> list[int]:
    """Return the partner of each data-parallel rank, from the copy of each.

    Every sample of a rank with a rarer copy than the most frequent one is read from another copy as well.
    """
    # Equal copies next to each other, shifted by the largest number of equal ones.
    order = sorted(range(len(copies)), key=lambda rank: copies[rank])
    shift = max(Counter(copies).values())
    partners = [0] * len(copies)
    for place, rank in enumerate(order):
        partners[rank] = order[(place + shift) % len(order)]
    return partners


class _HashingCollator:
    """A collator that also keeps a hash of each sample. Threads of a loader call it."""

    def __init__(self, collate: Collator):
        self.collate = collate
        self._found: dict[int, str] = {}

    def __call__(
        self,
        samples: Sequence[Sample],
        indices: Sequence[int],
        sample_ids: tuple[int, ...],
        training: bool,
    ) -> Batch:
        self._found |= dict(zip(sample_ids, map(hash_of_sample, samples)))
        return self.collate(samples, indices, sample_ids, training)

    def take(self, batch: Batch) -> Iterator[tuple[int, str]]:
        """(position, hash) of each sample of a batch that was made."""
        for position in batch.sample_ids:
            yield position, self._found.pop(position)


class SecondReading:
    """The interface of `Loader`, for a rank whose partner has another copy of the corpora.

    partner  the data-parallel rank whose samples are read, too; this rank itself where all have the same copy
    part     of the data, for messages
    """

    def __init__(
        self, loader: Loader | SharedReader, partner: int, mesh: Mesh, part: str
    ):
        self.loader = loader
        self.part = part
        self.collate = loader.collate
        self.partner = partner
        self.mesh = mesh
        # Of a tensor-parallel group with one reader, that rank alone has samples to compare.
        own = loader.loader if isinstance(loader, SharedReader) else loader
        self._reads = not isinstance(loader, SharedReader) or loader.is_reader
        self._first = _HashingCollator(own.collate)
        self._second = _HashingCollator(own.collate)
        self._again = own.with_collator(self._second)
        own.collate = self._first
        self._hashes: dict[int, dict[int, str]] = {}
        self._batches = 0

    def batch(
        self, first: int, size: int, rank: int, ranks: int, training: bool = True
    ) -> Batch:
        """Return the batch of the loader. Collective over the world every COMPARED batches.

        Raises DataError on all ranks for samples that differ.
        """
        batch = self.loader.batch(first, size, rank, ranks, training=training)
        if self._reads:
            self._keep(rank, self._first.take(batch))
        if self._reads and self.partner != rank:
            other = self._again.batch(
                first, size, self.partner, ranks, training=training
            )
            self._keep(self.partner, self._second.take(other))
        self._batches += 1
        if self._batches == COMPARED:
            self.compare()
        return batch

    def compare(self) -> None:
        """Compare the samples that all ranks read since the last comparison. Collective over the world.

        Raises DataError on all ranks for the first sample that differs.
        """
        world = self.mesh.group("world")
        found = self._hashes
        self._hashes = {}
        self._batches = 0
        # A hash for each of at most two data-parallel ranks.
        mine = {rank: _hash_of_all(hashes) for rank, hashes in found.items()}
        of_ranks = all_gather_object(mine, world)
        differing = _rank_that_differs(of_ranks)
        if differing is None:
            return
        # All that was read of its samples, by everyone.
        sent = (platform.node(), found.get(differing, {}))
        error: Any = self._error(all_gather_object(sent, world))
        error.on_all_ranks = True
        raise error

    def _keep(self, rank: int, hashes: Iterator[tuple[int, str]]) -> None:
        self._hashes.setdefault(rank, {}).update(hashes)

    def _error(self, sent: Sequence[tuple[str, Hashes]]) -> DataError:
        """Return what differs. sent: the host of each rank, and what it read of the same samples."""
        readers = [rank for rank, (_, hashes) in enumerate(sent) if hashes]
        one = readers[0]
        usual = sent[one][1]
        differing = []
        for rank in readers:
            for position, found in sent[rank][1].items():
                if found != usual[position]:
                    differing.append((position, rank))
        position, other = min(differing)
        [index] = self.loader.indices(position, 1)
        shown = [
            f"hash {sent[rank][1][position]} on rank {rank} on {sent[rank][0]}"
            for rank in (one, other)
        ]
        return DataError(
            f"the ranks of this job read different data: sample {index} of the {self.part} data, from "
            f"{_file_of(self.dataset, index)} at position {position} of the run, is {', and '.join(shown)}. They "
            "train on samples of both. Copy the same files to all machines, and continue from a checkpoint."
        )

    @property
    def dataset(self) -> Dataset:
        """The samples that are read, of this rank."""
        return self.loader.dataset

    def indices(self, first: int, size: int) -> list[int]:
        """Return the indices of the loader. Not collective."""
        return self.loader.indices(first, size)

    def close(self) -> None:
        """Stop the threads of both readings."""
        self.loader.close()
        self._again.close()


def _hash_of_all(hashes: Hashes) -> str:
    return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()


def _rank_that_differs(of_ranks: Sequence[Mapping[int, str]]) -> int | None:
    """Return the first data-parallel rank of whose samples two readers have different hashes."""
    known: dict[int, str] = {}
    for found in of_ranks:
        for rank, value in found.items():
            if known.setdefault(rank, value) != value:
                return rank
    return None


def _file_of(dataset: Any, index: int) -> str:
    """Return the file from which a sample is read."""
    if hasattr(dataset, "place"):
        return _file_of(*dataset.place(index))
    if hasattr(dataset, "dataset_index"):
        part = dataset.datasets[dataset.dataset_index[index]]
        return _file_of(part, int(dataset.sample_index[index]))
    if hasattr(dataset, "dataset"):
        return _file_of(dataset.dataset, index)
    return str(dataset.corpus.bin_path)
