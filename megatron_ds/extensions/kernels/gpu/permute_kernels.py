"""Rows of tokens for their experts, and the weighted sums of the results, forward and backward:
csrc/gpu/permute.cu. The operations are those of ../permute.py, which see for the arguments.
"""

import torch
from torch.autograd.function import once_differentiable

from ....ops import permute as ops_permute
from ....ops.kernel_table import FLOATS, GPU
from .gpu_kernel import GpuKernel, type_name
from .packets import rows_together, vector_width

THREADS = 256
MOST = 2**31 - 1  # vectors, rows and slots
# threads of a row in combine_backward
FEW_VECTORS = 64
OF_SHORT_ROWS = 32
OF_LONG_ROWS = 128

GATHER = GpuKernel(
    "permute.cu", "gather", "ptr ptr ptr u32 u32 u32", [("bf16", 8), ("float", 4)]
)
SUM = GpuKernel(
    "permute.cu",
    "sum_of_slots",
    "ptr ptr ptr ptr u32 u32 i32 i32 i32",
    [("bf16", 8, True), ("bf16", 8, False), ("fp16", 8, True), ("float", 4, True)],
)
COMBINE_BACKWARD = GpuKernel(
    "permute.cu",
    "combine_backward",
    "ptr ptr ptr ptr ptr ptr i32 u32",
    [
        ("bf16", 8, OF_SHORT_ROWS),
        ("bf16", 8, OF_LONG_ROWS),
        ("fp16", 8, OF_LONG_ROWS),
        ("float", 4, OF_LONG_ROWS),
    ],
)


def fits_permute(
    x: torch.Tensor, slots: torch.Tensor, place: torch.Tensor, k: int | None = None
) -> str:
    """ "" if `permute` takes x [T, h], else the reason."""
    return _too_many(max(len(x), len(slots)), x, len(x) * (k or place.shape[1]))


def fits_combine(
    rows: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor, place: torch.Tensor
) -> str:
    """ "" if `combine` takes rows [R, h], else the reason."""
    if weights.dtype != torch.float32:
        return f"weights of {weights.dtype}"
    return _too_many(max(len(rows), len(place)), rows, weights.numel())


def fits_reorder(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> str:
    """ "" if `reorder` takes x [n, h], else the reason."""
    return _too_many(len(x), x, len(x))


def _too_many(rows: int, x: torch.Tensor, slots: int) -> str:
    for count, what in (
        (rows * x.shape[1] // vector_width([x.shape[1]], x), "packets"),
        (rows, "rows"),
        (slots, "slots"),
    ):
        if count > MOST:
            return f"{count} {what} are more than {MOST}"
    return ""


def permute(
    x: torch.Tensor, slots: torch.Tensor, place: torch.Tensor, k: int | None = None
) -> torch.Tensor:
    """x [T, h] → rows [R, h] of tokens slots // k; of zeros where a slot is -1. Keeps `place` alone."""
    return _Permute.apply(x, slots, place, place.shape[1] if k is None else k)


def combine(
    rows: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """rows [R, h] → [T, h], the sum over the slots of a token of weights [T, k] times rows."""
    return _Combine.apply(rows, weights, slots, place)


def reorder(
    x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
) -> torch.Tensor:
    """x [n, h] → rows order[i] of x. Keeps `inverse` alone."""
    return _Reorder.apply(x, order, inverse)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slots, place, k):
        ctx.save_for_backward(place)
        return _gathered(x, slots, k)

    @staticmethod
    @once_differentiable
    def backward(ctx, drows):
        return _summed(drows, *ctx.saved_tensors), None, None, None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.save_for_backward(inverse)
        return _gathered(x, order, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _gathered(dy, *ctx.saved_tensors, 1), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, slots, place):
        rows = rows.contiguous()
        weights = weights.contiguous()
        ctx.save_for_backward(rows, weights, slots, place)
        return _summed(rows, place, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (rows, weights, slots, _), dy = ctx.saved_tensors, dy.contiguous()
        drows = torch.empty_like(rows)
        dweights = torch.zeros_like(weights)  # slots without a row keep the zero
        width = _width(dy, rows, drows)
        per_row = rows.shape[1] // width
        threads = OF_SHORT_ROWS if per_row <= FEW_VECTORS else OF_LONG_ROWS
        COMBINE_BACKWARD(
            (type_name(rows), width, threads),
            len(rows),
            threads,
            dy,
            rows,
            weights,
            slots.contiguous(),
            drows,
            dweights,
            per_row,
            weights.shape[1],
        )
        return drows, dweights, None, None


def _gathered(x: torch.Tensor, index: torch.Tensor, divisor: int) -> torch.Tensor:
    """Rows index // divisor of x, of zeros where the index is -1."""
    x = x.contiguous()
    index = index.contiguous()
    y = x.new_empty(len(index), x.shape[1])
    width = _width(x, y)
    vectors = y.numel() // width
    GATHER(
        (type_name(x), width),
        -(-vectors // THREADS),
        THREADS,
        x,
        index,
        y,
        vectors,
        x.shape[1] // width,
        divisor,
    )
    return y


def _summed(
    rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, h]: sums over place [T, used] of rows, times weights [T, k]."""
    rows = rows.contiguous()
    place = rows_together(place)
    y = rows.new_empty(len(place), rows.shape[1])
    width = _width(rows, y)
    vectors = y.numel() // width
    SUM(
        (type_name(rows), width, weights is not None),
        -(-vectors // THREADS),
        THREADS,
        rows,
        place,
        weights,
        y,
        vectors,
        rows.shape[1] // width,
        place.shape[1],
        place.stride(0),
        0 if weights is None else weights.shape[1],
    )
    return y


def _width(*tensors: torch.Tensor) -> int:
    """Elements that a thread loads at once from rows of contiguous tensors."""
    return vector_width([tensors[0].shape[1]], *(t.view(-1) for t in tensors))


for _operation, _kernel, _fits in (
    (ops_permute.permute, permute, fits_permute),
    (ops_permute.permute_padded, permute, fits_permute),
    (ops_permute.combine, combine, fits_combine),
    (ops_permute.combine_padded, combine, fits_combine),
    (ops_permute.reorder, reorder, fits_reorder),
):
    _operation.kernel("cuda", devices=GPU, dtypes=FLOATS, fits=_fits)(_kernel)
