"""The three products of a linear layer, each with the implementation for its shapes.

    forward     y = x Wᵀ + b
    backward    dx = dy W,  dW += dyᵀ x

A layer computes them again and again for as many rows. Its `LayerProducts` remember which implementations compute
them: a call of a product is then a call of the function that computes it.
"""

from collections.abc import Callable
from typing import Any

import torch

from .kernel_table import CHOICES
from .product import add_product_, affine, product


class LinearProducts:
    """Functions with the arguments of the operations of `ops.product` that have their names. Their first calls choose
    the implementations: later ones have the same shapes, dtypes and strides."""

    __slots__ = ("affine", "product", "add_product_")

    def __init__(self) -> None:
        self.affine: Callable[..., Any] = self._first_affine
        self.product: Callable[..., Any] = self._first_product
        self.add_product_: Callable[..., Any] = self._first_addition

    def _first_affine(self, *arguments: Any) -> torch.Tensor:
        self.affine = affine.choice(*arguments)
        return self.affine(*arguments)

    def _first_product(self, *arguments: Any) -> torch.Tensor:
        self.product = product.choice(*arguments)
        return self.product(*arguments)

    def _first_addition(self, *arguments: Any) -> None:
        self.add_product_ = add_product_.choice(*arguments)
        self.add_product_(*arguments)


class _Operations(LinearProducts):
    """The operations, which choose in each call."""

    __slots__ = ()

    def __init__(self) -> None:
        self.affine = affine
        self.product = product
        self.add_product_ = add_product_


UNBOUND: LinearProducts = _Operations()


def bound_products() -> LinearProducts:
    """Return products for inputs of one shape. While calls are recorded, each call must choose."""
    return UNBOUND if CHOICES.number is None else LinearProducts()


class LayerProducts:
    """The products of a layer, for the shape and the dtype of its last input."""

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
