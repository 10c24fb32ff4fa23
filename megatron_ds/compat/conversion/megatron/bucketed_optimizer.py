"""Optimizer state of the kind dp_reshardable in torch_dist: one flat tensor for each bucket of a rank.

    optimizer.distributed.dp_group_idx_{rank}.gbuf_idx_{chunk}.….bucket_idx_{k}.exp_avg
    chained_0.optimizer.…       parameters that all expert-parallel ranks hold
    chained_1.optimizer.…       parameters of experts

rank     of tensor and pipeline parallelism, the tensor-parallel one first; for experts, of tensor, expert and
         pipeline parallelism
chunk    of the model, with virtual pipeline stages

The layout in a bucket is replayed as in `flat_buffers.py`, and compared with the sizes and with the places
where chunks begin. Matrices of two layers may have equal sizes; `megatron/model.py` compares the values of
masters and weights.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ....errors import CheckpointError
from ..files.stored_tensor import StoredTensor
from ..files.tensor_views import interval, merged_over_ranks, stacked
from ..files.torch_dist_folder import Sharded, TorchDistFolder
from .flat_buffers import (
    KINDS,
    REMEDY,
    LocalParameter,
    bucket_sizes,
    is_of_experts,
    is_shared,
    places_of,
)
from .names import EMBEDDING, HEAD, TensorPart
from .ranks import split_of

_KEY = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\(.*\)\.bucket_idx_(\d+)\.(param|exp_avg|exp_avg_sq)"
)
_BEFORE = (EMBEDDING, "embedding.position_embeddings.weight")
_ATTENTION = (
    "input_layernorm.{}",
    "self_attention.linear_proj.{}",
    "self_attention.linear_qkv.{}",
    "self_attention.q_layernorm.{}",
    "self_attention.k_layernorm.{}",
    "pre_mlp_layernorm.{}",
)
_TE_ATTENTION = (_ATTENTION[1], _ATTENTION[0], *_ATTENTION[2:])
_LATENT_ATTENTION = (
    "input_layernorm.{}",
    "self_attention.linear_proj.{}",
    "self_attention.linear_q_proj.{}",
    "self_attention.linear_q_down_proj.{}",
    "self_attention.linear_q_up_proj.{}",
    "self_attention.linear_kv_down_proj.{}",
    "self_attention.linear_kv_up_proj.{}",
    "self_attention.q_layernorm.{}",
    "self_attention.kv_layernorm.{}",
    "pre_mlp_layernorm.{}",
)
# TransformerEngine's layers have the norm before their weight.
_TE_LATENT_ATTENTION = (
    *_LATENT_ATTENTION[:4],
    "self_attention.q_layernorm.{}",
    *_LATENT_ATTENTION[4:6],
    "self_attention.kv_layernorm.{}",
    _LATENT_ATTENTION[6],
    _LATENT_ATTENTION[9],
)
_MLP = ("mlp.linear_fc1.{}", "mlp.linear_fc2.{}")
_SHARED = (
    "mlp.shared_experts.gate_{}",
    "mlp.shared_experts.linear_fc1.{}",
    "mlp.shared_experts.linear_fc2.{}",
)
_EXPERTS = ("mlp.experts.linear_fc1.{}", "mlp.experts.linear_fc2.{}")
Buckets = dict[int, dict[str, Sharded]]  # number → key of the state → flat tensor


@dataclass(frozen=True)
class BufferKey:
    """Coordinates of one buffer of the optimizer.

    optimizer   1 for the optimizer of experts, 0 for that of the other parameters
    tp, ep, pp  positions of its rank
    chunk       number of the model chunk on that rank
    """

    optimizer: int
    tp: int
    ep: int
    pp: int
    chunk: int


@dataclass(frozen=True)
class BufferLayout:
    """Sizes of the run that wrote the files.

    experts_tp  tensor-parallel size of experts
    chunks      of the model on each rank
    is_chained  whether experts have an optimizer of their own
    """

    tp: int
    pp: int
    ep: int
    experts_tp: int
    chunks: int
    is_chained: bool

    def place(self, optimizer: int, rank: int, chunk: int) -> BufferKey:
        """Return the place of a buffer by its numbers in the key."""
        tp, ep = (self.experts_tp, self.ep) if optimizer else (self.tp, 1)
        return BufferKey(optimizer, rank % tp, rank // tp % ep, rank // tp // ep, chunk)

    def places(self) -> set[BufferKey]:
        """Return all places, if each pipeline stage has experts."""
        ranks = {0: self.tp * self.pp} | (
            {1: self.experts_tp * self.ep * self.pp} if self.is_chained else {}
        )
        places: set[BufferKey] = set()
        for optimizer, count in ranks.items():
            for rank in range(count):
                places |= {
                    self.place(optimizer, rank, chunk) for chunk in range(self.chunks)
                }
        return places


def from_buckets(
    stored: TorchDistFolder,
    buffers: Mapping[str, Sharded],
    weights: Mapping[str, StoredTensor],
    args: Mapping[str, Any],
) -> dict[str, dict[str, StoredTensor]]:
    """Return the mapping kind → our name → tensor, merged over ranks. weights: by our names, with padded vocabulary.

    Raises CheckpointError if the layout cannot be replayed.
    """
    # The keys give optimizer, rank, chunk and bucket of each buffer.
    found: dict[str, re.Match[str]] = {}
    for key in buffers:
        match = _KEY.fullmatch(key)
        if match is None:
            raise CheckpointError(
                f"{stored.path}: the optimizer stores {key}, by rank and without names. "
                f"{REMEDY}"
            )
        found[key] = match
    size = lambda name: args.get(name) or 1
    tp = size("tensor_model_parallel_size")
    layout = BufferLayout(
        tp,
        size("pipeline_model_parallel_size"),
        size("expert_model_parallel_size"),
        args.get("expert_tensor_parallel_size") or tp,
        1 + max(int(match[3]) for match in found.values()),
        any(match[1] is not None for match in found.values()),
    )
    # Buffers are grouped by the rank and chunk that they belong to.
    buckets: dict[BufferKey, Buckets] = {}
    for key, match in found.items():
        place = layout.place(int(match[1] or 0), int(match[2]), int(match[3]))
        buckets.setdefault(place, {}).setdefault(int(match[4]), {})[match[5]] = buffers[
            key
        ]
    if buckets.keys() != layout.places():
        raise CheckpointError(
            f"{stored.path} has flat optimizer state of {len(buckets)} ranks and chunks, "
            f"and its arguments describe {len(layout.places())}. {REMEDY}"
        )
    # Each buffer is cut into parameters, whose parts are merged over tensor-parallel ranks.
    parts: dict[str, dict[TensorPart, dict[int, StoredTensor]]] = {
        kind: {} for kind in KINDS.values()
    }
    for place, of_place in buckets.items():
        for kind, part, tensor in _of_place(
            stored, of_place, weights, args, (layout, place)
        ):
            parts[kind].setdefault(part, {})[place.tp] = tensor
    return {kind: _merged(of_kind, args) for kind, of_kind in parts.items()}


def _merged(
    parts: Mapping[TensorPart, Mapping[int, StoredTensor]], args: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """Return the tensors over tensor-parallel ranks, and those of experts stacked."""
    found: dict[str, StoredTensor] = {}
    experts: dict[str, dict[int, StoredTensor]] = {}
    for part, by_rank in parts.items():
        tensor = merged_over_ranks(
            [by_rank[rank] for rank in sorted(by_rank)],
            *split_of(part.name, args),
            part.name,
        )
        if part.expert is None:
            found[part.name] = tensor
        else:
            experts.setdefault(part.name, {})[part.expert] = tensor
    for name, by_number in experts.items():
        found[name] = stacked([by_number[number] for number in sorted(by_number)], name)
    return found


def _of_place(
    stored: TorchDistFolder,
    buckets: Buckets,
    weights: Mapping[str, StoredTensor],
    args: Mapping[str, Any],
    where: tuple[BufferLayout, BufferKey],
) -> Iterator[tuple[str, TensorPart, StoredTensor]]:
    """Yield (kind, part of ours, local tensor) of one buffer."""
    # The recorded lengths and starts identify the layout.
    lengths = [buckets[i]["param"].shape[0] for i in range(len(buckets))]
    starts = [
        {box.offset[0] for box in buckets[i]["param"].boxes}
        for i in range(len(buckets))
    ]
    # Candidate orders and bucket sizes are replayed until one reproduces the recorded buffers.
    orders: Sequence[Sequence[str]] = (_TE_ATTENTION, _ATTENTION)
    if args.get("multi_latent_attention"):
        orders = (_TE_LATENT_ATTENTION, _LATENT_ATTENTION)
    for attention in orders:
        parameters = _registered(weights, args, where, attention)
        for size in bucket_sizes(args, sum(lengths)):
            places, replayed = places_of(parameters, size)
            if replayed == lengths and all(
                start in starts[bucket] for bucket, start in places
            ):
                for key, kind in KINDS.items():
                    for parameter, (bucket, start) in zip(parameters, places):
                        yield (
                            kind,
                            parameter.part,
                            interval(
                                buckets[bucket][key].whole(), start, parameter.shape
                            ),
                        )
                return
    raise CheckpointError(
        f"{stored.path}: the optimizer state of pipeline rank {where[1].pp} is stored in "
        f"flat buffers of {lengths} elements without names, in an order that is not that "
        f"of megatron-core's layers. {REMEDY}"
    )


def _registered(
    weights: Mapping[str, StoredTensor],
    args: Mapping[str, Any],
    where: tuple[BufferLayout, BufferKey],
    attention: Sequence[str],
) -> list[LocalParameter]:
    """Return the parameters of a buffer in the order of registration of megatron-core's GPT."""
    # The chunk of the stage determines its layers; the first and last have the embeddings and the head.
    layout, place = where
    stages = layout.pp * layout.chunks
    count = args["num_layers"] // stages
    stage = place.chunk * layout.pp + place.pp
    is_last = stage == stages - 1
    depths = args.get("mtp_num_layers") or 0
    parts = [TensorPart(name) for name in _BEFORE] if stage == 0 else []
    if is_last and depths and stages > 1:
        parts.append(TensorPart(EMBEDDING))  # the copy that the depths read
    for layer in range(stage * count, (stage + 1) * count):
        parts += _of_layer(f"decoder.layers.{layer}.", weights, args, where, attention)
    if is_last:
        parts += _weights_and_biases("decoder.", ("final_layernorm.{}",))
        for depth in range(depths):
            parts += _of_depth(f"mtp.layers.{depth}.", weights, args, where, attention)
        parts.append(TensorPart(HEAD))
    # The model lacks some of these parameters, and others belong to another optimizer.
    found = []
    for part in parts:
        like = (
            EMBEDDING
            if part.name == HEAD and HEAD not in weights and is_shared(HEAD, args)
            else part.name
        )
        if like not in weights or (
            layout.is_chained and is_of_experts(part.name) != bool(place.optimizer)
        ):
            continue
        # The local shape follows from the division over tensor-parallel ranks.
        shape = list(
            weights[like].shape if part.expert is None else weights[like].shape[1:]
        )
        dim, _ = split_of(part.name, args)
        if dim is not None:
            shape[dim] //= layout.tp if part.expert is None else layout.experts_tp
        found.append(
            LocalParameter(
                part, tuple(shape), weights[like].dtype, is_shared(part.name, args)
            )
        )
    return found


def _of_layer(
    prefix: str,
    weights: Mapping[str, StoredTensor],
    args: Mapping[str, Any],
    where: tuple[BufferLayout, BufferKey],
    attention: Sequence[str],
) -> list[TensorPart]:
    """Return the parts of one layer in the order of registration, also those that the model lacks."""
    # Each layer has a weight and a bias for each of its modules.
    layout, place = where
    named = partial(_weights_and_biases, prefix)
    first = _EXPERTS[0].format("weight")
    if prefix + first not in weights:
        return named((*attention, *_MLP))
    # Experts of this expert-parallel rank are registered by matrix or by expert.
    per_rank = weights[prefix + first].shape[0] // layout.ep
    numbers = range(place.ep * per_rank, (place.ep + 1) * per_rank)
    if args.get("moe_grouped_gemm"):  # all of one matrix, then those of the other
        experts = [replace(part, expert=e) for part in named(_EXPERTS) for e in numbers]
    else:
        experts = [replace(part, expert=e) for e in numbers for part in named(_EXPERTS)]
    return [
        *named(attention),
        TensorPart(f"{prefix}mlp.router.weight"),
        *experts,
        *named(_SHARED),
    ]


def _of_depth(
    prefix: str,
    weights: Mapping[str, StoredTensor],
    args: Mapping[str, Any],
    where: tuple[BufferLayout, BufferKey],
    attention: Sequence[str],
) -> list[TensorPart]:
    """Return the parts of one depth of multi-token prediction in the order of registration."""
    block = f"{prefix}transformer_layer."
    return [
        *_weights_and_biases(prefix, ("enorm.{}", "hnorm.{}", "eh_proj.{}")),
        *_of_layer(block, weights, args, where, attention),
        *_weights_and_biases(prefix, ("final_layernorm.{}",)),
    ]


def _weights_and_biases(prefix: str, patterns: Sequence[str]) -> list[TensorPart]:
    parts: list[TensorPart] = []
    for pattern in patterns:
        parts.append(TensorPart(prefix + pattern.format("weight")))
        parts.append(TensorPart(prefix + pattern.format("bias")))
    return parts
