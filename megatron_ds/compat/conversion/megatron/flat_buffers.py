"""Flat buffers of Megatron-LM's distributed optimizer: which interval belongs to which parameter.

The files name no parameters. The layout follows from the parameters of a rank in the order in which its
modules registered them (megatron-core, param_and_grad_buffer.py):

    reverse order; each begins at a multiple of 64 elements from the begin of its bucket; a bucket ends when
    it has bucket_size elements; a shared embedding (tied, with pipeline stages) has a bucket of its own

It is replayed here and compared with the sizes in the files; with another size nothing is read.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....errors import CheckpointError
from ..files.stored_tensor import MASTER, StoredTensor
from ..files.tensor_views import interval
from .names import EMBEDDING, HEAD, TensorPart

ALIGNMENT = 64
KINDS = {"param": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
REMEDY = (
    "To load the weights alone, give --no-optim (in training, --no-load-optim). To keep the "
    "optimizer, save once more in Megatron-LM with --dist-ckpt-optim-fully-reshardable."
)
Place = tuple[int, int]  # bucket, first element in it


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of one rank, in the order of registration.

    own_bucket  a shared embedding
    """

    part: TensorPart
    shape: tuple[int, ...]
    dtype: torch.dtype
    own_bucket: bool = False


def places_of(
    parameters: Sequence[LocalParameter], bucket_size: int | None
) -> tuple[list[Place], list[int]]:
    """Return (place of each parameter, lengths of the buckets without padding at their ends)."""
    places: list[Place] = []
    lengths: list[int] = []
    at = 0
    is_empty = True
    # Buffers hold the parameters in the order of their gradients, which is reversed.
    for parameter in reversed(parameters):
        start = -(-at // ALIGNMENT) * ALIGNMENT
        if parameter.own_bucket and not is_empty:
            lengths.append(start)
            start = 0
        places.append((len(lengths), start))
        at = start + math.prod(parameter.shape)
        is_empty = False
        # A bucket ends when it is full.
        if parameter.own_bucket or bucket_size is not None and at >= bucket_size:
            lengths.append(at)
            at = 0
            is_empty = True
    if not is_empty:
        lengths.append(at)
    return places[::-1], lengths


def bucket_sizes(args: Mapping[str, Any], numel: int) -> list[int | None]:
    """Return the bucket sizes that these arguments may have led to, the most probable first."""
    ranks = args.get("data_parallel_size") or 1
    default = max(
        40_000_000, 1_000_000 * ranks * (args.get("context_parallel_size") or 1)
    )
    chosen = args.get("ddp_bucket_size")
    if args.get("ddp_num_buckets"):
        chosen = numel // args["ddp_num_buckets"]
    found = [chosen or default, default, None]
    return found if args.get("overlap_grad_reduce") else [None, *found[:2]]


def is_of_experts(name: str) -> bool:
    """Return whether a parameter of ours belongs to experts that expert-parallel ranks divide."""
    return ".mlp.experts." in name


def is_shared(name: str, args: Mapping[str, Any]) -> bool:
    """Return whether a parameter is an embedding that two pipeline stages hold: tied, or read by further depths."""
    if (args.get("pipeline_model_parallel_size") or 1) == 1:
        return False
    if args.get("mtp_num_layers"):
        return name == EMBEDDING
    tied = not args.get("untie_embeddings_and_output_weights")
    return tied and name in (EMBEDDING, HEAD)


# ---- distrib_optim.pt: one file for each model-parallel rank, buckets one after the other.


def from_file(
    content: Any,
    chunks: Sequence[Sequence[LocalParameter]],
    args: Mapping[str, Any],
    place: str,
) -> dict[str, dict[TensorPart, StoredTensor]]:
    """Return the mapping kind → part → tensor of this rank. chunks: parameters of each model chunk.

    Raises CheckpointError if the layout cannot be replayed.
    """
    # Each chained optimizer has its own buffers.
    states = content if isinstance(content, list | tuple) else [content]
    found: dict[str, dict[TensorPart, StoredTensor]] = {
        kind: {} for kind in KINDS.values()
    }
    for number, state in enumerate(states):
        if state is None and len(states) > 1:
            continue  # other expert-parallel ranks have the state of dense parameters
        if len(states) > 1:  # the dense parameters, then those of experts
            chosen = [
                [p for p in chunk if is_of_experts(p.part.name) == bool(number)]
                for chunk in chunks
            ]
        else:
            chosen = [list(chunk) for chunk in chunks]
        if not isinstance(state, Mapping) or not state.get("buckets_coalesced"):
            raise CheckpointError(
                f"{place} is of a version of Megatron-LM before 0.6, which stored buckets "
                f"one by one. {REMEDY}"
            )
        # Buffers follow the order of chunks and dtypes.
        groups = [group for chunk in chosen for group in _by_dtype(chunk)]
        buffers: list[Any] = []
        for index, value in state.items():
            if isinstance(index, int):
                buffers += value.values()
        if len(groups) != len(buffers):
            raise CheckpointError(
                f"{place} has {len(buffers)} buffers, and the parameters of this rank need "
                f"{len(groups)}. {REMEDY}"
            )
        for group, buffer in zip(groups, buffers):
            _split(group, buffer, args, place, found)
    return found


def _by_dtype(parameters: Iterable[LocalParameter]) -> list[list[LocalParameter]]:
    groups: dict[torch.dtype, list[LocalParameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.dtype, []).append(parameter)
    return list(groups.values())


def _split(
    group: Sequence[LocalParameter],
    buffer: Mapping[str, Any],
    args: Mapping[str, Any],
    place: str,
    found: dict[str, dict[TensorPart, StoredTensor]],
) -> None:
    numel = buffer.get("numel_unpadded")
    for size in bucket_sizes(args, numel or 0):
        places, lengths = places_of(group, size)
        if sum(lengths) == numel:
            break
    else:
        raise CheckpointError(
            f"{place}: a buffer has {numel} elements, and the parameters of this rank make "
            f"{sum(lengths)}. The file belongs to another rank or model. {REMEDY}"
        )
    for key, kind in KINDS.items():
        flat = buffer.get(key)
        if not isinstance(flat, StoredTensor) or flat.shape != (numel,):
            raise CheckpointError(
                f"{place}: {key} is not a flat tensor of {numel} elements."
            )
        for parameter, (bucket, start) in zip(group, places):
            found[kind][parameter.part] = interval(
                flat, sum(lengths[:bucket]) + start, parameter.shape
            )
