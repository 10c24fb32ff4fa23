"""Contributions to the gradients of parameters, as layers and optimizers make them."""

import torch

from megatron_ds.mpu.managed_parameter import (
    TensorAccumulator,
    accumulate,
    accumulator_of,
)


def taken(parameter) -> torch.Tensor:
    """The sum, which is zero if nothing was added to it yet."""
    clear = lambda total, overwrites: total.zero_() if overwrites else total
    accumulator_of(parameter).write(clear)
    return accumulator_of(parameter).view()


def contribute(parameter, gradient) -> None:
    """Add a tensor or a number to the sum, and count it."""
    taken(parameter).add_(gradient)
    accumulator_of(parameter).ready()


def install(parameter, total, completed=lambda: None) -> None:
    """Give a parameter an accumulator, as ZeRO does, that calls `completed` after each contribution."""
    accumulate(parameter, TensorAccumulator(total, completed))


def accumulated(parameter) -> torch.Tensor | None:
    """The sum of its accumulator, or what autograd has accumulated."""
    accumulator = accumulator_of(parameter)
    return parameter.grad if accumulator is None else accumulator.view()
