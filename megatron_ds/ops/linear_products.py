"""`LinearProducts`: the three products of one linear layer, each with the implementation for its shapes.

    forward     y = x Wᵀ + b
    backward    dx = dy W,  dW += dyᵀ x

A layer computes them again and again for as many rows. It holds a `ProductsOfLayer`, which chooses once for a
number of rows: a call of a product is then a call of the function that computes it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from .kernel_table import Operation
from .product import add_product_, affine, product


class LinearProducts:
    """Functions with the arguments of the operations of `ops.product` that have their names.

    affine, product, add_product_   the implementations for the arguments of their first calls: later ones have
                                    the same shapes, dtypes and strides
    """

    __slots__ = ("affine", "product", "add_product_")

    def __init__(self):
        for operation in (affine, product, add_product_):
            setattr(self, operation.name, partial(self._first_call, operation))

    def _first_call(self, operation: Operation, *arguments: Any) -> Any:
        chosen = operation.choice(*arguments)
        setattr(self, operation.name, chosen)
        return chosen(*arguments)


class _Operations(LinearProducts):
    """The operations, which choose in each call."""

    __slots__ = ()

    def __init__(self):
        self.affine: Callable[..., Any] = affine
        self.product: Callable[..., Any] = product
        self.add_product_: Callable[..., Any] = add_product_


UNBOUND: LinearProducts = _Operations()


class ProductsOfLayer:
    """The products of a layer.

    key  of the last input: its shape, its dtype, and `CHOICES.number`
    now  the products for such an input
    """

    __slots__ = ("key", "now")

    def __init__(self):
        self.key: tuple | None = None
        self.now = UNBOUND

    def __deepcopy__(self, memo: dict) -> "ProductsOfLayer":
        return ProductsOfLayer()

    def chosen(self, key: tuple) -> LinearProducts:
        """Products for an input of another key. While calls are recorded, each call must choose."""
        *_, number = key
        self.now = UNBOUND if number is None else LinearProducts()
        self.key = key
        return self.now
