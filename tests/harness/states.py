"""Fabricated training states for checkpoint tests: a small model of odd sizes, held as some layout would hold
it.

A layout is (tp, pipeline cut, data-parallel ranks, ZeRO stage). Every number of the logical state is known
from its tensor's name and a seed, and shards are made by slicing, without the code under test.
"""

import functools
import zlib
from dataclasses import dataclass, replace

import torch

from megatron_ds.checkpoint.save import save
from megatron_ds.mpu.group import Group, solo
from megatron_ds.mpu.param_spec import Coordinates, Init, ParamSpec, Split

NORMAL = Init("normal", 0.02)
VOCABULARY, HIDDEN = 13, 6
KINDS = ("weight", "exp_avg")


def model_specs(
    padded: int = 24, num_layers: int = 2, hidden: int = HIDDEN
) -> list[ParamSpec]:
    """Divides over 1, 2, 3, 4 tensor-parallel ranks, in every way of packing. The last is a copy of the
    first, tied."""
    rows = Split("tp", 0, padded=padded)
    specs = [
        ParamSpec(
            "embedding.word_embeddings.weight",
            (VOCABULARY, hidden),
            NORMAL,
            (rows,),
            tied="embedding",
        )
    ]
    for i in range(num_layers):
        name = f"decoder.layers.{i}"
        specs += [
            ParamSpec(
                f"{name}.input_layernorm.weight", (hidden,), Init("ones"), decay=False
            ),
            ParamSpec(
                f"{name}.self_attention.linear_qkv.weight",
                (36, hidden),
                NORMAL,
                (Split("tp", 0),),
            ),
            ParamSpec(
                f"{name}.self_attention.linear_proj.weight",
                (hidden, 12),
                NORMAL,
                (Split("tp", 1),),
            ),
            ParamSpec(
                f"{name}.mlp.linear_fc1.weight",
                (24, hidden),
                NORMAL,
                (Split("tp", 0, parts=2),),
            ),
            ParamSpec(
                f"{name}.mlp.linear_fc1.bias",
                (24,),
                Init("zeros"),
                (Split("tp", 0, parts=2),),
            ),
            ParamSpec(
                f"{name}.mlp.experts",
                (3, hidden, 24),
                NORMAL,
                (Split("tp", 2, parts=2),),
            ),
        ]
    return specs + [
        ParamSpec("temperature", (), Init("ones")),
        replace(specs[0], tied_copy=True),
    ]


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    cuts: tuple[
        int, ...
    ] = ()  # indices into the list of parameters where a new stage begins
    dp: int = 1
    stage: int = 0
    padded: int = 24

    @property
    def world_size(self) -> int:
        return self.tp * (len(self.cuts) + 1) * self.dp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(tp, dp, pp) ranks; tp varies fastest."""
        return rank % self.tp, rank // self.tp % self.dp, rank // self.tp // self.dp

    def tp_ranks(self, rank: int) -> tuple[int, ...]:
        first = rank - rank % self.tp
        return tuple(range(first, first + self.tp))


@dataclass
class StatePiece:
    spec: ParamSpec
    kind: str
    start: int
    stop: int
    tensor: torch.Tensor
    replica: int
    replicas: int


@functools.cache
def logical_tensor(kind: str, spec: ParamSpec, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(
        zlib.crc32(f"{seed}/{kind}/{spec.name}".encode())
    )
    return torch.randn(spec.shape, generator=generator)


def shard(logical: torch.Tensor, spec: ParamSpec, rank: int, size: int) -> torch.Tensor:
    """The shard of one tensor-parallel rank, padding zero."""
    split = spec.split_over("tp")
    if split is None:
        return logical
    d = split.dim
    if split.padded:
        missing = list(spec.shape)
        missing[d] = split.padded - spec.shape[d]
        logical = torch.cat([logical, logical.new_zeros(missing)], d)
    return torch.cat(
        [part.chunk(size, d)[rank] for part in logical.chunk(split.parts, d)], d
    ).contiguous()


def pieces_of(
    layout: Layout,
    rank: int,
    seed: int | None,
    num_layers: int = 2,
    hidden: int = HIDDEN,
) -> list[StatePiece]:
    """What `rank` holds: the state of `seed`, or nan everywhere when None.

    Stage 0: whole shards, the same on all data-parallel ranks. Stage 1: the shards laid end to end in a flat
    buffer that is cut into equal slices, so that slices end in the middle of rows.
    """
    tp_rank, dp_rank, pp_rank = layout.coordinates(rank)
    specs = model_specs(layout.padded, num_layers, hidden)
    bounds = (0, *layout.cuts, len(specs))
    pieces = []
    for kind in KINDS:
        flats = [
            (
                spec,
                shard(
                    logical_tensor(kind, spec, seed or 0), spec, tp_rank, layout.tp
                ).reshape(-1),
            )
            for spec in specs[bounds[pp_rank] : bounds[pp_rank + 1]]
        ]
        total = sum(flat.numel() for _, flat in flats)
        slice_size = -(-total // layout.dp)
        low, high = (
            (dp_rank * slice_size, (dp_rank + 1) * slice_size)
            if layout.stage
            else (0, total)
        )
        # longer than needed: pieces are views
        buffer = torch.full((min(high, total) - low + 64,), float("nan"))
        replica, replicas = (0, 1) if layout.stage else (dp_rank, layout.dp)
        at = 0
        for spec, flat in flats:
            start, stop = max(low - at, 0), min(high - at, flat.numel())
            if start < stop:
                tensor = buffer[at + start - low : at + stop - low]
                if seed is not None:
                    tensor.copy_(flat[start:stop])
                pieces.append(
                    StatePiece(spec, kind, start, stop, tensor, replica, replicas)
                )
            at += flat.numel()
    return pieces


def tp_coordinates(layout: Layout, rank: int) -> Coordinates:
    return {"tp": (layout.coordinates(rank)[0], layout.tp)}


def world_group(layout: Layout, rank: int, world) -> Group:
    return world.group("world", tuple(range(layout.world_size)), rank)


def save_step(folder, step, seed=None, limit=None):
    """Save the state of one rank, made with the seed, which is in run.json; by default the step is its seed."""
    seed = step if seed is None else seed
    pieces, run = pieces_of(Layout(), 0, seed), {"seed": seed}
    return save(
        folder, step, pieces, coordinates={}, world=solo(), run=run, limit=limit
    )
