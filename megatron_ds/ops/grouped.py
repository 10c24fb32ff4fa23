"""Products of runs of rows, each with a matrix of its own: y[a:b] = x[a:b] W_eᵀ for run e of the rows.

Experts are such products: the rows are tokens sorted by expert. Implementations:

    torch's grouped_mm   GPUs of compute capability 9 and 10 (Hopper, Blackwell) in bf16, where the sizes are
                         multiples of 16 bytes: one launch for all experts. On others torch would copy the
                         numbers of rows to the host, which has them, and wait
    one compiled call    CPUs with compiled products (extensions/kernels), from the sizes on at which one product is
                         faster
    one product a run    everywhere else, and the reference

Runs may be empty; all rows must belong to a run, because grouped_mm leaves rows behind the last run
uninitialised. In plans, where tensors have no values, only the longest run is multiplied: its temporary
memory is that of all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from ..features import Provided
from .kernel_table import choice_recorded, is_selected
from .meta_tensors import has_memory
from .product import FP32_SUMS, add_product_, affine, product_into
from .work import CallWork, Product, each_stands_for, report

GROUPED_PRODUCTS: Provided[Any] = Provided("grouped products")

ALIGNMENT = 16  # bytes, of a row
GROUPED_ARCHITECTURES = (9, 10)  # major compute capability
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class RowRuns:
    """The number of rows of each run, on the host and on the device. All products of a layer share one.

    counts      at least 0 each, their sum n
    on_device   the same, int64 [runs], on the device of the rows
    token_keys  int64 [n], the key of random numbers of the token of each row; None where no layer needs them
    """

    counts: tuple[int, ...]
    on_device: torch.Tensor
    token_keys: torch.Tensor | None = None

    @cached_property
    def ends(self) -> torch.Tensor:
        """int32 [runs], the row behind each run; made once, if a kernel asks for it."""
        return self.on_device.cumsum(0, dtype=torch.int32)

    def parts(self, rows: Tensors, matrices: Tensors) -> Iterator[Tensors]:
        """Yield, for each run that is not empty, its part of `rows` [n, ..], then of `matrices` [runs, ..].

        Only the longest run is yielded if the tensors have no memory.
        """
        if not has_memory(rows[0]):
            longest = max(self.counts)
            run = self.counts.index(longest)
            start = sum(self.counts[:run])
            if longest:
                with each_stands_for(sum(self.counts) / longest):
                    yield (
                        *(t[start : start + longest] for t in rows),
                        *(t[run] for t in matrices),
                    )
            return
        pieces = zip(
            *(t.split(list(self.counts)) for t in rows), *(t.unbind() for t in matrices)
        )
        yield from (part for part, count in zip(pieces, self.counts) if count)


def grouped_affine(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, runs: RowRuns
) -> torch.Tensor:
    """x [n, in], weight [runs, out, in], bias [runs, out] or None → [n, out]. Without autograd."""
    if _has_kernel(x, weight):
        y = F.grouped_mm(x, weight.transpose(1, 2), offs=runs.ends)
        # Without the number of rows the host would wait for the device to add them up.
        return (
            y
            if bias is None
            else y.add_(bias.repeat_interleave(runs.on_device, 0, output_size=len(y)))
        )
    y = x.new_empty(x.shape[0], weight.shape[1])
    if call := _one_call("grouped_affine", weight, runs, x, weight):
        call.affine_into(y, x, weight, bias, runs.counts)
        return y
    if bias is None:
        for out, part, w in runs.parts((y, x), (weight,)):
            product_into(out, part, w.t())
    else:
        for out, part, w, b in runs.parts((y, x), (weight, bias)):
            out.copy_(affine(part, w, b))
    return y


def grouped_product(
    x: torch.Tensor, weight: torch.Tensor, runs: RowRuns
) -> torch.Tensor:
    """x [n, out], weight [runs, out, in] → [n, in]: the gradient of the input of `grouped_affine`."""
    if _has_kernel(x, weight):
        return F.grouped_mm(x, weight, offs=runs.ends)
    y = x.new_empty(x.shape[0], weight.shape[2])
    if call := _one_call("grouped_product", weight, runs, x, weight):
        call.product_into(y, x, weight, runs.counts)
        return y
    for out, part, w in runs.parts((y, x), (weight,)):
        product_into(out, part, w)
    return y


def add_grouped_gradient_(
    out: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    runs: RowRuns,
    overwrites: bool = False,
) -> None:
    """Add dyᵀ x of each run to out [runs, dy's columns, x's columns]; dy and x [n, ..].

    overwrites: replace what `out` contains, by 0 for an empty run
    """
    # One product a run is not rounded before it is added; grouped_mm has 16-bit results alone.
    is_exact = add_product_.has(FP32_SUMS, out.device.type, out.dtype)
    if _has_kernel(x, out) and not is_exact:
        products = F.grouped_mm(dy.t(), x, offs=runs.ends)
        out.copy_(products) if overwrites else out.add_(products)
        return
    if overwrites:
        _clear_empty(out, runs)
    call = None
    if out.dtype == torch.float32:
        call = _one_call("grouped_gradient", out, runs, dy, x)
    if call is not None:
        call.write_gradient(out, dy, x, runs.counts, not overwrites)
        return
    for part, into, w in runs.parts((dy, x), (out,)):
        add_product_(w, part.t(), into, overwrites)


def new_grouped_gradient(
    weight: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, runs: RowRuns
) -> torch.Tensor:
    """dyᵀ x of each run, a new tensor like `weight` [runs, dy's columns, x's columns]; 0 for an empty run."""
    if _has_kernel(x, weight):
        return F.grouped_mm(dy.t(), x, offs=runs.ends)
    out = torch.empty_like(weight, memory_format=torch.contiguous_format)
    _clear_empty(out, runs)
    if call := _one_call("grouped_gradient", out, runs, dy, x):
        call.write_gradient(out, dy, x, runs.counts)
        return out
    for part, into, w in runs.parts((dy, x), (out,)):
        product_into(w, part.t(), into)
    return out


def _clear_empty(out: torch.Tensor, runs: RowRuns) -> None:
    for run, count in enumerate(runs.counts):
        if not count:
            out[run].zero_()


def sums_of_runs(x: torch.Tensor, runs: RowRuns) -> torch.Tensor:
    """Return the sum of the rows of each run: [n, d] → [runs, d]."""
    sums = x.new_zeros(len(runs.counts), x.shape[1])
    for part, total in runs.parts((x,), (sums,)):
        torch.sum(part, 0, out=total)
    return sums


@cache
def one_call() -> ModuleType | None:
    """Compiled calls for all runs: `suits`, `affine_into`, `product_into` and `write_gradient`; None without the wing
    of kernels."""
    return GROUPED_PRODUCTS.find()


def _one_call(
    name: str, matrices: torch.Tensor, runs: RowRuns, *factors: torch.Tensor
) -> ModuleType | None:
    """Return the compiled calls where all products of an operation are one of them; then the choice is recorded by
    its name."""
    found = one_call()
    if found is None or not is_selected("auto"):
        return None
    if not found.suits(matrices, runs.counts, *factors):
        return None
    choice_recorded(name, "c++")
    report(name, "c++", _runs_work(matrices, runs))
    return found


def _runs_work(matrices: torch.Tensor, runs: RowRuns) -> CallWork:
    """Return the work of all products with matrices [runs, n, m]: each of them has the rows of its run."""
    filled = sum(1 for count in runs.counts if count)
    rows = sum(runs.counts)
    wide, narrow = matrices.shape[1:]
    moved = rows * (wide + narrow) + matrices.numel()
    return CallWork(
        (Product(filled, rows // max(1, filled), wide, narrow),),
        nbytes=moved * matrices.element_size(),
        dtype=matrices.dtype,
    )


def _has_kernel(x: torch.Tensor, weight: torch.Tensor) -> bool:
    aligned = all(size * x.element_size() % ALIGNMENT == 0 for size in weight.shape[1:])
    return (
        x.is_cuda
        and x.dtype is torch.bfloat16
        and aligned
        and has_memory(x)
        and x.shape[0] > 0
        and _has_grouped_kernel(x.device)
    )


@cache
def _has_grouped_kernel(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] in GROUPED_ARCHITECTURES
