"""From samples to the `Batch` of a data-parallel rank: pure functions of the number of consumed samples.

The run is one *stream* of samples, at positions 0, 1, 2, …; a global batch is the next G of them. An *order*
gives the sample of the dataset at each position. Resuming needs the number of consumed samples and nothing
else.

    global batch of 8, micro-batches of 2, 2 ranks      position  0 1 | 2 3 | 4 5 | 6 7
                                                        rank      0   | 1   | 0   | 1
                                                        micro     0     0     1     1

So micro-batch j of all ranks together is the same set of samples as in Megatron, and a global batch is the
same set for any number of ranks.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch

from ...batch.batch import Batch
from ...errors import ConfigError, DataError
from ..kind import Collator, Dataset

# (stream positions, size of the dataset) → sample indices.
Order = Callable[[np.ndarray, int], np.ndarray]


class Loader:
    """Makes the batches of a dataset. `batch(consumed, ...)` depends on its arguments only.

    collate          makes a Batch of samples (`kind.Collator`)
    dataloader_type  the order, a name in ORDERS
    order            the order itself, in place of a name: that of a `SampleOrder`
    num_workers      batches read ahead, each by a thread (numpy releases the interpreter lock while it
                     copies). After a resume or a change of the batch size, batches read ahead are dropped
    pin              put batches into page-locked memory, for a GPU
    """

    def __init__(
        self,
        dataset: Dataset,
        collate: Collator,
        *,
        micro_batch_size: int,
        dataloader_type: str = "single",
        order: Order | None = None,
        num_workers: int = 0,
        pin: bool = False,
    ):
        self.dataset = dataset
        self.collate = collate
        self.micro_batch_size = micro_batch_size
        self._order = order or ORDERS[dataloader_type]
        self._pin = pin
        self._pool = ThreadPoolExecutor(num_workers, "loader") if num_workers else None
        self._ahead: dict[tuple, Future[Batch]] = {}
        self._depth = num_workers

    def batch(
        self,
        consumed: int,
        global_batch: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        *,
        training: bool = True,
    ) -> Batch:
        """Return this rank's [G / dp, s] of the global batch after `consumed` samples; see `Batch.split`.

        Rows are ordered by micro-batch; `sample_ids` are positions in the stream, the same under every
        layout. Raises DataError when the data ends, ConfigError when the sizes do not divide.
        """
        if self._pool is None:
            return self._make(consumed, global_batch, dp_rank, dp_size, training)
        wanted = [
            (consumed + i * global_batch, global_batch, dp_rank, dp_size, training)
            for i in range(self._depth + 1)
        ]
        futures = {
            key: self._ahead.pop(key)
            if key in self._ahead
            else self._pool.submit(self._make, *key)
            for key in wanted
        }
        for dropped in self._ahead.values():
            dropped.cancel()
        self._ahead = futures
        return futures.pop(wanted[0]).result()

    def indices(self, first: int, size: int) -> list[int]:
        """Return the samples in the dataset that the stream has at positions `first` to `first + size`: [size], in
        the order of positions. Nothing is read. Raises DataError when the data ends."""
        return self._places(range(first, first + size))

    def _places(self, positions: Sequence[int]) -> list[int]:
        return self._order(np.array(positions, np.int64), len(self.dataset)).tolist()

    def with_collator(self, collate: Collator) -> "Loader":
        """Make a loader of the same samples with another collator and threads of its own."""
        return Loader(
            self.dataset,
            collate,
            micro_batch_size=self.micro_batch_size,
            order=self._order,
            num_workers=self._depth,
        )

    def close(self) -> None:
        """End the threads. Optional: they keep a process alive for at most the time of one batch."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _make(
        self,
        consumed: int,
        global_batch: int,
        dp_rank: int,
        dp_size: int,
        training: bool,
    ) -> Batch:
        positions = local_positions(
            consumed, global_batch, self.micro_batch_size, dp_rank, dp_size
        )
        indices = self._places(positions)
        batch = self.collate(
            [self.dataset[i] for i in indices], indices, tuple(positions), training
        )
        return batch.pin() if self._pin else batch


def local_positions(
    consumed: int, global_batch: int, micro_batch: int, dp_rank: int, dp_size: int
) -> list[int]:
    """Return the G / dp stream positions of one rank after `consumed` samples, ordered by micro-batch."""
    chunk = micro_batch * dp_size
    if global_batch % chunk:
        raise ConfigError(
            f"a global batch of {global_batch} samples is not divisible into micro-batches of "
            f"{micro_batch} on {dp_size} data-parallel ranks: use a multiple of {chunk}."
        )
    firsts = range(consumed + dp_rank * micro_batch, consumed + global_batch, chunk)
    positions: list[int] = []
    for first in firsts:
        positions += range(first, first + micro_batch)
    return positions


def single(positions: np.ndarray, total: int) -> np.ndarray:
    """Read the dataset once, in its own order. Raises DataError after its end."""
    if len(positions) and positions[-1] >= total:
        raise DataError(
            f"the data ends: the run needs sample {positions[-1]}, and the dataset has {total}. "
            "Train on fewer samples, or repeat the data with --dataloader-type cyclic."
        )
    return positions


def cyclic(
    positions: np.ndarray, total: int, *, micro_batch: int = 1, shards: int = 1
) -> np.ndarray:
    """Return the dataset repeatedly, in a new random order for each epoch, drawn from the epoch's number.

    By default the order does not depend on the layout, and every sample is read once an epoch. Megatron's
    default, "data sharding", is `shards` = data-parallel size with the micro-batch size: each rank reads a
    contiguous part of the dataset, samples that do not fill a last round are never read, and the order
    changes with the number of ranks.
    """
    chunk = micro_batch * shards
    bucket = total // chunk * micro_batch
    if not bucket:
        raise DataError(
            f"a dataset of {total} samples does not fill one round of {chunk}. Use more data."
        )
    epochs, offsets = np.divmod(positions, bucket * shards)
    inside = offsets // chunk * micro_batch + offsets % micro_batch
    drawn = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        drawn[here] = _permutation(bucket, epoch)[inside[here]]
    return offsets % chunk // micro_batch * bucket + drawn


ORDERS: dict[str, Order] = {"single": single, "cyclic": cyclic}  # by --dataloader-type


@lru_cache(maxsize=4)  # training and evaluation, each at the border of two epochs
def _permutation(size: int, epoch: int) -> np.ndarray:
    return torch.randperm(size, generator=torch.Generator().manual_seed(epoch)).numpy()
