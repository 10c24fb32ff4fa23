"""Pieces of a running model filled from stored tensors: a rank of any layout reads what its pieces need."""

from collections.abc import Collection, Iterable

import torch

from ...checkpoint.pieces import WEIGHT, Piece, key, rectangle, views
from ...errors import CheckpointError
from ...mpu.param_spec import Coordinates
from .family import listing
from .files.read_ahead import ReadAhead
from .files.stored_tensor import StoredTensor, Tensors


def plan_filling(
    pieces: Iterable[Piece], tensors: Tensors, kinds: Collection[str] | None = None
) -> list[tuple[StoredTensor, list[Piece]]]:
    """Return each tensor that is needed, with its pieces, in the order of the files. kinds: those to fill; None for
    all.

    Raises CheckpointError listing tensors that are missing or of another shape.
    """
    # Several pieces may need parts of the same tensor.
    wanted: dict[str, list[Piece]] = {}
    for piece in pieces:
        if kinds is None or piece.kind in kinds:
            wanted.setdefault(key(piece), []).append(piece)
    # All missing and misshapen tensors are reported together.
    problems = []
    for name, of_name in wanted.items():
        kind, _, ours = name.partition("/")
        stored = tensors.get(kind, {}).get(ours)
        if stored is None:
            problems.append(f"{name} is missing")
            continue
        here = list(of_name[0].spec.shape)
        there = list(stored.shape)
        if there != here:
            problems.append(
                f"{name} has shape {there} in {stored.place} and {here} here"
            )
    if problems:
        # Weights come first, since a missing state may follow from them.
        ordered = sorted(problems, key=lambda text: not text.startswith(WEIGHT))
        message = listing(ordered, "; ")
        lacks_state = any("weight/" not in text for text in problems)
        if lacks_state and len(tensors) <= 1:
            message += ". The files hold no optimizer state: give --finetune"
        raise CheckpointError(message)
    # The order of the files makes reads sequential.
    plan: list[tuple[StoredTensor, list[Piece]]] = []
    for kind, named in tensors.items():
        for ours, stored in named.items():
            name = f"{kind}/{ours}"
            if name in wanted:
                plan.append((stored, wanted[name]))
    return plan


@torch.no_grad()
def fill(
    plan: list[tuple[StoredTensor, list[Piece]]], coordinates: Coordinates
) -> None:
    """Copy the stored values into the pieces, cast to their dtypes; padding becomes zero.

    Raises CheckpointError when a tensor cannot be read.
    """
    stored = [tensor for tensor, _ in plan]
    dtypes = [pieces[0].tensor.dtype for _, pieces in plan]
    # The next tensors are read while one is copied.
    with ReadAhead(stored, dtypes) as ahead:
        for index, (_, pieces) in enumerate(plan):
            values = ahead.take(index)
            for piece in pieces:
                _fill(piece, values, coordinates)


def _fill(piece: Piece, values: torch.Tensor, coordinates: Coordinates) -> None:
    """Copy the rectangles of one piece. Elements that no rectangle has are padding."""
    found = views(piece, coordinates)
    held = sum(view.tensor.numel() for view in found)
    if held < piece.tensor.numel():
        piece.tensor.detach().zero_()
    for view in found:
        source = rectangle(values, view.offset, view.tensor.shape)
        view.tensor.copy_(source)
