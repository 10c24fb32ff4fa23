"""Merging tensors of Megatron-LM's model-parallel ranks, and the older packings of QKV."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ....errors import CheckpointError
from ..files.stored_tensor import StoredTensor
from ..files.tensor_views import changed, merged_over_ranks, stacked
from .names import VOCABULARY, TensorPart

_SPLITS = (
    (re.compile(r".*\.linear_qkv\.(weight|bias)"), 0),
    (re.compile(r".*\.linear_(q|q_up|kv_up)_proj\.weight"), 0),
    (re.compile(r".*\.eh_proj\.weight"), 0),
    (re.compile(r".*\.linear_fc1\.(weight|bias)"), 0),
    (re.compile(r".*\.(linear_proj|linear_fc2)\.weight"), 1),
)
# Projections to latents: megatron-core's own layers divide them, those of TransformerEngine do not.
_DOWN = re.compile(r".*\.linear_(q|kv)_down_proj\.weight")
# (tensor-parallel rank, expert-parallel rank) → local tensor
ByRank = dict[tuple[int, int], StoredTensor]


def split_of(name: str, args: Mapping[str, Any]) -> tuple[int | None, int]:
    """Return (dimension that tensor parallelism splits, pieces packed along it) of our name, for one expert."""
    if name in VOCABULARY:
        return 0, 1
    if _DOWN.fullmatch(name):
        return (0 if args.get("transformer_impl") == "local" else None), 1
    matching = (dim for pattern, dim in _SPLITS if pattern.fullmatch(name))
    dim = next(matching, None)
    # The first matrix of a gated MLP packs the gate and the value.
    is_gated = bool(args.get("swiglu"))
    if dim == 0 and is_gated and "linear_fc1" in name:
        return dim, 2
    return dim, 1


def merged(
    parts: Mapping[TensorPart, ByRank], args: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """Return the mapping our name → logical tensor. Raises CheckpointError where ranks or experts are missing."""
    by_name: dict[str, dict[TensorPart, StoredTensor]] = {}
    for part, by_rank in parts.items():
        # Expert-parallel ranks hold copies of what is outside of experts.
        if part.expert is None:
            by_rank = _without_copies(part.name, by_rank)
        # Tensor-parallel ranks hold parts along one dimension.
        dim, blocks = split_of(part.name, args)
        tensors = [by_rank[rank] for rank in sorted(by_rank)]
        whole = merged_over_ranks(tensors, dim, blocks, part.name)
        by_name.setdefault(part.name, {})[part] = whole
    return {name: _one(name, found) for name, found in by_name.items()}


def _without_copies(name: str, by_rank: ByRank) -> ByRank:
    """Return one tensor for each tensor-parallel rank; copies are compared when they are read."""
    expert_ranks = {ep for _, ep in by_rank}
    if len(expert_ranks) <= 1:
        return by_rank
    # The tensors of each tensor-parallel rank, in the order of their expert-parallel ranks.
    copies: dict[int, list[StoredTensor]] = {}
    for tp, ep in sorted(by_rank):
        copies.setdefault(tp, []).append(by_rank[tp, ep])
    merged_copies = {}
    for tp, found in copies.items():
        merged_copies[tp, 0] = merged_over_ranks(found, None, 1, name)
    return merged_copies


def _one(name: str, parts: Mapping[TensorPart, StoredTensor]) -> StoredTensor:
    """Return the tensor of this name; the experts' tensors along a new first dimension."""
    whole = TensorPart(name)
    if whole in parts:
        return parts[whole]
    # Experts are numbered without gaps.
    experts = []
    for number in range(len(parts)):
        part = TensorPart(name, number)
        if part not in parts:
            numbers = sorted(part.expert or 0 for part in parts)
            raise CheckpointError(
                f"{name}: experts {numbers} are stored, with numbers missing. Files of a rank "
                "are missing."
            )
        experts.append(parts[part])
    return stacked(experts, name)


def expanded_experts(
    part: TensorPart, tensor: StoredTensor, count: int
) -> list[tuple[TensorPart, StoredTensor]]:
    """Return the experts of `weight1` [h, E f] and `weight2` [E f, h], in which older versions join them."""
    # Other tensors stay.
    layer, _, leaf = part.name.rpartition(".")
    if not layer.endswith(".mlp.experts") or leaf not in ("weight1", "weight2"):
        return [(part, tensor)]
    name = f"{layer}.linear_fc{leaf[-1]}.weight"
    is_first = leaf == "weight1"
    joined = 1 if is_first else 0
    if len(tensor.shape) != 2 or tensor.shape[joined] % count:
        raise CheckpointError(
            f"{tensor.place} has the shape {list(tensor.shape)}, which is not that of "
            f"{count} experts."
        )
    # Megatron-LM computes with the views [E, h, f] and [E, f, h].
    rows, columns = tensor.shape
    if is_first:
        view = (count, rows, -1)
        shape = (columns // count, rows)
    else:
        view = (count, -1, columns)
        shape = (columns, rows // count)

    def one(expert: int) -> StoredTensor:
        def read(whole: torch.Tensor) -> torch.Tensor:
            return whole.reshape(view)[expert].t()

        return changed(tensor, shape, read)

    # Each expert reads its own slice of the joined tensor.
    found = []
    for expert in range(count):
        of_expert = TensorPart(name, expert)
        found.append((of_expert, one(expert)))
    return found


def with_experts_of(part: TensorPart, rank: int, count: int) -> TensorPart:
    """Return the part with the global number of its expert. count: experts of a rank."""
    if part.expert is None:
        return part
    first = rank * count
    return replace(part, expert=first + part.expert)


def repacked_qkv(
    name: str, tensor: StoredTensor, version: float, head_dim: int
) -> StoredTensor:
    """Return a rank's rows of linear_qkv, of an older checkpoint_version, as [heads, 3, d] like ours.

    Version 0 has rows [3, heads, d], 1.0 [heads, d, 3], 2.0 and later ours.
    """
    if version >= 2.0 or ".linear_qkv." not in name:
        return tensor
    rows = tensor.shape[0]
    rest = tensor.shape[1:]
    rows_of_head = 3 * head_dim
    if rows % rows_of_head:
        raise CheckpointError(
            f"{tensor.place} has {rows} rows, which are not queries, keys and values of "
            f"heads of {head_dim} channels, as checkpoint_version {version} has them."
        )
    # The shape of their rows, and the two dimensions that are exchanged.
    heads = rows // rows_of_head
    if version == 0:
        order = (3, heads, head_dim)
        exchanged = (0, 1)
    else:
        order = (heads, head_dim, 3)
        exchanged = (1, 2)

    def read(whole: torch.Tensor) -> torch.Tensor:
        # The rows are split into their three dimensions, two of which change places.
        theirs = whole.reshape(*order, *rest)
        ours = theirs.transpose(*exchanged)
        return ours.reshape(rows, *rest)

    return changed(tensor, tensor.shape, read)
