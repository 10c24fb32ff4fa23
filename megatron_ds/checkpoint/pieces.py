"""What a checkpoint reads from and writes into: pieces of training state, and which rank writes a replicated one.

A piece is anything with the attributes of `Piece`; ZeRO's `StatePiece` is one. Its tensor is called "kind/name" in the
checkpoint: "weight/decoder.final_layernorm.weight", "exp_avg/output_layer.weight".
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from ..mpu.group import Group
from ..mpu.param_spec import Box, ParamSpec
from .logical import flat_offset, logical_boxes, row_major_strides

WEIGHT = "weight"


class Piece(Protocol):
    """Elements [start, stop) of the flattened tensor-parallel shard of one parameter's weight, first moment, ...

    tensor    flat, of stop - start elements, contiguous; read when saving, written into when loading
    replica   position of this rank among the `replicas` data-parallel ranks that hold the same content
    """

    spec: ParamSpec
    kind: str
    start: int
    stop: int
    tensor: torch.Tensor
    replica: int
    replicas: int


@dataclass(frozen=True)
class View:
    """A rectangle of a piece: where it lies in the logical tensor, and the memory that mirrors it there."""

    offset: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class ParameterPiece:
    """A whole local parameter as a piece; for those who want the weights and nothing else."""

    spec: ParamSpec
    tensor: torch.Tensor
    kind: str = WEIGHT
    start: int = 0
    replica: int = 0
    replicas: int = 1

    @property
    def stop(self) -> int:
        return self.tensor.numel()


def key(piece: Piece) -> str:
    return f"{piece.kind}/{piece.spec.name}"


def views(piece: Piece, tp: Group) -> list[View]:
    """The rectangles of a piece as views of its memory; padding is in none."""
    assert piece.tensor.dim() == 1 and piece.tensor.is_contiguous() and piece.tensor.numel() == piece.stop - piece.start, (
        f"{key(piece)}: elements [{piece.start}, {piece.stop}) in a tensor of shape {list(piece.tensor.shape)}")
    shape = piece.spec.local_shape(tp.size)
    boxes = logical_boxes(piece.spec, tp.rank, tp.size, piece.start, piece.stop)
    return [View(box.logical, _view(piece, shape, box)) for box in boxes]


def written_here(pieces: Iterable[Piece], tp: Group) -> list[Piece]:
    """The pieces that this rank writes: of several holders of the same content, one.

    Copies of tied parameters, which bear the name of the first holder's, are left to that one. Among replicas the writer
    follows from a hash of the name: the same on all of them without a word between them, and spread over names.
    """
    return [p for p in pieces if not p.spec.tied_copy and _is_writer(p, tp)]


def _is_writer(piece: Piece, tp: Group) -> bool:
    turn, replica = divmod(zlib.crc32(key(piece).encode()), piece.replicas)
    same_on_all_tp_ranks = piece.spec.split_dim is None
    return replica == piece.replica and (not same_on_all_tp_ranks or turn % tp.size == tp.rank)


def _view(piece: Piece, shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """The box in the piece's memory, with the strides of the shard: right also where a box is no run of the interval."""
    tensor = piece.tensor.detach()
    first = flat_offset(shape, box.local) - piece.start
    return tensor.as_strided(box.sizes, row_major_strides(shape), tensor.storage_offset() + first)
