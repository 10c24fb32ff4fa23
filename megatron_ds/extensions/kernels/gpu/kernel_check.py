"""Compares an implementation of an operation with torch's operations in double precision: in tests, and once
when a GPU kernel is first compiled for a device.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ....ops.kernel_table import Implementation, Operation

# Of the largest expected value: two roundings of a 16-bit result; sums of a few hundred products in fp32.
TOLERANCES = {
    torch.float32: 4e-6,
    torch.bfloat16: 2 * 2**-8,
    torch.float16: 2 * 2**-11,
}


def largest_error(
    operation: Operation,
    implementation: Implementation,
    rows: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Largest error of results, gradients and tensors changed in place, over that dtype's tolerance.

    Over the operation's examples of this size; the implementation is right if it is at most 1. NaN counts as
    infinite. Shapes and dtypes must be equal, too.
    """
    return max(
        error_between(
            implementation.function,
            operation.in_torch,
            partial(make, rows, width, dtype, device),
        )
        for make in operation.examples
    )


def error_between(
    function: Callable[..., Any],
    in_torch: Callable[..., Any],
    make: Callable[[], tuple],
) -> float:
    """`largest_error` of a function for the arguments that `make` returns, which `in_torch` has in double
    precision."""
    # Two equal examples, since a function may change its arguments.
    example = [make() for _ in range(2)]
    got = _values(function, example[0])
    expected = _values(in_torch, tree_map(_wide, example[1]))
    assert len(got) == len(expected), (function, in_torch)
    return max((tensor_error(g, e) for g, e in zip(got, expected)), default=0.0)


def _wide(argument: Any) -> Any:
    """Return a tensor of a tested dtype in double precision; anything else as it is."""
    if not isinstance(argument, torch.Tensor) or argument.dtype not in TOLERANCES:
        return argument
    return argument.detach().double().requires_grad_(argument.requires_grad)


def _values(function: Any, arguments: Sequence[Any]) -> list[torch.Tensor]:
    """Results, the arguments after the call, and gradients of the sum of results with fixed weights."""
    made = function(*arguments)
    if not isinstance(made, tuple):
        made = (made,)
    # The tensors among the results.
    results = [t for t in made if isinstance(t, torch.Tensor)]
    # Gradients of those arguments that need them.
    tensors = [a for a in tree_leaves(arguments) if isinstance(a, torch.Tensor)]
    leaves = [a for a in tensors if a.requires_grad]
    differentiable = [t for t in results if t.requires_grad]
    gradients: tuple[torch.Tensor | None, ...] = ()
    if leaves and differentiable:
        weights = [_weights(t) for t in differentiable]
        gradients = torch.autograd.grad(
            differentiable, leaves, weights, allow_unused=True
        )
    changed = [a for a in tensors if not a.requires_grad]
    return [t.detach() for t in (*results, *changed, *gradients) if t is not None]


def _weights(t: torch.Tensor) -> torch.Tensor:
    """Fixed numbers that every dtype represents exactly."""
    numbers = torch.arange(t.numel(), device=t.device) % 7 - 3
    return (numbers / 4).to(t.dtype).view(t.shape)


def tensor_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected number, in tolerances of the dtype of `got`."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    if not got.is_floating_point():
        return 0.0 if torch.equal(got, expected) else float("inf")
    if not got.numel():
        return 0.0
    # The largest difference, over the largest expected value; NaN is infinite.
    largest = expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    difference = (got.double() - expected.double()).abs().max()
    error = (difference / largest).item() / TOLERANCES[got.dtype]
    return error if error == error else float("inf")
