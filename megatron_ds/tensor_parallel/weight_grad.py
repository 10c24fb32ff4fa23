"""Computes the gradient of a weight from its two factors, and adds it to the buffer of the optimizer.

    dW = dyᵀ x        x [N, in], dy [N, out]

A parameter managed by ZeRO has `take_main_grad()`, which returns a view into a flat buffer in the
parameter's shape, `take_new_main_grad()`, which returns it if nothing was added to it yet, with undefined
contents; and `grad_ready()`, called once per contribution. The product is added to the view, the first one
overwrites it: no gradient tensor is allocated and autograd receives None. `add_main_grad(gradient)` does all
of this for a gradient that is a tensor already, such as that of a bias, and `add_main_product(add, a, b)` for the
product a b, by `add(view, a, b, overwrites)`. Another optimizer may give its
parameters a tensor `main_grad` in place of these functions. Without any of them the gradient is returned to
autograd, as in any module.

Note: a parameter with `add_main_grad` need not be followed by autograd: a linear layer whose input requires a
gradient adds the gradients of its parameters in each backward that passes it, also in one of
`torch.autograd.grad` for its input alone.

Note: no view is kept between calls. With sharded gradients a buffer exists from the first contribution to its
bucket until the bucket is reduced; the next micro-batch may use another one.

Note: the weight half. A schedule may split a backward in two (Qi et al. 2024, arXiv:2401.10241): while the
input half runs, the parameter carries `grad_queue`, a list, and a layer appends (weight, begin) instead of
computing. In the weight half the queue's owner calls begin(), which starts collectives, and later what
begin() returned, which computes: the same functions on the same tensors as in a whole backward, so the same
bits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from ..ops.grouped import RowRuns, add_grouped_gradient_, new_grouped_gradient
from ..ops.linear_products import UNBOUND, LinearProducts
from ..ops.product import add_product_, product

Finish = Callable[[], torch.Tensor | None]
ADDS = "add_main_grad"  # the attribute of a parameter that ZeRO manages


def now_or_later(weight: torch.Tensor, begin: Callable[[], Finish]) -> Finish:
    """Begin to compute the weight's gradient, or queue it for the weight half.

    The returned function gives what autograd receives as the gradient.
    """
    queue = getattr(weight, "grad_queue", None)
    if queue is None or hasattr(weight, "grad_sums"):
        return begin()
    queue.append((weight, begin))
    return nothing


def nothing() -> None:
    """`Finish` of a weight that needs no gradient, or whose gradient is queued."""


def linear_gradient(
    weight: torch.Tensor,
    x: torch.Tensor,
    dy: torch.Tensor,
    products: LinearProducts = UNBOUND,
) -> torch.Tensor | None:
    """Add dyᵀ x to the weight's main gradient and return None; without one, return the product.

    Inside `gradient_sums` it is added to the sum. In the input half of a split backward it is queued.
    """
    if hasattr(weight, "grad_sums"):
        weight.grad_sums.add_product(weight, x, dy)
        return None
    if hasattr(weight, "grad_queue"):
        later = partial(linear_gradient, weight, x, dy, products)
        weight.grad_queue.append((weight, lambda: later))
        return None
    add = getattr(weight, "add_main_product", None)
    if add is not None:
        add(products.add_product_, dy.t(), x)
        return None
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return product(dy.t(), x)
    products.add_product_(main_grad, dy.t(), x)
    weight.grad_ready()
    return None


def add_gradient(
    parameter: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor | None:
    """Add a gradient to the parameter's main gradient and return None.

    Where ZeRO does not manage the parameter, the gradient is returned to autograd. Inside `gradient_sums` it is
    added to the sum of the parts. In the input half of a split backward its addition is queued.
    """
    add = getattr(parameter, ADDS, None)
    if add is None:
        return gradient
    if hasattr(parameter, "grad_sums"):
        parameter.grad_sums.add(parameter, gradient)
    elif hasattr(parameter, "grad_queue"):
        later = partial(add, gradient)
        parameter.grad_queue.append((parameter, lambda: later))
    else:
        add(gradient)
    return None


class GradientSum:
    """A weight's gradient as a sum of products dyᵀ x: one contribution, whatever the number of products.

    The sum is the main gradient itself; without one, and in the input half of a split backward, which leaves
    main gradients alone, a buffer of its own in fp32.
    """

    def __init__(self, weight: torch.Tensor):
        self.weight = weight
        is_apart = hasattr(weight, "grad_queue")
        new = None if is_apart else _new_main_grad_of(weight)
        main_grad = None if is_apart or new is not None else _main_grad_of(weight)
        self._has_main_grad = new is not None or main_grad is not None
        self._is_new = main_grad is None
        if not self._has_main_grad:
            wide = torch.promote_types(weight.dtype, torch.float32)
            new = torch.empty_like(
                weight, dtype=wide, memory_format=torch.contiguous_format
            )
        self._sum = new if main_grad is None else main_grad

    def add(self, x: torch.Tensor, dy: torch.Tensor) -> None:
        """Add dyᵀ x, for x [n, in] and dy [n, out]."""
        add_product_(self._sum, dy.t(), x, overwrites=self._is_new)
        self._is_new = False

    def deliver(self) -> torch.Tensor | None:
        """Once, after the last product: what autograd receives as the gradient."""
        if self._has_main_grad:
            self.weight.grad_ready()
            return None
        return now_or_later(self.weight, lambda: self._finish)()

    def _finish(self) -> torch.Tensor | None:
        if (new := _new_main_grad_of(self.weight)) is not None:
            new.copy_(self._sum)
        elif (main_grad := _main_grad_of(self.weight)) is not None:
            main_grad.add_(self._sum)
        else:
            return self._sum.to(self.weight.dtype)
        self.weight.grad_ready()
        return None


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
    for p in parameters:
        p.grad_sums = sums
    try:
        yield sums
    finally:
        for p in parameters:
            del p.grad_sums


def grouped_gradient(
    weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor, runs: RowRuns
) -> torch.Tensor | None:
    """Add dyᵀ x of each run of rows to the gradient of its matrix of the weight [runs, out, in].

    The result is as of `linear_gradient`. A run without rows adds nothing.
    """
    if (new := _new_main_grad_of(weight)) is not None:
        add_grouped_gradient_(new, dy, x, runs, overwrites=True)
    elif (main_grad := _main_grad_of(weight)) is not None:
        add_grouped_gradient_(main_grad, dy, x, runs)
    else:
        return new_grouped_gradient(weight, dy, x, runs)
    weight.grad_ready()
    return None


def embedding_gradient(
    weight: torch.Tensor, rows: torch.Tensor, dy: torch.Tensor
) -> torch.Tensor | None:
    """Add dy [N, h] to `rows` [N] of the weight's gradient; the result as of `linear_gradient`."""
    main_grad = _main_grad_of(weight)
    if main_grad is None:
        gradient = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        _add_rows(gradient, rows, dy)
        return gradient
    _add_rows(main_grad, rows, dy.to(main_grad.dtype))
    weight.grad_ready()
    return None


def _new_main_grad_of(weight: torch.Tensor) -> torch.Tensor | None:
    take = getattr(weight, "take_new_main_grad", None)
    return None if take is None else take()


def _main_grad_of(weight: torch.Tensor) -> torch.Tensor | None:
    take = getattr(weight, "take_main_grad", None)
    return getattr(weight, "main_grad", None) if take is None else take()


def _add_rows(out: torch.Tensor, rows: torch.Tensor, dy: torch.Tensor) -> None:
    if out.device.type == "cpu":
        out.index_add_(0, rows, dy)
    else:
        # index_add_ adds in any order on GPUs; index_put_ sorts first, so that two runs agree bit for bit.
        out.index_put_((rows,), dy, accumulate=True)
