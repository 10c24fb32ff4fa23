"""Tensors of Megatron-DeepSpeed merged over tensor-parallel ranks, by their names.

    word_embeddings, query_key_value, dense_h_to_4h, lm_head, output_layer      rows of all ranks
    dense, dense_4h_to_h                                                        columns of all ranks
    others, such as norms, position embeddings, biases of the last two          equal on all ranks

With a gated feed-forward dense_h_to_4h is [gate; up] on each rank, and so is the whole.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import CheckpointError
from .files.stored_tensor import StoredTensor
from .files.tensor_views import merged_over_ranks

ROWS = re.compile(
    r"(?:.*\.)?(?:word_embeddings|query_key_value|dense_h_to_4h|lm_head|output_layer)"
    r"\.(?:weight|bias)|.*lm_head\.weight"
)
COLUMNS = re.compile(r".*\.(?:dense|dense_4h_to_h)\.weight")
EQUAL = re.compile(
    r".*(?:layernorm|norm|position_embeddings|tokentype_embeddings|dense|dense_4h_to_h)"
    r"\.(?:weight|bias)|\d+\.(?:weight|bias)|.*\.rotary_emb\.inv_freq"
)


@dataclass(frozen=True)
class RankPacking:
    """How tensors of several parts lie on a tensor-parallel rank.

    thirds  query_key_value is [Q; K; V] on each rank; False: whole heads on each. None: not known
    gated   dense_h_to_4h is [gate; up] on each rank
    """

    thirds: bool | None = None
    gated: bool = False


def merged_over_tp(
    name: str, ranks: Sequence[StoredTensor], packing: RankPacking
) -> StoredTensor:
    """Return the whole tensor. Raises CheckpointError for names that are not known and shapes that differ."""
    # Ranks hold equal shapes, as sizes divide.
    shapes = {rank.shape for rank in ranks}
    if len(shapes) > 1:
        raise CheckpointError(
            f"{name} has the shapes {sorted(shapes)} on the tensor-parallel ranks. Files "
            "are mixed up."
        )
    if "query_key_value" in name and packing.thirds is None:
        raise CheckpointError(unknown_packing(ranks[0].place))
    # Packed tensors are divided block by block.
    parts = 1
    if "query_key_value" in name and packing.thirds:
        parts = 3
    elif "dense_h_to_4h" in name and packing.gated:
        parts = 2
    # The name decides the dimension that ranks divide.
    if COLUMNS.fullmatch(name):
        dim = 1
    elif ROWS.fullmatch(name):
        dim = 0
    elif EQUAL.fullmatch(name):
        return ranks[0]
    else:
        raise CheckpointError(
            f"{ranks[0].place}: how tensor-parallel ranks divide {name} is known only for "
            "Megatron-DeepSpeed. Convert the checkpoint with DeepSpeed's ds_to_universal "
            "first, and load its folder."
        )
    return merged_over_ranks(
        ranks, dim, parts, f"{name} in {ranks[0].place} and {len(ranks) - 1} more"
    )


def unknown_packing(place: object) -> str:
    """Return the message for a query_key_value of Megatron-DeepSpeed whose order of rows is not recorded."""
    return (
        f"{place}: the rows of query_key_value are in one of two orders, and the files do not record "
        "which. Programs that train with Megatron-DeepSpeed since January 2024 use all queries, then all "
        "keys, then all values (of each tensor-parallel rank): --qkv-packing thirds. Its converters, and "
        "earlier versions, use q, k, v of one head after the other: --qkv-packing heads. The wrong one "
        "loads without an error and gives another model: compare the loss."
    )
