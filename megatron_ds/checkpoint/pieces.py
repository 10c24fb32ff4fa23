"""The pieces of training state that a checkpoint reads and writes, and which rank writes a replicated one.

A piece is anything with the attributes of `Piece`, such as ZeRO's `StatePiece`. Its tensor is called
"kind/name" in the checkpoint: "weight/decoder.final_layernorm.weight", "exp_avg/output_layer.weight".

Two kinds of ranks hold the same content: data-parallel ones (those of `ParamSpec.reduced_over`), which a
piece counts itself (`replica` of `replicas`), and tensor-parallel ones of a parameter that is not split over
"tp".
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from ..mpu.param_spec import Box, Coordinates, ParamSpec
from .logical import flat_offset, logical_boxes, row_major_strides, shard_shape

WEIGHT = "weight"


class Piece(Protocol):
    """Elements [start, stop) of the flattened shard of one parameter's weight, first moment, ...

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
    """A rectangle of a piece: its corner in the logical tensor, and the memory with its values."""

    offset: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class ParameterPiece:
    """A whole local parameter as a piece, where only weights are read or written."""

    spec: ParamSpec
    tensor: torch.Tensor
    kind: str = WEIGHT
    start: int = 0
    replica: int = 0
    replicas: int = 1

    @property
    def stop(self) -> int:
        """End of the piece in the flattened shard."""
        return self.tensor.numel()


def key(piece: Piece) -> str:
    """The name of its tensor in the checkpoint."""
    return f"{piece.kind}/{piece.spec.name}"


def views(piece: Piece, coordinates: Coordinates) -> list[View]:
    """The rectangles of a piece as views of its memory; padding is in none."""
    tensor = piece.tensor
    assert tensor.dim() == 1 and tensor.is_contiguous() and tensor.numel() == piece.stop - piece.start, (
        f"{key(piece)}: elements [{piece.start}, {piece.stop}) in a tensor of shape {list(tensor.shape)}")
    shape = shard_shape(piece.spec, coordinates)
    boxes = logical_boxes(piece.spec, coordinates, piece.start, piece.stop)
    return [View(box.logical, _view(piece, shape, box)) for box in boxes]


def written_here(pieces: Iterable[Piece], coordinates: Coordinates) -> list[Piece]:
    """The pieces that this rank writes: of several holders of the same content, one.

    Copies of tied parameters have the name of the first holder's parameter, which alone is written. Among
    replicas the writer follows from a hash of the name, so that ranks agree without communication and share
    the work.
    """
    return [p for p in pieces if not p.spec.tied_copy and _is_writer(p, coordinates)]


def _is_writer(piece: Piece, coordinates: Coordinates) -> bool:
    turn, replica = divmod(zlib.crc32(key(piece).encode()), piece.replicas)
    tp_rank, tp_size = coordinates.get("tp", (0, 1))
    return replica == piece.replica and (piece.spec.is_split_over("tp") or turn % tp_size == tp_rank)


def _view(piece: Piece, shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """The box in the piece's memory, with the strides of the shard: a box need not be contiguous there."""
    tensor = piece.tensor.detach()
    first = flat_offset(shape, box.local) - piece.start
    return tensor.as_strided(box.sizes, row_major_strides(shape), tensor.storage_offset() + first)
