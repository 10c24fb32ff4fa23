"""Which samples a data-parallel rank sees: pure functions of the number of samples consumed so far.

The run is one *stream* of samples, at positions 0, 1, 2, …; a global batch is the next G of them. An *order* says which
sample of the dataset stands at a position. Resuming needs the number of consumed samples and nothing else.

    global batch of 8, micro-batches of 2, 2 ranks      position  0 1 | 2 3 | 4 5 | 6 7
                                                        rank      0   | 1   | 0   | 1
                                                        micro     0     0     1     1

So micro-batch j of all ranks together is the same set as in Megatron, and the whole batch is the same set for any number
of ranks.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

from ...errors import ConfigError, DataError

Order = Callable[[np.ndarray, int], np.ndarray]             # (stream positions, samples in the dataset) → sample numbers


def local_positions(consumed: int, global_batch: int, micro_batch: int, dp_rank: int, dp_size: int) -> list[int]:
    """The G / dp stream positions of one rank in the batch after `consumed` samples, micro-batch by micro-batch."""
    chunk = micro_batch * dp_size
    if global_batch % chunk:
        raise ConfigError(f"a global batch of {global_batch} samples cannot be cut into micro-batches of {micro_batch} on "
                          f"{dp_size} data-parallel ranks: use a multiple of {chunk}.")
    firsts = range(consumed + dp_rank * micro_batch, consumed + global_batch, chunk)
    return [position for first in firsts for position in range(first, first + micro_batch)]


def single(positions: np.ndarray, total: int) -> np.ndarray:
    """The dataset once, in its own order. Raises DataError behind its end."""
    if len(positions) and positions[-1] >= total:
        raise DataError(f"the data ends: sample {positions[-1]} was asked for, the dataset has {total}. Train on fewer "
                        "samples, or let --dataloader-type cyclic begin again.")
    return positions


def cyclic(positions: np.ndarray, total: int, *, micro_batch: int = 1, shards: int = 1) -> np.ndarray:
    """The dataset again and again, in an order drawn anew for each epoch from its number.

    As it stands the order does not depend on the layout and every sample is seen once an epoch. Megatron's default, "data
    sharding", is `shards` = data-parallel size with the micro-batch size: each rank draws from a contiguous part of its
    own, what does not fill a last round is never seen, and the order changes with the number of ranks.
    """
    chunk = micro_batch * shards
    bucket = total // chunk * micro_batch                   # samples of a shard
    if not bucket:
        raise DataError(f"a dataset of {total} samples does not fill one round of {chunk}.")
    epochs, offsets = np.divmod(positions, bucket * shards)
    inside = offsets // chunk * micro_batch + offsets % micro_batch
    drawn = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        drawn[here] = _permutation(bucket, epoch)[inside[here]]
    return offsets % chunk // micro_batch * bucket + drawn


ORDERS: dict[str, Order] = {"single": single, "cyclic": cyclic}         # by --dataloader-type


@lru_cache(maxsize=4)                                       # training and evaluation, each at the border of two epochs
def _permutation(size: int, epoch: int) -> np.ndarray:
    return torch.randperm(size, generator=torch.Generator().manual_seed(epoch)).numpy()
