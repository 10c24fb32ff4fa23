"""The norm of the whole gradient, and the check that ranks have gradients of the same parameters.

The gradient norm counts each logical element once, in one pass over this rank's shard of the gradients, also
if gradients are whole everywhere (ZeRO 0). The partial sums are added over the data group and over the
model-parallel group, together all ranks: all shards, tensor-parallel parts, experts and stages, wherever the
ranks of an expert lie. Not counted: parameters that every rank which divides their layer holds, except on the
first, and second copies of tied parameters.

Note: rows. torch sums a flat fp32 norm in a handful of fp32 accumulators, with an error of 2e-4 at 8 M
elements. Norms of rows of 1024, squared and summed in float64, are as fast and accurate to 1e-9. The total is
finite exactly if every gradient is (except for elements beyond 1e19, whose squares overflow fp32 and which
count as infinite).

Note: divergence. A rank that took another path through the model than its peers trains on a sum in which its
part is missing. The ranks compare a fingerprint, 16 bits, of the parameters that received gradients; it is
sent with the norm (unused.py).
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from ..host.device_copies import column
from ..mpu.collectives import all_reduce_
from ..mpu.param_spec import ParamSpec
from .data_groups import DataGroups
from .layout import SlotPiece

ROW = 1024
ROWS_AT_A_TIME = 4096
# what `sum_over_ranks` sends over the data and the model group
DATA_BYTES = 3 * 8
MODEL_BYTES = 2 * 8


def is_counted(spec: ParamSpec, groups: DataGroups) -> bool:
    """Return whether this rank's gradient of the parameter counts in the norm, or its shard of it."""
    is_first = groups.dividing(spec.reduced_over).rank == 0
    return not spec.tied_copy and (spec.tensor_split is not None or is_first)


def norm_views(
    flat: torch.Tensor,
    pieces: Iterable[SlotPiece],
    start_of: Callable[[SlotPiece], int],
) -> list[torch.Tensor]:
    """Return the gradients of the pieces as few 2-D views: neighbours are joined, runs cut into rows and a rest.

    flat, start_of: where the gradients are. Pieces are neighbours if they are so in the *whole* buffer: the
    order in which squares are added does not depend on the share of it that this rank keeps.
    """
    runs: list[list[int]] = []
    end = None
    for piece in pieces:
        start = start_of(piece)
        if end == piece.flat:
            runs[-1][1] += piece.padded_numel
        else:
            runs.append([start, start + piece.padded_numel])
        end = piece.flat + piece.padded_numel
    views = []
    for start, stop in runs:
        middle = stop - (stop - start) % ROW
        views += [flat[start:middle].view(-1, ROW), flat[middle:stop].view(1, -1)]
    return [view for view in views if view.numel()]


def squared_norm(views: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of squares of all elements, a float64 scalar."""
    if not views:
        return torch.zeros((), dtype=torch.float64, device=device)
    rows = torch.empty(
        sum(len(view) for view in views), dtype=torch.float32, device=device
    )
    at = 0
    for view in views:
        # On the CPU torch makes a wide copy of 16-bit gradients: of a small part at a time.
        is_copied = view.dtype != torch.float32 and view.device.type == "cpu"
        for part in view.split(ROWS_AT_A_TIME) if is_copied else [view]:
            torch.linalg.vector_norm(
                part, dim=1, dtype=torch.float32, out=rows[at : at + len(part)]
            )
            at += len(part)
    return rows.double().square().sum()


def count_zeros(views: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Number of elements that are exactly zero, a float64 scalar."""
    zeros = torch.zeros((), dtype=torch.float64, device=device)
    for view in views:
        zeros += view.numel() - torch.count_nonzero(view)
    return zeros


def sum_over_ranks(
    squares: torch.Tensor,
    number: float,
    groups: DataGroups,
    zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    """float64 [2] on the device: the sum of `squares` over all ranks, and 0 if data-parallel ranks have the
    same `number`, below 2^16; NaN if one of them is infinite. With `zeros` [3]: their sum, too.

    Collective over the data and the model group; the host does not wait.
    """
    f = number
    local = column(
        [squares, f, f * f, *([] if zeros is None else [zeros])], squares.device
    )
    all_reduce_(local, groups.data)
    # n Σf² - (Σf)², n² times the variance of the fingerprints: 0 exactly if all are equal, exact in float64.
    local[1] = groups.data.size * local[2] - local[1].square()
    if zeros is not None:
        local[2] = local[3]
    local = local[: 2 if zeros is None else 3]
    all_reduce_(local, groups.model)
    return local
