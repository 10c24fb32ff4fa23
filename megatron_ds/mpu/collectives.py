"""All collectives of the package, counted in `group.traffic` and timed in its log if it has one.

Names ending in `_` write in place. `n` is the group size. A group of one is no special case for callers:
in-place operations leave the tensor as it is, the others return their input. With `async_op` a collective
returns a `Work` to wait for. Raises LayoutError where a size is not divisible.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import LayoutError
from ..host.places import writer
from .group import DONE, Group, Messages, Transport, Work


def all_reduce_(
    tensor: torch.Tensor, group: Group, op: str = "sum", async_op: bool = False
) -> Work:
    """Sum (or max, min) of `tensor` over the group, written into it on every rank.

    Where the ranks share the memory that `tensor` lies in, they read each other's (shared_sums.py).
    """
    if _is_shared(tensor, group, op):
        call = lambda t: group.shared_sums.all_reduce(tensor.detach())
    else:
        call = lambda t: t.all_reduce(tensor, op)
    return _run("all_reduce", group, tensor, async_op, call)


def all_gather_into_(
    out: torch.Tensor, tensor: torch.Tensor, group: Group, async_op: bool = False
) -> Work:
    """Concatenate the flat `tensor`s in `out` [n * numel]; `tensor` may be this rank's slice of `out`."""
    if group.size == 1:
        if out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor)
        return DONE
    return _run("all_gather", group, out, async_op, lambda t: t.all_gather(out, tensor))


def reduce_scatter_into_(
    out: torch.Tensor,
    tensor: torch.Tensor,
    group: Group,
    op: str = "sum",
    async_op: bool = False,
) -> Work:
    """Sum the flat `tensor` [n * numel] over the group; `out` [numel] receives piece `group.rank`.

    Where the ranks share the memory that `tensor` lies in, they read each other's (shared_sums.py): it may be
    overwritten when `is_read`, or after `settle`.
    """
    if group.size == 1:
        if out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor)
        return DONE
    if _is_shared(tensor, group, op):
        call = lambda t: group.shared_sums.reduce_scatter(out.detach(), tensor.detach())
    else:
        call = lambda t: t.reduce_scatter(out, tensor, op)
    return _run("reduce_scatter", group, tensor, async_op, call)


def all_gather(tensor: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Concatenate the ranks' tensors along `dim`: [.., d, ..] → [.., n * d, ..]."""
    if group.size == 1:
        return tensor
    tensor = tensor.contiguous()
    out = tensor.new_empty((group.size, *tensor.shape))
    all_gather_into_(out.view(-1), tensor.view(-1), group)
    return out.flatten(0, 1) if dim == 0 else torch.cat(out.unbind(0), dim=dim)


def reduce_scatter(tensor: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Sum over the group and keep this rank's piece along `dim`: [.., d, ..] → [.., d / n, ..]."""
    if group.size == 1:
        return tensor
    _check_divides(tensor, group, dim)
    pieces = (
        tensor.contiguous() if dim == 0 else torch.stack(tensor.chunk(group.size, dim))
    )
    shape = list(tensor.shape)
    shape[dim] //= group.size
    out = tensor.new_empty(shape)
    reduce_scatter_into_(out.view(-1), pieces.view(-1), group)
    return out


def shard(tensor: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """This rank's piece along `dim`; no communication."""
    if group.size == 1:
        return tensor
    _check_divides(tensor, group, dim)
    return tensor.chunk(group.size, dim)[group.rank].contiguous()


def all_to_all_(
    out: torch.Tensor,
    tensor: torch.Tensor,
    group: Group,
    splits: tuple[Sequence[int], Sequence[int]] | None = None,
    async_op: bool = False,
) -> Work:
    """Send piece i of `tensor` to rank i; piece j of `out` is received from rank j.

    splits: (rows sent to each rank, rows received from each rank), rows of dimension 0, in rank order; a
    number may be 0. Without them the pieces of flat tensors are equal. What one rank sends another must be
    what that one receives from it. Raises LayoutError when the numbers do not add up to the rows of the
    tensors.
    """
    # Equal pieces.
    if splits is None:
        if group.size == 1:
            out.copy_(tensor)
            return DONE
        return _run(
            "all_to_all", group, tensor, async_op, lambda t: t.all_to_all(out, tensor)
        )
    # Pieces of any size: what stays on this rank is no traffic.
    sent, received = splits
    _check_splits("sent", sent, tensor, group)
    _check_splits("received", received, out, group)
    if group.size == 1:
        out.copy_(tensor)
        return DONE
    first = sum(sent[: group.rank])
    elsewhere = tensor.nbytes - tensor[first : first + sent[group.rank]].nbytes
    call = lambda: group.link.all_to_all(out, tensor, sent, received)
    return _finish(_begin("all_to_all_v", group, elsewhere, call), async_op)


def exchange(
    sends: Messages, receives: Messages, group: Group, async_op: bool = False
) -> Work:
    """Send each (tensor, position in the group) and receive into each (tensor, position), all at once.

    For rings: `exchange([(x, next)], [(y, previous)], group)`. Each send meets one receive of equal shape
    and dtype in an `exchange` of its destination; those between two ranks are matched in order. All ranks
    take part in their exchanges of one group in the same order. A group of one copies its sends to its
    receives.
    """
    if group.size == 1:
        for (source, _), (destination, _) in zip(sends, receives, strict=True):
            destination.copy_(source)
        return DONE
    if any(peer == group.rank for _, peer in (*sends, *receives)):
        raise LayoutError(
            f"rank {group.rank} of the {group.axes} group exchanges a tensor with itself: a "
            "copy does this without a message."
        )
    num_bytes = sum(tensor.nbytes for tensor, _ in sends)
    sends = [(tensor.contiguous(), peer) for tensor, peer in sends]
    call = lambda: group.link.exchange(sends, receives)
    work = _begin("send", group, num_bytes, call, len(sends)) if sends else call()
    return _finish(work, async_op)


def broadcast_(
    tensor: torch.Tensor, group: Group, source: int = 0, async_op: bool = False
) -> Work:
    """Copy the tensor of group position `source` to all ranks."""
    return _run(
        "broadcast", group, tensor, async_op, lambda t: t.broadcast(tensor, source)
    )


def all_gather_object(obj: Any, group: Group) -> list:
    """Return the ranks' picklable objects, in group order. For small control data among trusted peers only."""
    if group.size == 1:
        return [obj]
    _note("all_gather_object", group)
    return group.link.all_gather_object(obj)


def barrier(group: Group) -> None:
    """Return when every rank of the group has called it."""
    if group.size > 1:
        _note("barrier", group)
        group.link.barrier()


def share_memory(group: Group) -> Group:
    """Return the group with memory that its ranks share if on one host (`Group.memory`, `Group.sums`). Collective."""
    if group.transport is None or (memory := group.transport.share_memory()) is None:
        return group
    signals = group.transport.share_signals()
    if signals is None:
        return replace(group, memory=memory)
    from .shared_sums import SharedSums

    sums = SharedSums(group.rank, group.ranks, memory, signals, group.transport.failure)
    return replace(group, memory=memory, sums=sums)


def progress(group: Group) -> None:
    """Complete what needs no waiting of the reductions in shared memory. Not collective."""
    if group.sums is not None:
        group.sums.progress()


def is_read(tensor: torch.Tensor, group: Group, wait_seconds: float = 0.0) -> bool:
    """Return whether, within the time, no other rank reads a tensor that was reduced in shared memory."""
    return group.sums is None or group.sums.is_read(tensor, wait_seconds)


def settle(group: Group) -> None:
    """Return when no other rank reads a tensor that was reduced in shared memory. Collective."""
    if group.sums is not None:
        group.sums.settle()


def _run(
    operation: str,
    group: Group,
    counted: torch.Tensor,
    async_op: bool,
    call: Callable[[Transport], Work],
) -> Work:
    if group.size == 1:
        return DONE
    num_bytes = counted.numel() * counted.element_size()
    begin = lambda: call(group.link)
    return _finish(_begin(operation, group, num_bytes, begin), async_op)


def _begin(
    operation: str,
    group: Group,
    num_bytes: int,
    begin: Callable[[], Work],
    calls: int = 1,
) -> Work:
    """`begin()`, counted in the traffic of the group, noted as the place of this rank and timed in the log.

    calls: messages that begin together; they are one call of the log
    """
    group.traffic.add(operation, group.axes, group.size, num_bytes, calls)
    _note(operation, group)
    log = group.traffic.log
    return begin() if log is None else log.start(operation, group, num_bytes, begin)


def _note(operation: str, group: Group) -> None:
    if (places := writer()) is not None:
        places.collective(operation, group.axes)


def _is_shared(tensor: torch.Tensor, group: Group, op: str) -> bool:
    """Return whether all ranks can read each other's tensor."""
    return op == "sum" and group.sums is not None and group.sums.can_sum(tensor)


def _finish(work: Work, async_op: bool) -> Work:
    if async_op:
        return work
    work.wait()
    return DONE


def _check_divides(tensor: torch.Tensor, group: Group, dim: int) -> None:
    if tensor.shape[dim] % group.size:
        raise LayoutError(
            f"dimension {dim} of a tensor of shape {list(tensor.shape)} is not a multiple of "
            f"the {group.axes} group's size {group.size}: each rank keeps an equal piece."
        )


def _check_splits(
    what: str, rows: Sequence[int], tensor: torch.Tensor, group: Group
) -> None:
    if len(rows) != group.size or sum(rows) != tensor.shape[0] or min(rows) < 0:
        raise LayoutError(
            f"splits {list(rows)} of the {tensor.shape[0]} rows to be {what} over the "
            f"{group.axes} group of size {group.size}: one number a rank is needed, and they "
            "must add up to the rows."
        )
