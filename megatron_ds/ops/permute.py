"""Movement of rows between tokens and the experts' rows of their slots, and its adjoint.

Slot t k + j is the j-th choice of token t. Two int64 tensors, each the inverse of the other, describe the
movement:

    slots  [R]        the slot of each row
    place  [T, used]  the row of each slot, used <= k; -1: none. Slots of a token behind `used` have no rows

Operations with `_padded` also take rows without a slot, -1 in `slots`, which are zeros.

Implementations: on GPUs one launch forward and one backward; else torch's
operations, with backwards of our own that keep little. Sums over the slots of a token are in fp32 (fp64 for
fp64), in the order of slots, and rounded once, so no sum depends on the order of arrival.
"""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .kernel_table import Operation, random_tensors


@Operation
def permute(
    x: torch.Tensor, slots: torch.Tensor, place: torch.Tensor, k: int
) -> torch.Tensor:
    """x [T, h] → rows [R, h]: row i is the token of slot slots[i]. Keeps `place` alone."""
    return _Permute.apply(x, slots, place, k)


@Operation
def combine(
    rows: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """rows [R, h], weights [T, k] → y [T, h]: y[t] = Σ_j weights[t, j] rows[place[t, j]]."""
    return _Combine.apply(rows, weights, slots, place)


@Operation
def reorder(
    x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
) -> torch.Tensor:
    """x [n, h] → rows order[i] of x; `inverse` is the inverse permutation, which alone is kept."""
    return _Reorder.apply(x, order, inverse)


@Operation
def permute_padded(
    x: torch.Tensor, slots: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """`permute` with place [T, k] and rows of zeros where the slot is -1."""
    return _PermutePadded.apply(x, slots, place)


@Operation
def combine_padded(
    rows: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """`combine` with place [T, k]; rows without a slot are read by no token and have the gradient zero."""
    return _CombinePadded.apply(rows, weights, slots, place)


def _routed(
    tokens: int, k: int, device: torch.device, padding: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots, place [tokens, k]) where a fifth of the slots has no row; padding: rows without a slot."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(tokens * k, generator=generator)
    slots = slots[slots % 5 != 3]
    # Rows without a slot stand behind the first row.
    none = slots.new_full((padding,), -1)
    slots = torch.cat((slots[:1], none, slots[1:]))
    # Rows without a slot write behind the end, which is dropped.
    place = torch.full((tokens * k + 1,), -1)
    place[slots] = torch.arange(len(slots))
    return slots.to(device), place[:-1].view(tokens, k).to(device)


def _weights(rows: int, k: int, device: torch.device) -> torch.Tensor:
    """fp32 [rows, k], as a router gives them."""
    return random_tensors(torch.float32, device, (rows, k))[0]


@permute.example
def _permute_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    return (*random_tensors(dtype, device, (rows, width)), *_routed(rows, 3, device), 3)


@permute_padded.example
def _padded_permute_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    return (*random_tensors(dtype, device, (rows, width)), *_routed(rows, 3, device, 4))


@combine.example
def _combine_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device, padding: int = 0
) -> tuple:
    slots, place = _routed(rows, 3, device, padding)
    of_experts = random_tensors(dtype, device, (len(slots), width))
    return (*of_experts, _weights(rows, 3, device), slots, place)


@combine_padded.example
def _padded_combine_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    return _combine_example(rows, width, dtype, device, padding=4)


@reorder.example
def _reorder_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(rows, generator=generator)
    return (
        *random_tensors(dtype, device, (rows, width)),
        order.to(device),
        order.argsort().to(device),
    )


class _Permute(Function):
    """Row i of the result is the token of slot order[i].

    The gradient of a token is the sum over its slots.
    """

    @staticmethod
    def forward(ctx, x, order, place, k):
        ctx.save_for_backward(place)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (place,) = ctx.saved_tensors
        return _sum_of_slots(grad, place, ctx.k).to(grad.dtype), None, None, None


class _Reorder(Function):
    """Row i of the result is row order[i]; the gradient is moved back by the inverse."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _Combine(Function):
    """y[t] = Σ_j weights[t, j] rows[place[t k + j]], summed in fp32 and rounded once."""

    @staticmethod
    def forward(ctx, rows, weights, order, place):
        ctx.save_for_backward(rows, weights, order, place)
        return _sum_of_slots(rows, place, weights.shape[1], weights).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        rows, weights, order, place = ctx.saved_tensors
        k = weights.shape[1]
        # Slots without a row have the weights' gradient 0.
        drows = torch.empty_like(rows)
        dweights = torch.zeros(
            weights.numel(), dtype=weights.dtype, device=weights.device
        )
        # As many rows at a time as there are tokens: all in fp32 would be 8 times the memory of the rows.
        parts = (t.split(max(len(grad), 1)) for t in (rows, drows, order))
        for of_experts, out, slots in zip(*parts):
            of_tokens = grad.index_select(0, slots // k).to(_wide(grad))  # [T, h]
            dweights[slots] = (of_tokens * of_experts).sum(1).to(weights.dtype)
            scale = weights.flatten().index_select(0, slots).to(of_tokens.dtype)
            out.copy_(of_tokens.mul_(scale[:, None]))
        return drows, dweights.view_as(weights), None, None


def _sum_of_slots(
    rows: torch.Tensor, place: torch.Tensor, k: int, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, h] in `_wide` precision: the sum over slots of a token of its rows, times weights [T, k].

    One slot after another, so k rows of every token are never in memory together.
    """
    is_full = len(rows) == len(place) * k
    total = None
    dtype = _wide(rows)
    for j in range(place.shape[1] if len(rows) else 0):
        index = place[:, j]
        # A slot without a row reads row 0.
        read = index if is_full else index.clamp(min=0)
        part = _weighted(rows.index_select(0, read), weights, j, dtype)
        # Not times 0, since row 0 may be infinite.
        if not is_full:
            part.masked_fill_((index < 0)[:, None], 0)
        total = part if total is None else total.add_(part)
    if total is None:
        return rows.new_zeros(len(place), rows.shape[1], dtype=dtype)
    return total


def _weighted(
    part: torch.Tensor, weights: torch.Tensor | None, j: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows of the j-th slot of each token in `dtype`, times their weights if there are any."""
    if weights is None:
        return part.to(dtype)
    return part * weights[:, j, None].to(dtype)


class _PermutePadded(Function):
    """Row i of the result is the token of slot to_expert[i], zeros where that is -1. rows: [T', k].

    The gradient of a token is the sum over its slots.
    """

    @staticmethod
    def forward(ctx, x, to_expert, rows):
        ctx.save_for_backward(rows)
        return _taken(x, to_expert // rows.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        return _padded_sum_of_slots(grad, rows).to(grad.dtype), None, None


class _CombinePadded(Function):
    """y[t] = Σ_j weights[t, j] x[rows[t, j]], summed in fp32 (fp64) in the order of slots, rounded once."""

    @staticmethod
    def forward(ctx, x, weights, to_expert, rows):
        ctx.save_for_backward(x, weights, to_expert, rows)
        return _padded_sum_of_slots(x, rows, weights).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weights, to_expert, rows = ctx.saved_tensors
        # The gradient of each row's token, and the weight of its slot.
        tokens = to_expert // rows.shape[1]
        of_rows = _taken(grad, tokens).to(_wide(grad))
        scale = _taken(weights.flatten()[:, None], to_expert).to(of_rows.dtype)
        dots = (of_rows * x.to(of_rows.dtype)).sum(1, keepdim=True)
        dweights = _taken(dots, rows.flatten()).view_as(weights)
        dx = (of_rows * scale).to(x.dtype)
        return dx, dweights.to(weights.dtype), None, None


def _taken(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x[index], 0 where the index is -1."""
    is_none = (index < 0)[:, None]
    taken = x.index_select(0, index.clamp(min=0))
    return taken.masked_fill_(is_none, 0)


def _padded_sum_of_slots(
    x: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """[T', c]: the sum over j of x[rows[:, j]], times weights[:, j] if given, one after another."""
    # Slots without a row read row 0, and count as zeros.
    total: torch.Tensor | None = None
    dtype = _wide(x)
    there = rows.clamp(min=0)
    is_none = rows < 0
    for j in range(rows.shape[1]):
        part = _weighted(x.index_select(0, there[:, j]), weights, j, dtype)
        part.masked_fill_(is_none[:, j, None], 0)
        total = part if total is None else total.add_(part)
    assert total is not None, "each token has a slot"
    return total


def _wide(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which rows of x are added up."""
    if x.dtype is torch.float64:
        return torch.float64
    return torch.float32
