"""Merging tensors of Megatron-LM's model-parallel ranks, and the older packings of QKV."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ....errors import CheckpointError
from ..files.stored_tensor import StoredTensor
from ..files.tensor_views import changed, merged_over_ranks, stacked
from .megatron_names import VOCABULARY, Part

_SPLITS = tuple(
    (re.compile(pattern), dim)
    for pattern, dim in (
        (r".*\.linear_qkv\.(weight|bias)", 0),
        (r".*\.linear_fc1\.(weight|bias)", 0),
        (r".*\.(linear_proj|linear_fc2)\.weight", 1),
    )
)
ByRank = dict[
    tuple[int, int], StoredTensor
]  # (tensor-parallel, expert-parallel rank) → local tensor


def split_of(name: str, args: Mapping[str, Any]) -> tuple[int | None, int]:
    """(dimension that tensor parallelism splits, pieces packed along it) of our name, for one expert."""
    if name in VOCABULARY:
        return 0, 1
    dim = next((dim for pattern, dim in _SPLITS if pattern.fullmatch(name)), None)
    is_gate = dim == 0 and "linear_fc1" in name and bool(args.get("swiglu"))
    return dim, 2 if is_gate else 1


def merged(
    parts: Mapping[Part, ByRank], args: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """Our name → logical tensor. Raises CheckpointError where ranks or experts are missing."""
    by_name: dict[str, dict[Part, StoredTensor]] = {}
    for part, by_rank in parts.items():
        ranks = sorted(by_rank)
        dim, blocks = split_of(part.name, args)
        if (
            part.expert is None and len({ep for _, ep in ranks}) > 1
        ):  # expert-parallel ranks: copies
            by_rank = {
                (tp, 0): merged_over_ranks(
                    [by_rank[rank] for rank in ranks if rank[0] == tp],
                    None,
                    1,
                    part.name,
                )
                for tp in sorted({tp for tp, _ in ranks})
            }
        whole = merged_over_ranks(
            [by_rank[rank] for rank in sorted(by_rank)], dim, blocks, part.name
        )
        by_name.setdefault(part.name, {})[part] = whole
    return {name: _one(name, found) for name, found in by_name.items()}


def _one(name: str, parts: Mapping[Part, StoredTensor]) -> StoredTensor:
    if Part(name) in parts:
        return parts[Part(name)]
    experts = [parts.get(Part(name, number)) for number in range(len(parts))]
    if None in experts:
        numbers = sorted(part.expert or 0 for part in parts)
        raise CheckpointError(
            f"{name}: experts {numbers} are stored, with numbers missing. Files of a rank "
            "are missing."
        )
    return stacked(experts, name)


def expanded_experts(
    part: Part, tensor: StoredTensor, count: int
) -> list[tuple[Part, StoredTensor]]:
    """The experts of `weight1` [h, E f] and `weight2` [E f, h], in which older versions join them."""
    layer, _, leaf = part.name.rpartition(".")
    if not layer.endswith(".mlp.experts") or leaf not in ("weight1", "weight2"):
        return [(part, tensor)]
    name = f"{layer}.linear_fc{leaf[-1]}.weight"
    if len(tensor.shape) != 2 or tensor.shape[1 if leaf == "weight1" else 0] % count:
        raise CheckpointError(
            f"{tensor.place} has the shape {list(tensor.shape)}, which is not that of "
            f"{count} experts."
        )
    rows, columns = tensor.shape
    shape = (columns // count, rows) if leaf == "weight1" else (columns, rows // count)

    def one(expert: int) -> StoredTensor:
        if leaf == "weight1":  # as it is computed with: view [E, h, f]
            return changed(
                tensor, shape, lambda whole: whole.reshape(count, rows, -1)[expert].t()
            )
        return changed(
            tensor, shape, lambda whole: whole.reshape(count, -1, columns)[expert].t()
        )

    return [(Part(name, expert), one(expert)) for expert in range(count)]


def with_experts_of(part: Part, rank: int, count: int) -> Part:
    """The part with the global number of its expert. count: experts of a rank."""
    return (
        part
        if part.expert is None
        else replace(part, expert=part.expert + rank * count)
    )


def repacked_qkv(
    name: str, tensor: StoredTensor, version: float, head_dim: int
) -> StoredTensor:
    """A rank's rows of linear_qkv, of an older checkpoint_version, as [heads, 3, d] like ours.

    Version 0 has rows [3, heads, d], 1.0 [heads, d, 3], 2.0 and later ours.
    """
    if version >= 2.0 or ".linear_qkv." not in name:
        return tensor
    rows = tensor.shape[0]
    rest = tensor.shape[1:]
    if rows % (3 * head_dim):
        raise CheckpointError(
            f"{tensor.place} has {rows} rows, which are not queries, keys and values of "
            f"heads of {head_dim} channels, as checkpoint_version {version} has them."
        )
    heads = rows // (3 * head_dim)

    def read(whole: torch.Tensor) -> torch.Tensor:
        if version == 0:
            return (
                whole.reshape(3, heads, head_dim, *rest)
                .transpose(0, 1)
                .reshape(rows, *rest)
            )
        return (
            whole.reshape(heads, head_dim, 3, *rest)
            .transpose(1, 2)
            .reshape(rows, *rest)
        )

    return changed(tensor, tensor.shape, read)
