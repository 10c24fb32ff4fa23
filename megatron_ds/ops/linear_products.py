"""The three products of a linear layer, each with the implementation for its shapes.

    forward     y = x Wᵀ + b
    backward    dx = dy W,  dW += dyᵀ x

A layer computes them again and again for as many rows. Its `LayerProducts` remember which implementations compute
them: a call of a product is then a call of the function that computes it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .kernel_table import CHOICES, Operation
from .product import add_product_, affine, product


class LinearProducts:
    """Functions with the arguments of the operations of `ops.product` that have their names."""

    __slots__ = ("affine", "product", "add_product_")

    def __init__(
        self,
        affine: Callable[..., Any],
        product: Callable[..., Any],
        add_product_: Callable[..., Any],
    ):
        self.affine = affine
        self.product = product
        self.add_product_ = add_product_


# The operations, which choose in each call.
UNBOUND = LinearProducts(affine, product, add_product_)


def bound_products() -> LinearProducts:
    """Return products that choose in their first calls: later ones have the same shapes, dtypes and strides. While
    calls are recorded, each call must choose."""
    if CHOICES.number is None:
        return UNBOUND
    made = LinearProducts(affine, product, add_product_)
    for operation in (affine, product, add_product_):
        setattr(made, operation.name, partial(_first_call, made, operation))
    return made


def _first_call(products: LinearProducts, operation: Operation, *arguments: Any) -> Any:
    chosen = operation.choice(*arguments)
    setattr(products, operation.name, chosen)
    return chosen(*arguments)


class LayerProducts:
    """The products of a layer, bound for the shape and the dtype of the last input."""

    __slots__ = ("_key", "_now")

    def __init__(self) -> None:
        self._key: tuple | None = None
        self._now = UNBOUND

    def __deepcopy__(self, memo: dict) -> "LayerProducts":
        return LayerProducts()

    def of(self, x: torch.Tensor) -> LinearProducts:
        """Return the products for rows x [n, in]."""
        key = x.shape, x.dtype, CHOICES.number
        if key != self._key:
            self._now = bound_products()
            self._key = key
        return self._now
