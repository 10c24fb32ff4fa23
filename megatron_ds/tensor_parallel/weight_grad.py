"""Computes the gradient of a weight from its two factors, and adds it to the buffer of the optimizer.

    dW = dyᵀ x        x [N, in], dy [N, out]

A parameter whose optimizer sums gradients up has a `GradientAccumulator`, `.gradient_sum` (mpu/managed_parameter.py).
The product is added to its sum, the first one overwrites it: no gradient tensor is allocated and autograd
receives None. Without an accumulator the gradient is returned to autograd, as in any module.

Note: a parameter with an accumulator need not be followed by autograd: a linear layer whose input requires a
gradient adds the gradients of its parameters in each backward that passes it, also in one of
`torch.autograd.grad` for its input alone.

Note: no view is kept between calls. With sharded gradients a buffer exists from the first contribution to its
bucket until the bucket is reduced; the next micro-batch may use another one.

Note: the weight half. A schedule may split a backward in two (Qi et al. 2024, arXiv:2401.10241): while the
input half runs, the parameter has a `.detour` with a queue, and a layer appends (weight, begin) instead of
computing. In the weight half the queue's owner calls begin(), which starts collectives, and later what
begin() returned, which computes: the same functions on the same tensors as in a whole backward, so the same
bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from ..mpu.managed_parameter import (
    SUM,
    Begin,
    Detour,
    Finish,
    GradientAccumulator,
    accumulator_of,
    detour_of,
    detours,
)
from ..ops.grouped import RowRuns, add_grouped_gradient_, new_grouped_gradient
from ..ops.linear_products import UNBOUND, LinearProducts
from ..ops.product import add_product_, product


def now_or_later(weight: torch.Tensor, begin: Begin) -> Finish:
    """Begin to compute the weight's gradient, or queue it for the weight half.

    The returned function gives what autograd receives as the gradient.
    """
    detour = detour_of(weight)
    if detour is None or detour.queue is None or detour.sums is not None:
        return begin()
    detour.queue.append((weight, begin))
    return nothing


def nothing() -> None:
    """`Finish` of a weight that needs no gradient, or whose gradient is queued."""


def linear_gradient(
    weight: torch.Tensor,
    x: torch.Tensor,
    dy: torch.Tensor,
    products: LinearProducts = UNBOUND,
) -> torch.Tensor | None:
    """Add dyᵀ x to the gradient of the weight and return None; without an accumulator, return the product.

    Inside `gradient_sums` it is added to the sum. In the input half of a split backward it is queued.
    """
    # `detour_of` and `accumulator_of`, without their calls: all linear layers come here in each backward.
    detour: Detour | None = getattr(weight, "detour", None)
    if detour is not None and detour.sums is not None:
        detour.sums.add_product(weight, x, dy)
        return None
    if detour is not None and detour.queue is not None:
        later = partial(linear_gradient, weight, x, dy, products)
        detour.queue.append((weight, lambda: later))
        return None
    accumulator: GradientAccumulator | None = getattr(weight, SUM, None)
    if accumulator is None:
        return product(dy.t(), x)
    accumulator.contribute(products.add_product_, dy.t(), x)
    return None


def add_gradient(
    parameter: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor | None:
    """Add a gradient that is a tensor already, such as that of a bias, and return None.

    Without an accumulator the gradient is returned to autograd. Inside `gradient_sums` it is added to the sum of
    the parts. In the input half of a split backward its addition is queued.
    """
    accumulator: GradientAccumulator | None = getattr(parameter, SUM, None)
    if accumulator is None:
        return gradient
    detour: Detour | None = getattr(parameter, "detour", None)
    if detour is None:
        accumulator.add(gradient)
    elif detour.sums is not None:
        detour.sums.add(parameter, gradient)
    elif detour.queue is not None:
        later = partial(accumulator.add, gradient)
        detour.queue.append((parameter, lambda: later))
    return None


class GradientSum:
    """A weight's gradient as a sum of products dyᵀ x: one contribution, whatever the number of products.

    The products are added to the accumulator of the weight; without one, and in the input half of a split
    backward, which leaves accumulators alone, to a buffer in fp32.
    """

    def __init__(self, weight: torch.Tensor):
        self.weight = weight
        detour = detour_of(weight)
        is_apart = detour is not None and detour.queue is not None
        self._accumulator = None if is_apart else accumulator_of(weight)
        self._sum: torch.Tensor | None = None

    def add(self, x: torch.Tensor, dy: torch.Tensor) -> None:
        """Add dyᵀ x, for x [n, in] and dy [n, out]."""
        if self._accumulator is not None:
            self._accumulator.write(add_product_, dy.t(), x)
            return
        is_new = self._sum is None
        add_product_(self._buffer(), dy.t(), x, overwrites=is_new)

    def deliver(self) -> torch.Tensor | None:
        """End the contribution, after the last product; returns what autograd receives as the gradient."""
        if self._accumulator is not None:
            self._accumulator.ready()
            return None
        return now_or_later(self.weight, lambda: self._finish)()

    def _finish(self) -> torch.Tensor | None:
        total = self._buffer()
        accumulator = accumulator_of(self.weight)
        if accumulator is None:
            return total.to(self.weight.dtype)
        accumulator.add(total)
        return None

    def _buffer(self) -> torch.Tensor:
        if self._sum is None:
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            self._sum = torch.empty_like(
                self.weight, dtype=wide, memory_format=torch.contiguous_format
            )
        return self._sum


class GradientSums:
    """Gradients of parameters that are computed part by part: each is one contribution in the end."""

    def __init__(self, parameters: Sequence[torch.Tensor]):
        self._parameters = parameters
        self._products: dict[torch.Tensor, GradientSum] = {}
        self._others: dict[torch.Tensor, torch.Tensor] = {}

    def add_product(
        self, weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor
    ) -> None:
        """Add dyᵀ x to the sum of a weight, for x [n, in] and dy [n, out]."""
        if weight not in self._products:
            self._products[weight] = GradientSum(weight)
        self._products[weight].add(x, dy)

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Add a part of a gradient that is no product, if there is one; in fp32."""
        if gradient is not None and parameter in self._others:
            self._others[parameter].add_(gradient)
        elif gradient is not None:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self._others[parameter] = gradient.to(wide, copy=True)

    def deliver(self) -> list[torch.Tensor | None]:
        """Once, at the end: what autograd receives as the gradients of the parameters."""
        delivered = []
        for p in self._parameters:
            if p in self._products:
                delivered.append(self._products[p].deliver())
            else:
                other = self._others.get(p)
                delivered.append(None if other is None else other.to(p.dtype))
        return delivered


@contextmanager
def gradient_sums(parameters: Sequence[torch.Tensor]) -> Iterator[GradientSums]:
    """Inside, linear layers add the gradients of these weights to the sums, which are to be delivered after
    it. In a split backward the products are computed in the input half, and added in the weight half."""
    sums = GradientSums(parameters)
    by_parameter = {}
    for p in parameters:
        before = detour_of(p)
        by_parameter[p] = Detour(None if before is None else before.queue, sums)
    with detours(by_parameter):
        yield sums


def grouped_gradient(
    weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor, runs: RowRuns
) -> torch.Tensor | None:
    """Add dyᵀ x of each run of rows to the gradient of its matrix of the weight [runs, out, in].

    The result is as of `linear_gradient`. A run without rows adds nothing.
    """
    accumulator = accumulator_of(weight)
    if accumulator is None:
        return new_grouped_gradient(weight, dy, x, runs)
    accumulator.contribute(add_grouped_gradient_, dy, x, runs)
    return None


def embedding_gradient(
    weight: torch.Tensor, rows: torch.Tensor, dy: torch.Tensor
) -> torch.Tensor | None:
    """Add dy [N, h] to `rows` [N] of the weight's gradient; the result as of `linear_gradient`."""
    accumulator = accumulator_of(weight)
    if accumulator is None:
        gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
        _add_rows(gradient, rows, dy, overwrites=True)
        return gradient
    accumulator.contribute(_add_rows, rows, dy)
    return None


def _add_rows(
    out: torch.Tensor, rows: torch.Tensor, dy: torch.Tensor, overwrites: bool
) -> None:
    if overwrites:
        out.zero_()
    dy = dy.to(out.dtype)
    if out.device.type == "cpu":
        out.index_add_(0, rows, dy)
    else:
        # index_add_ adds in any order on GPUs; index_put_ sorts first, so that two runs agree bit for bit.
        out.index_put_((rows,), dy, accumulate=True)
