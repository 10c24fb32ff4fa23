"""Softmax of attention scores, scaled, masked and causal, with keyed dropout, and its backward:
csrc/gpu/softmax.cu."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ....ops import softmax
from ....ops.dropout import KeepMask, apply_mask
from ....ops.keep_tables import seeds_on, threshold_of
from ....ops.kernel_table import FLOATS, GPU
from ....ops.meta_tensors import has_memory
from .gpu_kernel import GpuKernel, type_name
from .packets import BYTES, lanes, packed

EXAMPLES = [  # of forward and backward
    ("bf16", 8, 64, 32, False),
    ("bf16", 8, 64, 32, True),
    ("fp16", 1, 64, 32, False),
    ("float", 4, 32, 32, True),
    ("bf16", 8, 32, 256, True),
    ("float", 1, 16, 1024, True),
]
WIDE_EXAMPLES = [("bf16", 8, 32, 1024, False), ("float", 1, 32, 1024, False)]
FORWARD = GpuKernel(
    "softmax.cu",
    "softmax_forward",
    "ptr ptr ptr ptr ptr i64 i64 i64 i64 i32 i32 i32 i32 u32 f32 f32",
    EXAMPLES + WIDE_EXAMPLES,
)
BACKWARD = GpuKernel(
    "softmax.cu",
    "softmax_backward",
    "ptr ptr ptr ptr i64 i32 i32 i32 u32 f32 f32",
    EXAMPLES,
)
BACKWARD_LOOPED = GpuKernel(
    "softmax.cu",
    "softmax_backward_looped",
    "ptr ptr ptr i32 i32 i32 f32",
    [("bf16", 8), ("float", 1)],
)

LEVELS = 1 << 16  # values of a random number
MOST_TABLES = (1 << 16) - 1  # in the second dimension of a grid
ROWS_OF_WARPS = 4  # rows of a block, where each is a warp's
# (threads of a row, its numbers in each thread's registers), in the order of the rows that they take.
CHOICES = (
    (32, 8),
    (32, 16),
    (32, 32),
    (32, 64),
    (256, 16),
    (256, 32),
    (1024, 16),
    (1024, 32),
)
WIDE = (1024, 32)  # only of forward without dropout; backward then loops


@dataclass(frozen=True)
class TableDropout:
    """Keyed dropout of [b, n, sq, sk]: an element is kept where the number of (seed, row, column) is below
    `threshold`, and then multiplied by LEVELS / threshold; see csrc/gpu/philox.cuh.

    seeds      int64 [b n], contiguous, on the device of the scores
    first_row  of the tables: that of the first query
    """

    seeds: torch.Tensor
    threshold: int
    first_row: int


def masked_softmax(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    dropout: TableDropout | None = None,
) -> torch.Tensor:
    """softmax(scale * scores) over the last dim of [b, n, sq, sk], of the same shape and dtype.

    mask    bool, broadcast to the shape of scores without a copy but in its last dim; True = 0 here
    causal  the queries are the last ones: query i sees the first sk - sq + i + 1 columns

    A row that sees no column is 0. Keeps the probabilities for backward, which are the result without
    dropout, and the seeds.
    """
    return _Softmax.apply(scores, mask, causal, scale, dropout)


def fits(scores: torch.Tensor, mask: torch.Tensor | None, drops: bool) -> str:
    """drops: with dropout. Returns "" if the kernels take these arguments, else the reason."""
    if scores.dim() != 4 or not scores.shape[-1]:
        return f"scores of shape {list(scores.shape)}"
    tables = scores.shape[0] * scores.shape[1]
    cols = scores.shape[-1]
    if tables > MOST_TABLES:
        return f"{tables} samples and heads, more than {MOST_TABLES}"
    if _plan(scores, None, drops) is None:
        return f"rows of {cols} elements of {scores.element_size()} bytes are too long"
    if mask is not None and (
        mask.dtype != torch.bool
        or mask.dim() != 4
        or mask.shape[-1] != cols
        or mask.stride(-1) != 1
    ):
        return "a mask that is not bool [b, n, sq, sk] with contiguous rows"
    return ""


class Plan(NamedTuple):
    """How a row is computed. width: elements of an access; numbers: of a thread; threads: of a row."""

    width: int
    numbers: int
    threads: int

    def launch(self, scores: torch.Tensor) -> tuple[tuple[int, int], int]:
        """(grid, threads of a block)."""
        rows = ROWS_OF_WARPS if self.threads == 32 else 1
        b, n, queries, _ = scores.shape
        return (-(-queries // rows), b * n), self.threads * rows


def _plan(scores: torch.Tensor, mask: torch.Tensor | None, drops: bool) -> Plan | None:
    cols = scores.shape[-1]
    is_wide = scores.element_size() == 4
    width = lanes(scores) if _in_packets(scores, mask) else 1
    for threads, numbers in CHOICES:
        if (
            threads * numbers < cols
            or drops
            and numbers < 16
            or is_wide
            and numbers == 64
        ):
            continue
        if (threads, numbers) == WIDE and drops:
            continue
        return Plan(width, numbers, threads)
    return None


def _in_packets(scores: torch.Tensor, mask: torch.Tensor | None) -> bool:
    step = lanes(scores)
    if scores.shape[-1] % step or has_memory(scores) and scores.data_ptr() % BYTES:
        return False
    return mask is None or not any(
        number % step
        for number in (*mask.stride()[:3], mask.data_ptr() if has_memory(mask) else 0)
    )


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, mask, causal, scale, dropout):
        # The kernel depends on the length of rows, and on whether there are a mask and dropout.
        scores = scores.contiguous()
        b, n, queries, cols = scores.shape
        mask = None if mask is None else mask.expand(scores.shape)
        plan = _plan(scores, mask, dropout is not None)
        y = torch.empty_like(scores)
        # Backward needs the probabilities before dropout.
        kept = y if dropout is None else torch.empty_like(scores)
        seeds, first_row, threshold = (
            (None, 0, LEVELS)
            if dropout is None
            else (dropout.seeds, dropout.first_row, dropout.threshold)
        )
        grid, threads = plan.launch(scores)
        FORWARD(
            (type_name(scores), *plan, dropout is not None),
            grid,
            threads,
            scores,
            mask,
            y,
            kept,
            seeds,
            first_row,
            *((0, 0, 0) if mask is None else mask.stride()[:3]),
            n,
            queries,
            cols,
            causal,
            threshold,
            LEVELS / threshold,
            scale,
        )
        # Dropout is drawn again in backward, from its seeds.
        ctx.save_for_backward(kept, seeds)
        ctx.causal = causal
        ctx.scale = scale
        ctx.first_row = first_row
        ctx.threshold = threshold
        return y

    @staticmethod
    def backward(ctx, dy):
        # Long rows are read in a loop, and have no dropout of their own.
        kept, seeds = ctx.saved_tensors
        dx = torch.empty_like(kept)
        dy = packed(dy)
        plan = _plan(kept, None, seeds is not None)
        grid, threads = plan.launch(kept)
        if (plan.threads, plan.numbers) == WIDE:
            BACKWARD_LOOPED(
                (type_name(kept), plan.width),
                grid,
                threads,
                dy,
                kept,
                dx,
                *kept.shape[2:],
                ctx.causal,
                ctx.scale,
            )
            return dx, None, None, None, None
        # Short rows stay in registers.
        BACKWARD(
            (type_name(kept), *plan, seeds is not None),
            grid,
            threads,
            dy,
            kept,
            dx,
            seeds,
            ctx.first_row,
            *kept.shape[2:],
            ctx.causal,
            ctx.threshold,
            LEVELS / ctx.threshold,
            ctx.scale,
        )
        return dx, None, None, None, None


def _fits_call(
    scores: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float = 1.0,
    keep: KeepMask | None = None,
    sink: torch.Tensor | None = None,
) -> str:
    """Return why the kernel cannot compute this call; "" if it can."""
    if sink is not None:
        return "it has a sink"
    return fits(scores, mask, keep is not None)


@softmax.masked_softmax.kernel("cuda", devices=GPU, dtypes=FLOATS, fits=_fits_call)
def _masked_softmax_on_gpu(
    scores: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float = 1.0,
    keep: KeepMask | None = None,
    sink: None = None,
) -> torch.Tensor:
    # The kernel draws for neighbouring columns; picked ones of a table are not.
    if keep is not None and keep.picked is not None:
        p = masked_softmax(scores, mask, causal, scale)
        return apply_mask(p, keep.mask, keep.p)
    table = None
    if keep is not None:
        seeds = seeds_on(scores.device, keep.of_heads)
        threshold = threshold_of(keep.p)
        table = TableDropout(seeds, threshold, keep.rows.start)
    return masked_softmax(scores, mask, causal, scale, table)
