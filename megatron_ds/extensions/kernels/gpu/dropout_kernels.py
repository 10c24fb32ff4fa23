"""Dropout and masks of attention probabilities on GPUs: csrc/gpu/dropout.cu, in one launch each.

Random numbers are those of `ops.dropout`: a table of 16-bit numbers for each seed, drawn by Philox inside the
kernel. Backward draws them again, so dropout keeps no tensor but `picked`, which the caller holds anyway.

Seeds are read from memory of the device, so a launch that a CUDA graph repeats draws the masks of the seeds that
are there then.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from ....host.autograd_functions import direct_apply
from ....ops import dropout as ops_dropout
from ....ops.keep_tables import seeds_on, threshold_of
from ....ops.kernel_table import FLOATS, GPU
from ....ops.keyed_random import Key
from ....ops.meta_tensors import has_memory
from .gpu_kernel import GpuKernel, type_name
from .packets import reason_against_packets
from .site_seeds import SiteSeeds

NUMBERS = 16  # of a counter of Philox, that is, of a thread
LEVELS = 1 << 16
MOST_THREADS = 512
PICKED_THREADS = 256
MOST_BLOCKS = (1 << 31) - 1  # in the first dimension of a grid
MOST_TABLES = (1 << 16) - 1  # in the second
MOST_PICKED_COLUMNS = (
    1 << 17
)  # of tables of which columns are picked: a row is in shared memory

SEEDS = SiteSeeds()

DROPOUT = GpuKernel(
    "dropout.cu",
    "dropout",
    "ptr ptr ptr ptr ptr i64 i64 i64 i32 i32 i32 u32 f32",
    examples=[*product(("float", "bf16", "fp16"), (True, False), (True, False))],
)
MASKS = GpuKernel(
    "dropout.cu", "keep_masks", "ptr ptr i64 i32 i32 u32", examples=[(16,), (8,), (1,)]
)
PICKED_MASKS = GpuKernel(
    "dropout.cu",
    "picked_keep_masks",
    "ptr ptr ptr i64 i64 i64 i32 i32 i32 u32",
    examples=[(64,), (8192,)],
)


def dropout(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    *,
    seeds: torch.Tensor,
    threshold: int,
    first_row: int,
    picked: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [s, b, h] where the number of (seed, row, column) is below `threshold`, times LEVELS / threshold,
    else 0; plus `residual` [s, b, h], unless None. Rounded as the product and the sum of two operations.

    seeds      int64 [b] on x's device
    first_row  of the tables: that of x[0]; with picked, int64 [b, s], row i of sample j is
               first_row + picked[j, i]
    """
    return _dropout(x, residual, picked, seeds, threshold, first_row)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, picked, seeds, threshold, first_row):
        ctx.table = (seeds, threshold, first_row)
        ctx.save_for_backward(picked)
        # Packets need contiguous tensors at aligned addresses.
        x = x.contiguous()
        residual = residual if residual is None else residual.contiguous()
        y = torch.empty_like(x)
        positions, samples, cols = x.shape
        packets = not reason_against_packets(x, y, residual)
        strides = (0, 0) if picked is None else picked.stride()
        DROPOUT(
            (type_name(x), packets, residual is not None),
            _grid(positions, samples),
            _threads(cols),
            seeds,
            x,
            residual,
            y,
            picked,
            *strides,
            first_row,
            positions,
            samples,
            cols,
            threshold,
            LEVELS / threshold,
        )
        return y

    @staticmethod
    def backward(ctx, dy):
        (picked,) = ctx.saved_tensors
        dx = _dropout(dy, None, picked, *ctx.table) if ctx.needs_input_grad[0] else None
        return dx, dy if ctx.needs_input_grad[1] else None, None, None, None, None


_dropout = direct_apply(_Dropout)


def fits(x: torch.Tensor, *_: object, **__: object) -> str:
    """ "" if `dropout` takes x [s, b, h], else the reason."""
    samples = x.shape[1]
    return (
        f"{samples} samples, more than {MOST_TABLES}" if samples > MOST_TABLES else ""
    )


def fill_keep_masks_(
    out: torch.Tensor,
    seeds: torch.Tensor,
    *,
    threshold: int,
    first_row: int,
    cols: int,
    picked: torch.Tensor | None = None,
) -> None:
    """out bool [b, n, rows, cols], contiguous: True where the number of (seed, row, column) is below
    `threshold`, row 0 being first_row.

    seeds   int64 [b, n] on out's device
    picked  int64 [b, k]: out is [b, n, k, k], of these rows (counted from first_row) and columns of a sample
    """
    samples, heads, rows, width = out.shape
    grid = _grid(rows, samples * heads)
    # A thread writes as many neighbours as the width and the address allow.
    if picked is None:
        step = math.gcd(cols, NUMBERS, out.data_ptr() if has_memory(out) else 0)
        MASKS(
            (step,), grid, _threads(cols), out, seeds, first_row, rows, cols, threshold
        )
    else:
        PICKED_MASKS(
            (_units(cols),),
            grid,
            PICKED_THREADS,
            out,
            seeds,
            picked,
            *picked.stride(),
            first_row,
            heads,
            width,
            cols,
            threshold,
        )


def masks_fit(out: torch.Tensor, cols: int, picked: torch.Tensor | None) -> str:
    """ "" if `fill_keep_masks_` takes these arguments, else the reason."""
    if out.shape[0] * out.shape[1] > MOST_TABLES:
        return (
            f"{out.shape[0] * out.shape[1]} samples and heads, more than {MOST_TABLES}"
        )
    if picked is not None and cols > MOST_PICKED_COLUMNS:
        return (
            f"{cols} columns, of which some are picked: more than {MOST_PICKED_COLUMNS}"
        )
    return "" if out.is_contiguous() else "a mask that is not contiguous"


def _grid(rows: int, tables: int) -> tuple[int, int]:
    """Return a block for each row, but no more than a grid may have; the kernels walk over the rest."""
    return min(rows, MOST_BLOCKS), tables


def _threads(cols: int) -> int:
    """Threads of a block that goes over the counters of a row in as many equal passes as it needs."""
    counters = -(-cols // NUMBERS)
    passes = max(1, -(-counters // MOST_THREADS))
    return max(32, -(-counters // (passes * 32)) * 32)


def _units(cols: int) -> int:
    """Counters of a row that shared memory holds: a power of two, so that few kernels are compiled."""
    return max(64, 1 << (-(-cols // NUMBERS) - 1).bit_length())


@ops_dropout.dropout.kernel("cuda", devices=GPU, dtypes=FLOATS, fits=fits)
def _dropout_on_gpu(
    x: torch.Tensor, p: float, *table: Any, **named: Any
) -> torch.Tensor:
    return _with_kernel(x, None, p, *table, **named) if p else x


@ops_dropout.dropout_add.kernel("cuda", devices=GPU, dtypes=FLOATS, fits=fits)
def _dropout_add_on_gpu(
    x: torch.Tensor, residual: torch.Tensor, p: float, *table: Any, **named: Any
) -> torch.Tensor:
    return _with_kernel(x, residual, p, *table, **named) if p else residual + x


def _with_kernel(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    p: float,
    seed: int,
    site: str,
    sample_ids: tuple[int, ...],
    rows: range,
    picked: torch.Tensor | None = None,
) -> torch.Tensor:
    ops_dropout.check_held(x.shape, sample_ids, rows, picked)
    return dropout(
        x,
        residual,
        seeds=SEEDS.on(x.device, seed, site, sample_ids),
        threshold=threshold_of(p),
        first_row=rows.start,
        picked=picked,
    )


def _takes_mask(
    out: torch.Tensor,
    p: float,
    keys: Sequence[Key],
    rows: range,
    cols: int,
    picked: torch.Tensor | None = None,
) -> str:
    return masks_fit(out, cols, picked)


@ops_dropout.fill_attention_mask_.kernel("cuda", devices=GPU, fits=_takes_mask)
def _attention_mask_on_gpu(
    out: torch.Tensor,
    p: float,
    keys: Sequence[Key],
    rows: range,
    cols: int,
    picked: torch.Tensor | None = None,
) -> None:
    seeds = seeds_on(out.device, keys).view(out.shape[:2])
    fill_keep_masks_(
        out,
        seeds,
        threshold=threshold_of(p),
        first_row=rows.start,
        cols=cols,
        picked=picked,
    )
