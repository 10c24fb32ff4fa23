"""`Packing`: how tensors of another program form one of ours, and how ours is cut into theirs.

All packings move elements and compute nothing, so they apply to weights and to elementwise optimizer state.
Letters: n heads, g groups of query heads that share a key and a value, d channels of a head, E experts.

    ours       rows of linear_qkv:  for each group  q_1 .. q_{n/g}  k  v          each letter d rows
    [Q; K; V]  all queries, then all keys, then all values

Biases are packed as the rows of their weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ...config.options.model import ModelConfig
from ...host.reused_pages import uninitialized

Parts = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Packing:
    """Two functions that are inverse to each other.

    to_ours    function(their tensors, model) -> our tensor
    to_theirs  function(our tensor, model) -> their tensors. Views are allowed, and meta tensors: their
               shapes are found in this way
    is_joined  their tensors are read as one, whatever rows each of them has
    """

    name: str
    to_ours: Callable[[Parts, ModelConfig], torch.Tensor]
    to_theirs: Callable[[torch.Tensor, ModelConfig], Parts]
    is_joined: bool = False

    def shapes(self, shape: Sequence[int], model: ModelConfig) -> list[tuple[int, ...]]:
        """Return the shapes of their tensors, from the shape of ours."""
        ours = torch.empty(shape, device="meta")
        theirs = self.to_theirs(ours, model)
        return [tuple(part.shape) for part in theirs]


# ---- Queries, keys and values.


def join_heads(parts: Parts, model: ModelConfig) -> torch.Tensor:
    """Q [n d, ..], K and V [g d, ..] → our rows [(n + 2 g) d, ..]."""
    groups = [part.unflatten(0, (model.query_groups, -1)) for part in parts]
    joined = _joined(groups, 1)
    return joined.flatten(0, 1)


def _joined(parts: Parts, dim: int) -> torch.Tensor:
    """torch.cat, in memory that was used before (`host.reused_pages`)."""
    first = parts[0]
    total = sum(part.shape[dim] for part in parts)
    shape = (*first.shape[:dim], total, *first.shape[dim + 1 :])
    whole = uninitialized(shape, first.dtype)
    return torch.cat(list(parts), dim, out=whole)


def split_heads(rows: torch.Tensor, model: ModelConfig) -> list[torch.Tensor]:
    """Return our rows [(n + 2 g) d, ..] → Q [n d, ..], K and V [g d, ..]."""
    d = model.head_dim
    queries = model.num_attention_heads // model.query_groups
    sizes = (queries * d, d, d)
    groups = rows.unflatten(0, (model.query_groups, -1))  # [g, (n/g + 2) d, ..]
    return [_flattened(part) for part in groups.split(sizes, 1)]


def _flattened(part: torch.Tensor) -> torch.Tensor:
    """Return the first two dimensions as one: a view, or a copy in memory that was used before."""
    if part.is_meta or part.is_contiguous():
        return part.flatten(0, 1)
    copy = uninitialized(part.shape, part.dtype)
    copy.copy_(part)
    return copy.flatten(0, 1)


def _split_rows(rows: torch.Tensor, model: ModelConfig) -> list[torch.Tensor]:
    """Return the mapping their rows [Q; K; V] → the three parts."""
    queries = model.num_attention_heads * model.head_dim
    keys = model.query_groups * model.head_dim
    return list(rows.split((queries, keys, keys)))


def _join_rows(parts: Parts, model: ModelConfig) -> torch.Tensor:
    """Return the mapping their rows [Q; K; V] → our rows."""
    theirs = _split_rows(parts[0], model)
    return join_heads(theirs, model)


def _to_rows(rows: torch.Tensor, model: ModelConfig) -> list[torch.Tensor]:
    """Return the mapping our rows → their rows [Q; K; V]."""
    theirs = split_heads(rows, model)
    return [torch.cat(theirs)]


# ---- Experts: [E, rows, columns], one tensor or several for each expert.


def _stack(tensors_of_expert: int, parts: Parts, model: ModelConfig) -> torch.Tensor:
    """Return their tensors as one of ours; the tensors of an expert follow each other in the list."""
    rows, *rest = parts[0].shape
    experts = len(parts) // tensors_of_expert
    shape = (experts, tensors_of_expert * rows, *rest)
    stacked = uninitialized(shape, parts[0].dtype)
    by_part = stacked.view(len(parts), rows, *rest)
    torch.stack(list(parts), out=by_part)
    return stacked


def _unstack(
    tensors_of_expert: int, experts: torch.Tensor, model: ModelConfig
) -> list[torch.Tensor]:
    """Return the tensors that `_stack` joins."""
    return [part for expert in experts for part in expert.chunk(tensors_of_expert)]


def _halves(parts: Parts, model: ModelConfig) -> torch.Tensor:
    """Return their columns g_1 u_1 g_2 u_2 … [E, h, 2 f], or numbers [E, 2 f], as our rows [gate; up]."""
    columns = parts[0]
    rows = columns.transpose(1, -1)
    pairs = rows.unflatten(1, (-1, 2))
    halves = pairs.transpose(1, 2)
    return halves.flatten(1, 2)


def _alternating(experts: torch.Tensor, model: ModelConfig) -> list[torch.Tensor]:
    """Return the inverse of `_halves`."""
    halves = experts.unflatten(1, (2, -1))
    pairs = halves.transpose(1, 2)
    rows = pairs.flatten(1, 2)
    columns = rows.transpose(1, -1)
    return [columns]


UNUSED_ROWS = 2  # before the first position in tables of OPT

SAME = Packing(
    "the same",
    lambda parts, model: parts[0],
    lambda tensor, model: [tensor],
)
TRANSPOSED = Packing(
    "transposed",
    lambda parts, model: parts[0].t(),
    lambda tensor, model: [tensor.t()],
)
QKV_SPLIT = Packing("q, k and v", join_heads, split_heads)
QKV_ROWS = Packing("rows [Q; K; V]", _join_rows, _to_rows)
QKV_COLUMNS = Packing(
    "columns [Q, K, V]",
    lambda parts, model: _join_rows([parts[0].t()], model),
    lambda tensor, model: [_to_rows(tensor, model)[0].t()],
)
GATE_UP = Packing(
    "gate and up",
    lambda parts, model: _joined(parts, 0),
    lambda tensor, model: tensor.chunk(2),
)
ROWS_FROM_2 = Packing(
    "rows from 2",
    lambda parts, model: parts[0][UNUSED_ROWS:],
    lambda tensor, model: [
        torch.cat((tensor.new_zeros(UNUSED_ROWS, *tensor.shape[1:]), tensor))
    ],
)
EXPERTS = Packing("one for each expert", partial(_stack, 1), partial(_unstack, 1))
EXPERTS_GATE_UP = Packing(
    "gate and up for each expert",
    partial(_stack, 2),
    partial(_unstack, 2),
)
ALTERNATING = Packing(
    "gate and up by turns",
    _halves,
    _alternating,
)
EXPERTS_TRANSPOSED = Packing(
    "transposed for each expert",
    lambda parts, model: parts[0].mT,
    lambda tensor, model: [tensor.mT],
)
