"""Contributions to the gradients of parameters, as layers and optimizers make them."""

import torch

from megatron_ds.mpu.managed_parameter import (
    GradientAccumulator,
    TensorAccumulator,
    is_accumulated,
    made_grads,
)


def accumulator_of(parameter) -> GradientAccumulator:
    return made_grads(parameter).accumulator


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
    made_grads(parameter).accumulator = TensorAccumulator(total, completed)


def accumulated(parameter) -> torch.Tensor | None:
    """The sum of its accumulator, or what autograd has accumulated."""
    if is_accumulated(parameter):
        return accumulator_of(parameter).view()
    return parameter.grad
