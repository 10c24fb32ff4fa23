"""Flat buffers of Megatron-LM's distributed optimizer: which interval belongs to which parameter.

The files name no parameters. The layout follows from the parameters of a rank in the order in which its
modules registered them (megatron-core, param_and_grad_buffer.py):

    reverse order; each begins at a multiple of 64 elements from the begin of its bucket; a bucket ends when
    it has bucket_size elements; a shared embedding (tied, with pipeline stages) has a bucket of its own

It is replayed here and compared with the sizes in the files; with another size nothing is read.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointError
from .megatron_names import EMBEDDING, HEAD, Part
from .stored_tensor import MASTER, StoredTensor
from .tensor_views import interval, merged_over_ranks
from .torch_dist_folder import Sharded, TorchDistFolder

ALIGNMENT = 64
KINDS = {"param": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
REMEDY = ("To load the weights alone, give --no-optim (in training, --no-load-optim). To keep the "
          "optimizer, save once more in Megatron-LM with --dist-ckpt-optim-fully-reshardable.")
Place = tuple[int, int]             # bucket, first element in it


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of one rank, in the order of registration.

    own_bucket  a shared embedding
    """

    part: Part
    shape: tuple[int, ...]
    dtype: torch.dtype
    own_bucket: bool = False


def places_of(parameters: Sequence[LocalParameter],
              bucket_size: int | None) -> tuple[list[Place], list[int]]:
    """(place of each parameter, lengths of the buckets without padding at their ends)."""
    places: list[Place] = []
    lengths: list[int] = []
    at, is_empty = 0, True
    for parameter in reversed(parameters):
        start = -(-at // ALIGNMENT) * ALIGNMENT
        if parameter.own_bucket and not is_empty:
            lengths.append(start)
            start = 0
        places.append((len(lengths), start))
        at, is_empty = start + math.prod(parameter.shape), False
        if parameter.own_bucket or bucket_size is not None and at >= bucket_size:
            lengths.append(at)
            at, is_empty = 0, True
    if not is_empty:
        lengths.append(at)
    return places[::-1], lengths


def bucket_sizes(args: Mapping[str, Any], numel: int) -> list[int | None]:
    """Bucket sizes that these arguments may have led to, the most probable first."""
    ranks = args.get("data_parallel_size") or 1
    default = max(40_000_000, 1_000_000 * ranks * (args.get("context_parallel_size") or 1))
    chosen = args.get("ddp_bucket_size")
    if args.get("ddp_num_buckets"):
        chosen = numel // args["ddp_num_buckets"]
    found = [chosen or default, default, None]
    return found if args.get("overlap_grad_reduce") else [None, *found[:2]]


def is_shared(name: str, args: Mapping[str, Any]) -> bool:
    """Whether a parameter is a tied embedding that two pipeline stages hold."""
    tied = not args.get("untie_embeddings_and_output_weights")
    return tied and (args.get("pipeline_model_parallel_size") or 1) > 1 and name in (EMBEDDING, HEAD)


# ---- distrib_optim.pt: one file for each model-parallel rank, buckets one after the other.

def from_file(content: Any, chunks: Sequence[Sequence[LocalParameter]], args: Mapping[str, Any],
              place: str) -> dict[str, dict[Part, StoredTensor]]:
    """kind → part → tensor of this rank. chunks: parameters of each model chunk.

    Raises CheckpointError if the layout cannot be replayed.
    """
    states = content if isinstance(content, list | tuple) else [content]
    is_expert = lambda parameter: ".mlp.experts." in parameter.part.name
    found: dict[str, dict[Part, StoredTensor]] = {kind: {} for kind in KINDS.values()}
    for number, state in enumerate(states):
        if len(states) > 1:         # the dense parameters, then those of experts
            chosen = [[p for p in chunk if is_expert(p) == bool(number)] for chunk in chunks]
        else:
            chosen = [list(chunk) for chunk in chunks]
        if not isinstance(state, Mapping) or not state.get("buckets_coalesced"):
            raise CheckpointError(f"{place} is of a version of Megatron-LM before 0.6, which stored buckets "
                                  f"one by one. {REMEDY}")
        groups = [group for chunk in chosen for group in _by_dtype(chunk)]
        buffers = [buffer for index, value in state.items() if isinstance(index, int)
                   for buffer in value.values()]
        if len(groups) != len(buffers):
            raise CheckpointError(f"{place} has {len(buffers)} buffers, and the parameters of this rank need "
                                  f"{len(groups)}. {REMEDY}")
        for group, buffer in zip(groups, buffers):
            _split(group, buffer, args, place, found)
    return found


def _by_dtype(parameters: Iterable[LocalParameter]) -> list[list[LocalParameter]]:
    groups: dict[torch.dtype, list[LocalParameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.dtype, []).append(parameter)
    return list(groups.values())


def _split(group: Sequence[LocalParameter], buffer: Mapping[str, Any], args: Mapping[str, Any], place: str,
           found: dict[str, dict[Part, StoredTensor]]) -> None:
    numel = buffer.get("numel_unpadded")
    for size in bucket_sizes(args, numel or 0):
        places, lengths = places_of(group, size)
        if sum(lengths) == numel:
            break
    else:
        raise CheckpointError(f"{place}: a buffer has {numel} elements, and the parameters of this rank make "
                              f"{sum(lengths)}. The file belongs to another rank or model. {REMEDY}")
    for key, kind in KINDS.items():
        flat = buffer.get(key)
        if not isinstance(flat, StoredTensor) or flat.shape != (numel,):
            raise CheckpointError(f"{place}: {key} is not a flat tensor of {numel} elements.")
        for parameter, (bucket, start) in zip(group, places):
            found[kind][parameter.part] = interval(flat, sum(lengths[:bucket]) + start, parameter.shape)


# ---- dp_reshardable in torch_dist: one tensor for each bucket, under the number of a model-parallel rank.

_KEY = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
                  r"\.dtype_\(.*\)\.bucket_idx_(\d+)\.(param|exp_avg|exp_avg_sq)")


def from_buckets(stored: TorchDistFolder, buffers: Mapping[str, Sharded],
                 weights: Mapping[str, StoredTensor], args: Mapping[str, Any]
                 ) -> dict[str, dict[str, StoredTensor]]:
    """kind → our name → tensor, merged over ranks. weights: by our names, with padded vocabulary.

    Raises CheckpointError if the layout cannot be replayed.
    """
    from .megatron_ranks import split_of

    buckets: dict[tuple[int, int], dict[int, dict[str, Sharded]]] = {}
    for key, tensor in buffers.items():
        found = _KEY.fullmatch(key)
        if found is None or found[1]:
            raise CheckpointError(f"{stored.path}: the optimizer stores {key}, by rank and without names, as "
                                  f"for layers with experts. {REMEDY}")
        rank, buffer, bucket = (int(found[i]) for i in (2, 3, 4))
        buckets.setdefault((rank, buffer), {}).setdefault(bucket, {})[found[5]] = tensor
    tp, pp = ((args.get(f"{axis}_model_parallel_size") or 1) for axis in ("tensor", "pipeline"))
    chunks = max(buffer for _, buffer in buckets) + 1
    if {rank for rank, _ in buckets} != set(range(tp * pp)) or len(buckets) != tp * pp * chunks:
        raise CheckpointError(f"{stored.path} has flat optimizer state of {len(buckets)} ranks and chunks, "
                              f"and its arguments describe {tp} × {pp} ranks. {REMEDY}")
    parts: dict[str, dict[str, dict[int, StoredTensor]]] = {kind: {} for kind in KINDS.values()}
    for (rank, chunk), of_chunk in buckets.items():
        for kind, name, tensor in _of_chunk(stored, of_chunk, weights, args, (rank // tp, chunk), chunks):
            parts[kind].setdefault(name, {})[rank % tp] = tensor
    return {kind: {name: merged_over_ranks([by_rank[i] for i in range(tp)], *split_of(name, args), name)
                   for name, by_rank in of_kind.items()} for kind, of_kind in parts.items()}


def _of_chunk(stored: TorchDistFolder, buckets: Mapping[int, Mapping[str, Sharded]],
              weights: Mapping[str, StoredTensor], args: Mapping[str, Any], where: tuple[int, int],
              chunks: int) -> list[tuple[str, str, StoredTensor]]:
    """(kind, our name, local tensor) of one rank's chunk. where: its pipeline rank and number."""
    lengths = [buckets[i]["param"].shape[0] for i in range(len(buckets))]
    starts = [{box.offset[0] for box in buckets[i]["param"].boxes} for i in range(len(buckets))]
    for by_layers_of_te in (True, False):
        parameters = _registered(weights, args, where, chunks, by_layers_of_te)
        for size in bucket_sizes(args, sum(lengths)):
            places, replayed = places_of(parameters, size)
            if replayed == lengths and all(start in starts[bucket] for bucket, start in places):
                return [(kind, parameter.part.name,
                         interval(buckets[bucket][key].whole(), start, parameter.shape))
                        for key, kind in KINDS.items()
                        for parameter, (bucket, start) in zip(parameters, places)]
    raise CheckpointError(f"{stored.path}: the optimizer state of pipeline rank {where[0]} is stored in flat "
                          f"buffers of {lengths} elements without names, in an order that is not that of "
                          f"megatron-core's layers. {REMEDY}")


_BEFORE = (EMBEDDING, "embedding.position_embeddings.weight")
_LOCAL = ("input_layernorm.{}", "self_attention.linear_proj.{}", "self_attention.linear_qkv.{}",
          "self_attention.q_layernorm.{}", "self_attention.k_layernorm.{}", "pre_mlp_layernorm.{}",
          "mlp.linear_fc1.{}", "mlp.linear_fc2.{}")
_TE = (_LOCAL[1], _LOCAL[0], *_LOCAL[2:])


def _registered(weights: Mapping[str, StoredTensor], args: Mapping[str, Any], where: tuple[int, int],
                chunks: int, is_te: bool) -> list[LocalParameter]:
    """Parameters of a rank's chunk in the order of registration of megatron-core's GPT."""
    from .megatron_ranks import split_of

    tp, pp = ((args.get(f"{axis}_model_parallel_size") or 1) for axis in ("tensor", "pipeline"))
    rank, chunk = where
    count, stage = args["num_layers"] // (pp * chunks), chunk * pp + rank
    names: list[str] = list(_BEFORE) if stage == 0 else []
    for layer in range(stage * count, (stage + 1) * count):
        names += [f"decoder.layers.{layer}.{pattern.format(leaf)}" for pattern in (_TE if is_te else _LOCAL)
                  for leaf in ("weight", "bias")]
    if stage == pp * chunks - 1:
        names += ["decoder.final_layernorm.weight", "decoder.final_layernorm.bias", HEAD]
    found = []
    for name in names:
        like = EMBEDDING if name == HEAD and name not in weights and is_shared(name, args) else name
        if like in weights:
            shape = list(weights[like].shape)
            dim, _ = split_of(name, args)
            if dim is not None:
                shape[dim] //= tp
            found.append(LocalParameter(Part(name), tuple(shape), weights[like].dtype,
                                        is_shared(name, args)))
    return found
