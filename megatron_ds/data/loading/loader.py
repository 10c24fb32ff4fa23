"""`Loader`: from samples of a dataset to the `Batch` of one data-parallel rank.

Stateless: `batch(consumed, ...)` is a pure function of its arguments. With `num_workers` threads the next batches are read
ahead; asking for another one than was foreseen (after a resume, or when the batch size changes) only costs the wait.
"""

from collections.abc import Sized
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ..batch import Batch
from ..kind import Collator
from .sampler import ORDERS, Order, local_positions


class Loader:
    """Makes batches of `dataset`, a sized thing whose `[i]` is a dict of arrays.

    collate          what makes a Batch of samples, as `collate.py` says
    dataloader_type  which sample stands at a position of the stream: a name in `sampler.ORDERS`
    order            the same, where no name says it: that of a curriculum
    num_workers      batches read ahead, each by a thread (numpy lets go of the interpreter while it copies)
    pin              put batches into page-locked memory, for a GPU
    """

    def __init__(self, dataset: Sized, collate: Collator, *, micro_batch_size: int, dataloader_type: str = "single",
                 order: Order | None = None, num_workers: int = 0, pin: bool = False):
        self.dataset, self.collate, self.micro_batch_size = dataset, collate, micro_batch_size
        self._order, self._pin = order or ORDERS[dataloader_type], pin
        self._pool = ThreadPoolExecutor(num_workers, "loader") if num_workers else None
        self._ahead: dict[tuple, Future[Batch]] = {}
        self._depth = num_workers

    def batch(self, consumed: int, global_batch: int, dp_rank: int = 0, dp_size: int = 1, *,
              training: bool = True) -> Batch:
        """This rank's [G / dp, s] of the global batch that follows `consumed` samples; `Batch.split` cuts micro-batches.

        Row order is micro-batch by micro-batch; `sample_ids` are positions in the stream, the same under every layout.
        Raises DataError when the data ends, ConfigError when the sizes do not divide.
        """
        if self._pool is None:
            return self._make(consumed, global_batch, dp_rank, dp_size, training)
        wanted = [(consumed + i * global_batch, global_batch, dp_rank, dp_size, training) for i in range(self._depth + 1)]
        known = {key: self._ahead.pop(key, None) or self._pool.submit(self._make, *key) for key in wanted}
        for forgotten in self._ahead.values():
            forgotten.cancel()
        self._ahead = known
        return known.pop(wanted[0]).result()

    def close(self) -> None:
        """End the threads. Only for tidiness: they do not keep a process alive for longer than a batch takes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _make(self, consumed: int, global_batch: int, dp_rank: int, dp_size: int, training: bool) -> Batch:
        positions = local_positions(consumed, global_batch, self.micro_batch_size, dp_rank, dp_size)
        numbers = self._order(np.array(positions, np.int64), len(self.dataset)).tolist()
        batch = self.collate([self.dataset[i] for i in numbers], numbers, tuple(positions), training)
        return batch.pin() if self._pin else batch
