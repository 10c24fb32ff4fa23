"""Products of runs of rows, each with a matrix of its own, in one call of the compiled products (compiled_product.py):
the products of the experts of a layer. Threads take whole products in turn where that balances.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from ....host.valueless_tensor import ValuelessTensor
from ....ops.widened_products import WORKSPACE, is_widened
from . import compiled_product
from .compiled_product import NAMES, is_compiled, pays

Runs = Iterator[tuple[int, int, int]]
"""Of each run that is not empty: its number, its first row, its number of rows."""


def suits(
    matrices: torch.Tensor, counts: Sequence[int], *factors: torch.Tensor
) -> bool:
    """Return whether the functions below take factors of runs of `counts` rows, where the matrices of the runs are
    one of the factors or the results, on this machine, and are faster than one product a run."""
    rows = factors[0]
    filled = sum(count > 0 for count in counts)
    if rows.device.type != "cpu" or not filled:
        return False
    if not is_compiled(rows.dtype) or is_widened(rows):
        return False
    are_alike = all(t.dtype == rows.dtype for t in factors)
    are_contiguous = all(t.is_contiguous() for t in (matrices, *factors))
    mean = len(rows) // filled
    return are_alike and are_contiguous and pays(rows.dtype, mean, *matrices.shape[1:])


def affine_into(
    y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counts: Sequence[int],
) -> None:
    """y = x W_eᵀ + b_e: x [n, in], weight [runs, out, in], bias [runs, out] or None, y [n, out]. Not for autograd."""
    _, out, into = weight.shape
    bias = None if bias is None else bias.contiguous()
    products = [
        (
            (count, out, into),
            (_at(x, start), into, 1),
            (_at(weight, run), 1, into),
            0 if bias is None else _at(bias, run),
            _at(y, start),
        )
        for run, start, count in _runs(counts)
    ]
    _call(y, x, products)


def product_into(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int]
) -> None:
    """y = x W_e: x [n, out], weight [runs, out, in], y [n, in]. Not for autograd."""
    _, out, into = weight.shape
    products = [
        (
            (count, into, out),
            (_at(x, start), out, 1),
            (_at(weight, run), into, 1),
            0,
            _at(y, start),
        )
        for run, start, count in _runs(counts)
    ]
    _call(y, x, products)


def write_gradient(
    gradient: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    counts: Sequence[int],
    is_added: bool = False,
) -> None:
    """dyᵀ x of each run that is not empty, to gradient [runs, out, in] of the dtype of x, or fp32; or added to it in
    fp32. dy [n, out], x [n, in]. Not for autograd."""
    _, out, into = gradient.shape
    products = [
        (
            (out, into, count),
            (_at(dy, start), 1, out),
            (_at(x, start), into, 1),
            0,
            _at(gradient, run),
        )
        for run, start, count in _runs(counts)
    ]
    _call(gradient, x, products, is_added)


def _runs(counts: Sequence[int]) -> Runs:
    start = 0
    for run, count in enumerate(counts):
        if count:
            yield run, start, count
        start += count


def _at(t: torch.Tensor, index: int) -> int:
    """Return the address of t[index]; 0 for a plan's tensor."""
    if isinstance(t, ValuelessTensor):
        return 0
    return t.data_ptr() + index * t.stride(0) * t.element_size()


def _call(
    out: torch.Tensor, factor: torch.Tensor, products: list, is_added: bool = False
) -> None:
    compiled = compiled_product.extension()
    name = NAMES[factor.dtype]
    is_wide = out.dtype == torch.float32
    threads = torch.get_num_threads()
    # A thread has packed copies of the largest product.
    bytes_of: Callable[..., int] = getattr(compiled, f"bytes_{name}")
    most = max(bytes_of(sizes, is_wide) for sizes, *_ in products)
    most = -(-most // 64) * 64
    packed = WORKSPACE.take("packed factors", threads * most // 4)
    if not isinstance(out, ValuelessTensor):
        getattr(compiled, f"products_{name}")(
            products,
            out.stride(-2),
            is_wide,
            is_added,
            packed.data_ptr(),
            most,
            threads,
        )
    torch.autograd.graph.increment_version(out)
