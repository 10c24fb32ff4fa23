"""Products of runs of rows, each with a matrix of its own: y[a:b] = x[a:b] W_eᵀ for run e of the rows.

Experts are such products: the rows are tokens sorted by expert. Implementations:

    torch's grouped_mm   GPUs in bf16, where the sizes are multiples of 16 bytes: one launch for all experts
    one product a run    everywhere else, and the reference

Rows and matrices of a run may be 0; counts must sum to the number of rows, because grouped_mm leaves rows
behind the last run uninitialised. In plans, where tensors have no values, only the longest run is multiplied:
its temporary memory is that of all.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from .product import add_product_, affine, has_memory, product_into

ALIGNMENT = 16         # bytes, of a row


def runs_of(counts: Sequence[int], x: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """(number of the run, its rows) without empty runs; only the longest one if x has no memory."""
    start, longest = 0, None if has_memory(x) else max(counts, default=0)
    for run, count in enumerate(counts):
        if count and longest in (None, count):
            yield run, slice(start, start + count)
            if longest:
                return
        start += count


def grouped_affine(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                   counts: Sequence[int]) -> torch.Tensor:
    """x [n, in], weight [runs, out, in], bias [runs, out] or None → [n, out]."""
    if _has_kernel(x, weight):
        y = _grouped_mm(x, weight.transpose(1, 2), counts)
        return y if bias is None else y.add_(bias.repeat_interleave(_on_device(counts, x), 0))
    y = x.new_empty(x.shape[0], weight.shape[1])
    for run, rows in runs_of(counts, x):
        if bias is None:
            product_into(y[rows], x[rows], weight[run].t())
        else:
            y[rows] = affine(x[rows], weight[run], bias[run])
    return y


def grouped_product(x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """x [n, out], weight [runs, out, in] → [n, in]: the gradient of the input of `grouped_affine`."""
    if _has_kernel(x, weight):
        return _grouped_mm(x, weight, counts)
    y = x.new_empty(x.shape[0], weight.shape[2])
    for run, rows in runs_of(counts, x):
        product_into(y[rows], x[rows], weight[run])
    return y


def add_grouped_gradient_(out: torch.Tensor, dy: torch.Tensor, x: torch.Tensor,
                          counts: Sequence[int]) -> None:
    """Add dyᵀ x of each run to out [runs, dy's columns, x's columns]; dy and x [n, ..]."""
    if _has_kernel(x, out):
        out.add_(_grouped_mm(dy.t(), x, counts))
        return
    for run, rows in runs_of(counts, x):
        add_product_(out[run], dy[rows].t(), x[rows])


def new_grouped_gradient(weight: torch.Tensor, dy: torch.Tensor, x: torch.Tensor,
                         counts: Sequence[int]) -> torch.Tensor:
    """dyᵀ x of each run, a new tensor like `weight` [runs, dy's columns, x's columns]; 0 for an empty run."""
    if _has_kernel(x, weight):
        return _grouped_mm(dy.t(), x, counts)
    out = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for run, count in enumerate(counts):
        if not count:
            out[run].zero_()
    for run, rows in runs_of(counts, x):
        product_into(out[run], dy[rows].t(), x[rows])
    return out


def sums_of_runs(x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The sum of the rows of each run: [n, d] → [runs, d]."""
    sums = x.new_zeros(len(counts), x.shape[1])
    for run, rows in runs_of(counts, x):
        torch.sum(x[rows], 0, out=sums[run])
    return sums


def _has_kernel(x: torch.Tensor, weight: torch.Tensor) -> bool:
    aligned = all(size * x.element_size() % ALIGNMENT == 0 for size in weight.shape[1:])
    return x.is_cuda and x.dtype is torch.bfloat16 and aligned and has_memory(x) and x.shape[0] > 0


def _grouped_mm(x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """x [n, k] and weight [runs, k, m] → [n, m]; x [k, n] and weight [n, m] → [runs, k, m]."""
    ends = _on_device(counts, x).cumsum(0, dtype=torch.int32)
    return F.grouped_mm(x, weight, offs=ends)


def _on_device(counts: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    numbers = torch.tensor(counts)
    return (numbers.pin_memory() if like.is_cuda else numbers).to(like.device, non_blocking=True)
