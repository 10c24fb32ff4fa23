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

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from ..mpu.collectives import all_gather_into_, exchange, reduce_scatter_into_
from ..mpu.group import DONE, Group, Work

# (rank that owns a block, the block, fp32 tensor to which the gradient of this rank is to be added)
AddGradient = Callable[[int, torch.Tensor, torch.Tensor], None]


class BlockExchange(Protocol):
    """A way of the two above. `own` is this rank's block, contiguous; all blocks have its shape."""

    def forward(
        self, own: torch.Tensor, group: Group
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """(rank that owns the block, the block) for each rank. Collective over the group.

        A block may be overwritten when the next one is asked for.
        """

    def backward(
        self, own: torch.Tensor, group: Group, add: AddGradient
    ) -> torch.Tensor:
        """Return the sum over the group of the gradients of this rank's block, fp32. Collective over the group.

        add: called for each block, which may be overwritten or freed after the call
        """


class Ring:
    """A block travels from rank to rank."""

    def forward(
        self, own: torch.Tensor, group: Group
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (owner, block) for each rank's block, this rank's own first; the next one is received meanwhile.

        Collective over the group.
        """
        after = (group.rank + 1) % group.size
        before = (group.rank - 1) % group.size
        block = own
        coming = spare = None
        for step in range(group.size - 1):
            coming = torch.empty_like(own) if spare is None else spare
            work = exchange([(block, after)], [(coming, before)], group, async_op=True)
            yield (group.rank - step) % group.size, block
            work.wait()
            block, spare = coming, None if block is own else block
        last = [block]  # not held here, so that the caller can free it
        del block, spare, coming
        yield (group.rank + 1) % group.size, last.pop()

    def backward(
        self, own: torch.Tensor, group: Group, add: AddGradient
    ) -> torch.Tensor:
        """Return the sum over the group of the gradients of this rank's block, fp32, of its shape.

        The sum that arrives with a block is added after this rank's own gradient. Collective over the group.
        """
        after = (group.rank + 1) % group.size
        before = (group.rank - 1) % group.size
        total = torch.zeros_like(own, dtype=torch.float32)
        blocks = self.forward(own, group)
        add(*next(blocks), total)
        work: Work = DONE
        coming: torch.Tensor | None = None
        for owner, block in blocks:
            gradient = torch.zeros_like(total)
            add(owner, block, gradient)
            del block
            # What the rank before has added to this block so far; it is complete after the last step.
            work.wait()
            if coming is not None:
                gradient += coming
            sent = gradient
            coming = torch.empty_like(total)
            work = exchange([(sent, after)], [(coming, before)], group, async_op=True)
        work.wait()
        return total if coming is None else total.add_(coming)


class Gather:
    """All blocks at once."""

    def forward(
        self, own: torch.Tensor, group: Group
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (owner, block) for each rank's block, this rank's own first. Collective over the group."""
        blocks = own.new_empty(group.size, *own.shape)
        all_gather_into_(blocks.view(-1), own.view(-1), group)
        for step in range(group.size):
            owner = (group.rank - step) % group.size
            yield owner, blocks[owner]

    def backward(
        self, own: torch.Tensor, group: Group, add: AddGradient
    ) -> torch.Tensor:
        """Return the sum over the group of the gradients of this rank's block, fp32, of its shape.

        Collective over the group.
        """
        gradients = own.new_zeros(group.size, *own.shape, dtype=torch.float32)
        for owner, block in self.forward(own, group):
            add(owner, block, gradients[owner])
        total = torch.empty_like(own, dtype=torch.float32)
        reduce_scatter_into_(total.view(-1), gradients.view(-1), group)
        return total
