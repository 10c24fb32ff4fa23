"""`CallWork`: what one call computes, as far as its time depends on it; and `Watcher`, which receives it.

A plan runs the layers on tensors without values and adds up their work. Operations of torch are seen as they are
called. What a kernel computes cannot be seen, as it only allocates its results there, so an operation with kernels
states its work beside them:

    @attention.states_work(backward=_backward_work)
    def _forward_work(q, k, v, ...): return CallWork(...)

Without a statement a call reads its tensors and writes one like the first, and its backward moves twice as much.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch


class Product(NamedTuple):
    """`number` products [rows, inner] [inner, columns]."""

    number: float
    rows: int
    columns: int
    inner: int

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.number * self.rows * self.columns * self.inner


@dataclass(frozen=True)
class CallWork:
    """Arithmetic and memory traffic of one call.

    products  of matrices
    scores    FLOPs of attention: products of queries and keys, and of probabilities and values
    nbytes    read and written
    dtype     of the factors
    """

    products: tuple[Product, ...] = ()
    scores: float = 0.0
    nbytes: float = 0.0
    dtype: torch.dtype = torch.float32

    @property
    def flops(self) -> float:
        """FLOPs of products and of attention; what is done to each element does not count."""
        return sum(product.flops for product in self.products) + self.scores

    def times(self, factor: float) -> "CallWork":
        """Return the work of so many such calls."""
        products = (
            product._replace(number=product.number * factor)
            for product in self.products
        )
        return CallWork(
            tuple(products), self.scores * factor, self.nbytes * factor, self.dtype
        )


Stated = Callable[..., CallWork]
"""(arguments of an operation) → the work of a call"""


class Watcher(Protocol):
    """Receives the work of calls whose arithmetic no operation of torch shows."""

    def called(self, name: str, implementation: str, work: CallWork) -> None:
        """A call, in the order of the calls."""

    def will_differentiate(
        self, name: str, implementation: str, work: CallWork
    ) -> None:
        """A call whose backward will have this work."""

    def repeats(self, factor: float) -> None:
        """Each call from now on stands for so many."""

    def recomputation_contexts(self) -> tuple[Any, Any]:
        """Return the contexts of a forward and of its recomputation, whose calls have no backward of their own."""


WATCHERS: list[Watcher] = []


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Pass the work of all calls within the context to `watcher`."""
    WATCHERS.append(watcher)
    try:
        yield
    finally:
        WATCHERS.remove(watcher)


@contextmanager
def each_stands_for(factor: float) -> Iterator[None]:
    """Each call within the context stands for `factor` calls, as the longest of several runs does for all."""
    for watcher in WATCHERS:
        watcher.repeats(factor)
    try:
        yield
    finally:
        for watcher in WATCHERS:
            watcher.repeats(1.0)


def report(name: str, implementation: str, work: CallWork) -> None:
    """Pass a call that is no call of an `Operation` to the watchers."""
    for watcher in WATCHERS:
        watcher.called(name, implementation, work)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments, those in lists and tuples as well."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes that a kernel moves for a tensor: a dimension that is expanded is read once."""
    sizes = (
        size
        for size, stride in zip(tensor.shape, tensor.stride())
        if stride or not size
    )
    return math.prod(sizes) * tensor.element_size()


def moves(*arguments: Any, **named: Any) -> CallWork:
    """Return the work of a call that reads its tensors and writes one like the first."""
    given = list(tensors_in((*arguments, *named.values())))
    written = given[0].numel() * given[0].element_size()
    return CallWork(nbytes=written + sum(map(bytes_of, given)), dtype=given[0].dtype)


def is_differentiated(arguments: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return whether autograd records a call of these arguments."""
    return torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in tensors_in((*arguments, *named.values()))
    )


def product_work(a: torch.Tensor, b: torch.Tensor) -> CallWork:
    """Return the work of a product of matrices [n, k] and [k, m]."""
    rows, inner = a.shape
    columns = b.shape[1]
    moved = (rows * inner + inner * columns + rows * columns) * a.element_size()
    return CallWork((Product(1, rows, columns, inner),), nbytes=moved, dtype=a.dtype)
