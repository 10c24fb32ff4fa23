"""What a recomputed block keeps of its input x [s(/t), b, h] until its backward.

    by default                          x
    --distribute-saved-activations      this rank's t-th part of x; all-gathered in backward
    --checkpoint-in-cpu                 on a GPU a copy in host memory (host/waiting_tensors.py)

Both together keep the part in host memory. Without sequence parallelism x is the same on all tensor-parallel
ranks; with it x is a part already (Rajbhandari et al. 2020, arXiv:1910.02054, section 6.1).
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..batch.batch import Batch
from ..mpu import collectives
from ..mpu.context import ParallelContext
from ..mpu.group import Group, solo

if TYPE_CHECKING:
    from ..host.waiting_tensors import WaitingTensors

Again = Callable[[], torch.Tensor]


class InputKeeper:
    """Keeps inputs of the blocks of a rank, by `ctx.recompute`."""

    def __init__(self, group: Group, waiting: "WaitingTensors | None"):
        """group: ranks that hold the same x and keep a part each. waiting: None to keep x on the device."""
        self.group = group
        self.waiting = waiting

    def __call__(self, x: torch.Tensor, batch: Batch) -> Again:
        """Returns the function that returns x again, once, with the same `requires_grad`. Collective over
        the group."""
        mine = _part(x.detach(), self.group)
        # On a CPU the device memory is that of the host.
        if self.waiting is None or x.device.type == "cpu":
            kept = [mine]
            again = kept.pop
        else:
            again = partial(self.waiting.take, self.waiting.put(mine, batch.ledger))
        return partial(_whole, again, self.group, x.shape, x.requires_grad)


def input_keeper(ctx: ParallelContext) -> InputKeeper | None:
    """Return the keeper of all blocks that are built with `ctx`; None if blocks keep x itself."""
    divides = ctx.recompute.partition and not ctx.sequence_parallel and ctx.tp.size > 1
    if not (divides or ctx.recompute.offload):
        return None
    return InputKeeper(
        ctx.tp if divides else solo("tp"),
        ctx.waiting if ctx.recompute.offload else None,
    )


def bytes_in_host(modules: Iterable[nn.Module]) -> int:
    """Bytes of inputs of these modules, and of blocks inside them, that wait in host memory."""
    waiting = set()
    for module in modules:
        keepers = (getattr(inner, "keep_input", None) for inner in module.modules())
        waiting |= {keeper.waiting for keeper in keepers if keeper}
    return sum(each.nbytes for each in waiting - {None})


def _part(x: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's elements [ceil(n / t)] of x [n]; x itself in a group of one."""
    if group.size == 1:
        return x
    each = -(-x.numel() // group.size)
    mine = x.new_zeros(each)
    piece = x.reshape(-1)[group.rank * each : (group.rank + 1) * each]
    mine[: len(piece)] = piece
    return mine


def _whole(
    again: Again, group: Group, shape: torch.Size, requires_grad: bool
) -> torch.Tensor:
    x = collectives.all_gather(again(), group)
    if group.size > 1:
        x = x[: shape.numel()].view(shape)
    return x.detach().requires_grad_(requires_grad)
