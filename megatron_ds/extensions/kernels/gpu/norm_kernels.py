"""LayerNorm and RMSNorm with an optional residual addition, forward and backward: csrc/gpu/norm.cu."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVarTuple

import torch

from ....host.autograd_functions import Halves, direct_apply
from ....ops import norms
from ....ops.kernel_table import FLOATS, GPU
from .gpu_kernel import GpuKernel, type_name
from .packets import BYTES, lanes, packed, reason_against_rows

FORWARD = GpuKernel(
    "norm.cu",
    "norm_forward",
    "ptr ptr ptr ptr ptr ptr ptr ptr i64 f32",
    examples=[
        ("bf16", 4096, 256, True, True),
        ("fp16", 1600, 128, False, True),
        ("float", 32768, 1024, False, True),
        ("bf16", 32768, 1024, False, True),
        ("bf16", 128, 32, True, False),
    ],
)
BACKWARD = GpuKernel(
    "norm.cu",
    "norm_backward",
    "ptr ptr ptr ptr ptr ptr ptr ptr ptr i64 i32",
    examples=[
        ("bf16", 4096, 256, True, True),
        ("fp16", 1600, 128, False, True),
        ("bf16", 12288, 512, False, True),
        ("bf16", 16384, 512, True, True),
        ("float", 8192, 512, False, True),
        ("float", 8192, 512, True, True),
        ("bf16", 128, 32, True, False),
    ],
)
FORWARD_LOOPED = GpuKernel(
    "norm.cu",
    "norm_forward_looped",
    "ptr ptr ptr ptr ptr ptr ptr ptr i32 f32",
    examples=[("bf16", False, True), ("float", True, True)],
)
BACKWARD_LOOPED = GpuKernel(
    "norm.cu",
    "norm_backward_looped",
    "ptr ptr ptr ptr ptr ptr ptr i32",
    examples=[("bf16", False, True), ("float", True, True)],
)
WEIGHT_SUMS = GpuKernel(
    "norm.cu",
    "norm_weight_sums",
    "ptr ptr ptr ptr ptr ptr i64 i32",
    examples=[("bf16", False), ("float", True)],
)
SUM_ROWS = GpuKernel(
    "norm.cu",
    "norm_sum_rows",
    "ptr ptr ptr ptr i32 i32",
    examples=[("bf16",), ("float",)],
)

MOST_COLUMNS = 65536
LOOPED_THREADS = 1024
FORWARD_NUMBERS = 32  # of a row in the registers of each of 1024 threads
BACKWARD_NUMBERS = {  # of a row in the registers of each of 512 threads: (bytes a number, RMSNorm?)
    (2, True): 32,
    (2, False): 24,
    (4, True): 16,
    (4, False): 16,
}
SUM_COLUMNS = 32  # of a block of norm_sum_rows
STRIP_THREADS = 256  # of a block of norm_weight_sums, each with a packet of columns


def fits(x: torch.Tensor, *others: object) -> str:
    """ "" if the kernels take the arguments of layer_norm, rms_norm or residual_norm."""
    if x.dim() and x.shape[-1] > MOST_COLUMNS:
        return f"rows of {x.shape[-1]} elements are longer than {MOST_COLUMNS}"
    if reason := reason_against_rows(x, *others):
        return reason
    shapes = {tuple(t.shape) for t in others if isinstance(t, torch.Tensor)} - {
        x.shape,
        x.shape[-1:],
    }
    return f"tensors of {list(x.shape)} and {list(shapes.pop())}" if shapes else ""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [.., hidden] → x / sqrt(mean(x²) + eps) * weight, of the same shape and dtype.

    Zhang & Sennrich 2019 (arXiv:1910.07467), equation 4. Keeps x and one fp32 number a row for backward.
    """
    return _apply(x, None, weight, None, eps)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """x [.., hidden] → (x - mean) / sqrt(var + eps) * weight + bias, of the same shape and dtype.

    Ba et al. 2016 (arXiv:1607.06450). Keeps x and two fp32 numbers a row for backward.
    """
    return _apply(x, None, weight, bias, eps)


def residual_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), both [.., hidden] as x: LayerNorm with a bias, RMSNorm without.

    Keeps the second result and one or two fp32 numbers a row for backward.
    """
    return _apply(x, residual, weight, bias, eps)


@dataclass(frozen=True)
class Rows:
    """How rows are computed.

    threads  of a row; 0: rows of any width
    """

    count: int
    cols: int
    threads: int

    @property
    def groups_per_block(self) -> int:
        """Rows, or chunks of them, that a block computes at a time."""
        return 4 if self.threads == 32 else 1

    def blocks(self, groups: int) -> int:
        """Blocks for so many rows or chunks."""
        return -(-groups // self.groups_per_block)


def rows_of(x: torch.Tensor, most_numbers: int, most_threads: int) -> Rows:
    """Two packets a thread, more where the row has more than 2 * most_threads packets; in registers if a
    thread has at most `most_numbers` numbers."""
    cols = x.shape[-1]
    packets = cols // lanes(x)
    threads = min(most_threads, -(-packets // 64) * 32)
    fit = -(-packets // threads) * lanes(x) <= most_numbers
    return Rows(x.numel() // cols, cols, threads if fit else 0)


class Way(NamedTuple):
    """How the rows of a shape are computed. number: what the kernel is given to count with"""

    kernel: GpuKernel
    template: tuple
    grid: int
    threads: int
    rows: int
    number: int


@lru_cache(maxsize=1024)
def _way_forward(
    shape: tuple[int, ...], dtype: torch.dtype, is_rms: bool, adds: bool
) -> Way:
    """Short rows stay in registers, one group of threads a row; long ones are read in a loop."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    rows = rows_of(x, FORWARD_NUMBERS, 1024)
    if not rows.threads:
        template = (type_name(x), is_rms, adds)
        return Way(
            FORWARD_LOOPED, template, rows.count, LOOPED_THREADS, rows.count, rows.cols
        )
    return Way(
        FORWARD,
        (type_name(x), rows.cols, rows.threads, is_rms, adds),
        rows.blocks(rows.count),
        rows.threads * rows.groups_per_block,
        rows.count,
        rows.count,
    )


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps):
        ctx.set_materialize_grads(False)
        y, total, mean, rstd = norm_rows(x, residual, weight, bias, eps)
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.adds = residual is not None
        return (y, total) if ctx.adds else y

    @staticmethod
    def backward(ctx, dy, past=None):
        total, weight, mean, rstd = ctx.saved_tensors
        if dy is None:  # only the sum was used
            return past, past if ctx.adds else None, None, None, None
        needs_sums = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        parameters = weight, None
        dx, dw, db = norm_gradients(dy, past, total, mean, rstd, parameters, needs_sums)
        return dx, dx if ctx.adds else None, dw, db, None


_apply = direct_apply(_Norm)


def norm_rows(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """x [.., hidden] → the norm of the sum with the residual, and (sum, mean, rstd), which the gradients need."""
    x, residual, weight, bias = _all_packed(x, residual, weight, bias)
    is_rms = bias is None
    adds = residual is not None
    # One pass over the rows writes the results and the numbers that backward needs.
    way = _way_forward(x.shape, x.dtype, is_rms, adds)
    y = torch.empty_like(x)
    total = torch.empty_like(x) if adds else x
    rstd = x.new_empty(way.rows, dtype=torch.float32)
    mean = None if is_rms else torch.empty_like(rstd)
    way.kernel(
        way.template,
        way.grid,
        way.threads,
        x,
        residual,
        weight,
        bias,
        total if adds else None,
        y,
        mean,
        rstd,
        way.number,
        eps,
    )
    return y, total, mean, rstd


def norm_gradients(
    dy: torch.Tensor,
    past: torch.Tensor | None,
    total: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    parameters: tuple[torch.Tensor, torch.Tensor | None],
    needs_sums: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the sum, the weight and the bias. past: the gradient of the sum from elsewhere."""
    dy, past, weight = _all_packed(dy, past, parameters[0])
    dx, partial_w, partial_b = _backward(dy, past, total, weight, mean, rstd)
    if not needs_sums:
        return dx, None, None
    return dx, *_sum_rows(partial_w, partial_b, weight)


Tensors = TypeVarTuple("Tensors")


def _all_packed(*tensors: *Tensors) -> tuple[*Tensors]:
    """Return each tensor as `packed`, and each None, in one call."""
    found: list[object] = []
    for t in tensors:
        if isinstance(t, torch.Tensor):
            if not (t.is_contiguous() and t.data_ptr() % BYTES == 0):
                t = packed(t)
        found.append(t)
    return tuple(found)  # type: ignore[return-value]  # each of the type of its argument


@lru_cache(maxsize=1024)
def _way_backward(
    shape: tuple[int, ...], dtype: torch.dtype, is_rms: bool, has_past: bool
) -> tuple[Rows, int, tuple[tuple, int, int]]:
    """(the rows, the number of their chunks, of which each has its own sums for weight and bias; template,
    grid and threads of the kernel)."""
    total = torch.empty(shape, dtype=dtype, device="meta")
    rows = rows_of(total, BACKWARD_NUMBERS[total.element_size(), is_rms], 512)
    chunks = min(rows.count, chunks_of(rows.threads))
    kind = (is_rms, has_past)
    if not rows.threads:
        return rows, chunks, ((type_name(total), *kind), rows.count, LOOPED_THREADS)
    template = (type_name(total), rows.cols, rows.threads, *kind)
    threads = rows.threads * rows.groups_per_block
    return rows, chunks, (template, rows.blocks(chunks), threads)


def _backward(
    dy: torch.Tensor,
    past: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradient of the sum, and fp32 [chunks, cols] partial sums of those of weight and bias."""
    is_rms = mean is None
    has_past = past is not None
    rows, chunks, way = _way_backward(total.shape, total.dtype, is_rms, has_past)
    dx = torch.empty_like(total)
    partial_w = rstd.new_empty(chunks, rows.cols)
    partial_b = None if is_rms else torch.empty_like(partial_w)
    tensors = (dy, past, total, weight, mean, rstd, dx)
    # Short rows stay in registers; long ones are read twice, by two kernels.
    if rows.threads:
        BACKWARD(*way, *tensors, partial_w, partial_b, rows.count, chunks)
    else:
        BACKWARD_LOOPED(*way, *tensors, rows.cols)
        strips = -(-rows.cols // (STRIP_THREADS * lanes(total)))
        WEIGHT_SUMS(
            (type_name(total), is_rms),
            (strips, chunks),
            STRIP_THREADS,
            dy,
            total,
            mean,
            rstd,
            partial_w,
            partial_b,
            rows.count,
            rows.cols,
        )
    return dx, partial_w, partial_b


def chunks_of(threads: int) -> int:
    """Partial sums of dw and db: enough groups of `threads` to keep 132 multiprocessors busy, with the
    registers that they have, and few enough that their second sum is short. A function of the shape alone:
    sums in another order on another GPU would give other weights."""
    return 128 if threads in (0, 512) else 98304 // threads


def _sum_rows(
    partial_w: torch.Tensor, partial_b: torch.Tensor | None, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the sums over rows, in the dtype of weight."""
    chunks, cols = partial_w.shape
    dw = torch.empty_like(weight)
    db = None if partial_b is None else torch.empty_like(weight)
    SUM_ROWS(
        (type_name(weight),),
        (-(-cols // SUM_COLUMNS), 1 if db is None else 2),
        256,
        partial_w,
        partial_b,
        dw,
        db,
        chunks,
        cols,
    )
    return dw, db


_HALVES = Halves(norm_rows, norm_gradients)
for _norm in (layer_norm, rms_norm, residual_norm):
    _HALVES.of(_norm)
_LIMITS = {"devices": GPU, "dtypes": FLOATS, "fits": fits}
norms.layer_norm.kernel("cuda", **_LIMITS)(layer_norm)
norms.rms_norm.kernel("cuda", **_LIMITS)(rms_norm)
norms.residual_norm.kernel("cuda", **_LIMITS)(residual_norm)
