"""The global gradient norm, each logical element counted once, in one pass over this rank's shard of the gradients.

After the reduction every data-parallel rank of the same shard holds the same gradient, so rank r looks at shard r only, also
where the gradients are whole everywhere (ZeRO 0); the partial sums are then added over the data group (all shards, all
experts) and over the model-parallel group (all tensor-parallel parts, all stages). Not counted: padding (it is zero),
parameters that every tensor-parallel rank holds, except on the first, and second copies of tied parameters.

Note: rows. torch sums a flat fp32 norm in a handful of fp32 accumulators, 2e-4 off at 8 M elements. Norms of rows of 1024,
squared and summed in float64, are as fast and good to 1e-9. The total is finite exactly when every gradient is (short of
elements beyond 1e19, whose squares overflow fp32 and which count as infinite).
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from ..mpu.collectives import all_reduce_
from ..mpu.group import Group
from ..mpu.param_spec import ParamSpec
from .layout import SlotPiece

ROW = 1024
ROWS_AT_A_TIME = 4096


def is_counted(spec: ParamSpec, tp_rank: int) -> bool:
    """Whether this rank's gradient of the parameter counts in the norm."""
    return not spec.tied_copy and (spec.is_split_over("tp") or tp_rank == 0)


def norm_views(flat: torch.Tensor, pieces: Iterable[SlotPiece], start_of: Callable[[SlotPiece], int]) -> list[torch.Tensor]:
    """The pieces' gradients as few 2-D views: neighbours are joined, each run cut into whole rows and a short one.

    flat, start_of: where the gradients are. Neighbours are so in the *whole* buffer: the order in which squares are added, and
    with it each bit of the norm, does not depend on how much of it this rank keeps.
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


def squared_norm(views: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of squares of all elements, a float64 scalar."""
    if not views:
        return torch.zeros((), dtype=torch.float64, device=device)
    rows = torch.empty(sum(len(view) for view in views), dtype=torch.float32, device=device)
    at = 0
    for part in (part for view in views for part in _parts(view)):
        torch.linalg.vector_norm(part, dim=1, dtype=torch.float32, out=rows[at:at + len(part)])
        at += len(part)
    return rows.double().square().sum()


def _parts(view: torch.Tensor) -> Sequence[torch.Tensor]:
    """Of narrow gradients torch makes a wide copy on the CPU: a small one at a time."""
    return [view] if view.dtype == torch.float32 else view.split(ROWS_AT_A_TIME)


def num_zeros(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """How many elements are zero; a float64 scalar."""
    counts = [torch.count_nonzero(gradient == 0) for gradient in gradients]
    return torch.stack([torch.zeros((), dtype=torch.int64, device=device), *counts]).sum().double()


def sum_over_ranks(local: torch.Tensor, data: Group, model: Group) -> list[float]:
    """[squares, zeros, f, f²] of this rank → the sums of the first two, and how far the fingerprints f of data-parallel ranks
    are apart: 0 when all are equal. The same floats on every rank. Collective over both groups."""
    all_reduce_(local, data)
    local[2] = data.size * local[3] - local[2].square()         # n Σf² - (Σf)², n² times the variance; exact in float64
    all_reduce_(local[:3], model)
    return local[:3].tolist()
