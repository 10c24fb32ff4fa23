"""`LinearProducts`: the three products of a linear layer.

    forward     y = x Wᵀ + b
    backward    dx = dy W,  dW += dyᵀ x
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from .kernel_table import Bound
from .product import add_product_, affine, product


class LinearProducts(NamedTuple):
    """Functions with the arguments of the operations of `ops.product` that have their names."""

    affine: Callable[..., Any]
    product: Callable[..., Any]
    add_product_: Callable[..., Any]


def bound_products() -> LinearProducts:
    """Return the products of a layer, whose matrices are contiguous and of which only the number of rows changes."""
    # The sum has the shape of the weight; its first factor dyᵀ has the rows.
    return LinearProducts(Bound(affine), Bound(product), Bound(add_product_, by=1))


# The operations themselves, which choose in each call.
UNBOUND = LinearProducts(affine, product, add_product_)
