"""Every collective of the project, in one place, counted in `group.traffic`.

Names ending in `_` write in place. `n` is the group size. A group of one is no special case for callers: in-place
operations leave the tensor as it is, the others return their input. Raises LayoutError where a size does not divide.
"""

from dataclasses import replace

import torch

from ..errors import LayoutError
from .group import DONE, Group, Work


def all_reduce_(tensor: torch.Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Work:
    """Sum (or max, min) of `tensor` over the group, written into it on every rank."""
    return _run("all_reduce", group, tensor, async_op, lambda t: t.all_reduce(tensor, op))


def all_gather_into_(out: torch.Tensor, tensor: torch.Tensor, group: Group, async_op: bool = False) -> Work:
    """Lay the ranks' flat `tensor`s one after the other in `out` [n * numel]; `tensor` may be a slice of `out`."""
    if group.size == 1:
        if out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor)
        return DONE
    return _run("all_gather", group, out, async_op, lambda t: t.all_gather(out, tensor))


def reduce_scatter_into_(out: torch.Tensor, tensor: torch.Tensor, group: Group, op: str = "sum",
                         async_op: bool = False) -> Work:
    """Sum the flat `tensor` [n * numel] over the group; piece `group.rank` of it lands in `out` [numel]."""
    if group.size == 1:
        if out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor)
        return DONE
    return _run("reduce_scatter", group, tensor, async_op, lambda t: t.reduce_scatter(out, tensor, op))


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
    pieces = tensor.contiguous() if dim == 0 else torch.stack(tensor.chunk(group.size, dim))
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


def all_to_all_(out: torch.Tensor, tensor: torch.Tensor, group: Group, async_op: bool = False) -> Work:
    """Piece i of the flat `tensor` goes to rank i; piece j of `out` comes from rank j. Pieces are equal."""
    if group.size == 1:
        out.copy_(tensor)
        return DONE
    return _run("all_to_all", group, tensor, async_op, lambda t: t.all_to_all(out, tensor))


def broadcast_(tensor: torch.Tensor, group: Group, source: int = 0, async_op: bool = False) -> Work:
    """Copy the tensor of group position `source` into everybody's."""
    return _run("broadcast", group, tensor, async_op, lambda t: t.broadcast(tensor, source))


def all_gather_object(obj, group: Group) -> list:
    """The ranks' picklable objects, in group order. For small control data among trusted peers only."""
    return [obj] if group.size == 1 else group.transport.all_gather_object(obj)


def broadcast_object(obj, group: Group, source: int = 0):
    """The object of group position `source`, on every rank."""
    return all_gather_object(obj if group.rank == source else None, group)[source]


def barrier(group: Group) -> None:
    """Return once every rank of the group has come here."""
    if group.size > 1:
        group.transport.barrier()


def share_memory(group: Group) -> Group:
    """The group with memory that its ranks see of each other, where they are processes of one host. Collective."""
    return group if group.transport is None else replace(group, memory=group.transport.share_memory())


def _run(operation: str, group: Group, counted: torch.Tensor, async_op: bool, call) -> Work:
    if group.size == 1:
        return DONE
    group.traffic.add(operation, group.axes, group.size, counted.numel() * counted.element_size())
    work = call(group.transport)
    if async_op:
        return work
    work.wait()
    return DONE


def _check_divides(tensor: torch.Tensor, group: Group, dim: int) -> None:
    if tensor.shape[dim] % group.size:
        raise LayoutError(f"dimension {dim} of a tensor of shape {list(tensor.shape)} is not a multiple of the "
                          f"{group.axes} group's size {group.size}: each rank keeps an equal piece.")
