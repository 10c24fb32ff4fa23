"""How keys and values of all ranks of a group pass each rank, block by block, and their gradients return.

Ranks divide the keys; each attends with its own queries to all of them, in the order: its own block, that of
the rank before, and so on. Two ways, with equal results to the bit:

    Ring      each rank passes the present block on to the next rank, while it works on it. The gradients of a
              block follow it one step later and end at its owner.      Liu et al. 2023 (arXiv:2310.01889)
    Gather    all blocks are gathered at once; their gradients are reduced at once.

    bytes sent by a rank for keys and values of B bytes a rank, n ranks, fp32 gradients of F bytes:
        Ring      forward (n - 1) B      backward (n - 1) (B + F)
        Gather    the same

A ring has two blocks in memory, a gather all of them.
"""

from collections.abc import Iterator
from typing import Protocol

import torch

from ..mpu.collectives import all_gather_into_, exchange, reduce_scatter_into_
from ..mpu.group import DONE, Group


class BlockExchange(Protocol):
    """A way of the two above. `own` is this rank's block, contiguous; all blocks have its shape."""

    def forward(self, own: torch.Tensor, group: Group) -> Iterator[tuple[int, torch.Tensor]]:
        """(rank that owns the block, the block) for each rank. Collective over the group.

        A block may be overwritten when the next one is asked for.
        """

    def backward(self, own: torch.Tensor, group: Group,
                 total: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """(rank, block, gradient) for each rank; the caller adds its gradient of the block to the third.

        total: fp32, receives the sum of the gradients of this rank's block. Collective over the group.
        """


class Ring:
    """A block travels from rank to rank."""

    def forward(self, own: torch.Tensor, group: Group) -> Iterator[tuple[int, torch.Tensor]]:
        """See `BlockExchange`."""
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        block, spare = own, None
        for step in range(group.size):
            is_last, work, coming = step == group.size - 1, DONE, None
            if not is_last:
                coming = torch.empty_like(own) if spare is None else spare
                work = exchange([(block, after)], [(coming, before)], group, async_op=True)
            yield (group.rank - step) % group.size, block
            work.wait()
            block, spare = coming, None if block is own else block

    def backward(self, own: torch.Tensor, group: Group,
                 total: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """See `BlockExchange`. The gradient that a block brings along is added after this rank's own."""
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        work, coming, sent = DONE, None, None
        total.zero_()
        for step, (owner, block) in enumerate(self.forward(own, group)):
            gradient = total if step == 0 else torch.zeros_like(total)
            yield owner, block, gradient
            if step == 0:
                continue
            # What the rank before has added to this block so far; it is complete after the last step.
            work.wait()
            if coming is not None:
                gradient += coming
            sent, coming = gradient, torch.empty_like(total)
            work = exchange([(sent, after)], [(coming, before)], group, async_op=True)
        work.wait()
        if coming is not None:
            total += coming


class Gather:
    """All blocks at once."""

    def forward(self, own: torch.Tensor, group: Group) -> Iterator[tuple[int, torch.Tensor]]:
        """See `BlockExchange`."""
        blocks = own.new_empty(group.size, *own.shape)
        all_gather_into_(blocks.view(-1), own.view(-1), group)
        for step in range(group.size):
            owner = (group.rank - step) % group.size
            yield owner, blocks[owner]

    def backward(self, own: torch.Tensor, group: Group,
                 total: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """See `BlockExchange`."""
        gradients = total.new_zeros(group.size, *total.shape)
        for owner, block in self.forward(own, group):
            yield owner, block, gradients[owner]
        reduce_scatter_into_(total.view(-1), gradients.view(-1), group)
