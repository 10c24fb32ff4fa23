"""Activations of the feed-forward block, by name.

A gated activation takes [.., 2f], the halves being [gate; up], and returns [.., f].
`gelu` is the tanh approximation, as in Megatron's fused kernel and GPT-2; `gelu_exact` the one with erf.

Implementations: on CPU `gelu` is csrc/gelu.cpp, an optional extension which takes a third of torch's time;
everywhere else torch's kernels. `squared_relu` and `swiglu` are torch operations with a backward of our own,
which keeps less; they run on any device.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from ..host import load_compiled
from .product import has_memory

logger = logging.getLogger(__name__)

COMPILED_DTYPES = (torch.float32, torch.bfloat16)       # of the extension


@dataclass(frozen=True)
class Activation:
    """An activation function of a feed-forward layer.

    parts  equal parts into which it splits the output of the first linear layer: 2 if it is gated, else 1
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    parts: int = 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³))). Hendrycks & Gimpel 2016 (arXiv:1606.08415), section 2.
    """
    if x.device.type == "cpu" and x.dtype in COMPILED_DTYPES and has_memory(x) and extension():
        return _FastGELU.apply(x)
    return reference_gelu(x)


def reference_gelu(x: torch.Tensor) -> torch.Tensor:
    """`gelu` as torch computes it."""
    return F.gelu(x, approximate="tanh")


def gelu_exact(x: torch.Tensor) -> torch.Tensor:
    """x Φ(x), Φ the normal distribution function."""
    return F.gelu(x)


def relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)."""
    return F.relu(x)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)². So et al. 2021 (arXiv:2109.08668), section 4.1."""
    return _SquaredReLU.apply(x)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for x = [gate; up] in the last dimension. Shazeer 2020 (arXiv:2002.05202), eq. 6."""
    return _SwiGLU.apply(x)


ACTIVATIONS = {"gelu": Activation(gelu), "gelu_exact": Activation(gelu_exact), "relu": Activation(relu),
               "squared_relu": Activation(squared_relu), "swiglu": Activation(swiglu, parts=2)}


@functools.cache
def extension() -> ModuleType | Any:
    """The compiled GELU; None, with one line in the log, where the package was installed without a compiler.
    """
    return load_compiled("_gelu", "GELU", "torch's runs instead, three times slower on CPU", logger)


class _FastGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        extension().forward(x.data_ptr(), y.data_ptr(), x.numel(), x.dtype == torch.bfloat16,
                            torch.get_num_threads())
        return y

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dy, dx = dy.contiguous(), torch.empty_like(x)
        extension().backward(x.data_ptr(), dy.data_ptr(), dx.data_ptr(), x.numel(), x.dtype == torch.bfloat16,
                             torch.get_num_threads())
        return dx


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        positive = x.relu()
        ctx.save_for_backward(positive)
        return positive.square()

    @staticmethod
    def backward(ctx, grad):
        (positive,) = ctx.saved_tensors
        return (grad * positive).mul_(2)


class _SwiGLU(torch.autograd.Function):
    # Keeps x only; autograd would keep silu(gate) too. The sigmoid is recomputed in backward.

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=dup)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=dgate)
        return dx
