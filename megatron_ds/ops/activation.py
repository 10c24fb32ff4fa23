"""Activations of the feed-forward block, by name.

A gated activation takes [.., 2f], the halves being [gate; up], and returns [.., f].
`gelu` is the tanh approximation, as in Megatron's fused kernel and GPT-2; `gelu_exact` the one with erf.

Implementations: `gelu` and `swiglu` on a CPU are compiled.
`squared_relu` and `swiglu` are one launch each on GPUs, else torch's operations with a
backward of our own, which keeps less.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from ..host.autograd_functions import Halves
from .kernel_table import Bound, Operation, random_tensors

LIMIT = 7.0  # of the parts of `clamped_swiglu`
SLOPE = 1.702  # of its sigmoid


@dataclass(frozen=True)
class Activation:
    """An activation function of a feed-forward layer.

    parts  equal parts into which it splits the output of the first linear layer: 2 if it is gated, else 1
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    parts: int = 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)

    def bound(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function for one layer."""
        if isinstance(self.function, Operation):
            return Bound(self.function)
        return self.function


_gelu = partial(F.gelu, approximate="tanh")
_gelu_backward = partial(torch.ops.aten.gelu_backward.default, approximate="tanh")


@Operation
@Halves(_gelu, _gelu_backward).of
def gelu(x: torch.Tensor) -> torch.Tensor:
    """0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³))). Hendrycks & Gimpel 2016 (arXiv:1606.08415), section 2."""
    return _gelu(x)


def gelu_exact(x: torch.Tensor) -> torch.Tensor:
    """x Φ(x), Φ the normal distribution function."""
    return F.gelu(x)


def relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)."""
    return F.relu(x)


@Operation
def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)². So et al. 2021 (arXiv:2109.08668), section 4.1."""
    return _SquaredReLU.apply(x)


@Operation
def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for x = [gate; up] in the last dimension. Shazeer 2020 (arXiv:2002.05202), eq. 6."""
    if torch.compiler.is_compiling():  # which does not trace writing to strided halves
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
    return _SwiGLU.apply(x)


@Operation
def geglu(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up for x = [gate; up], gelu as above. Shazeer 2020 (arXiv:2002.05202), eq. 6."""
    if torch.compiler.is_compiling():
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up
    return _GeGLU.apply(x)


@Operation
def clamped_swiglu(x: torch.Tensor) -> torch.Tensor:
    """gate σ(1.702 gate) * (up + 1) for x = [gate; up], gate at most 7 and up within ±7 (OpenAI 2025, gpt-oss,
    arXiv:2508.10925, section 2.2)."""
    if torch.compiler.is_compiling():
        gate, up = _clamped(x)
        return gate * torch.sigmoid(SLOPE * gate) * (up + 1)
    return _ClampedSwiGLU.apply(x)


def _clamped(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = x.chunk(2, dim=-1)
    return gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)


ACTIVATIONS = {
    "gelu": Activation(gelu),
    "gelu_exact": Activation(gelu_exact),
    "relu": Activation(relu),
    "squared_relu": Activation(squared_relu),
    "swiglu": Activation(swiglu, parts=2),
    "geglu": Activation(geglu, parts=2),
    "clamped_swiglu": Activation(clamped_swiglu, parts=2),
}


for _activation in (gelu, squared_relu, swiglu, geglu, clamped_swiglu):
    _activation.example(
        lambda rows, width, dtype, device: tuple(
            random_tensors(dtype, device, (rows, 2 * width))
        )
    )


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


class _GeGLU(torch.autograd.Function):
    # Keeps x only, as `_SwiGLU`.

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        dgate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
        dup = F.gelu(gate, approximate="tanh").mul_(grad)
        return torch.cat((dgate, dup), dim=-1)


class _ClampedSwiGLU(torch.autograd.Function):
    # Keeps x only. With σ = sigmoid(a g):   d(g σ)/dg = σ (1 + a g (1 - σ)).

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = _clamped(x)
        return torch.sigmoid(SLOPE * gate).mul_(gate).mul_(up.add_(1))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        gate, up = _clamped(x)
        share = torch.sigmoid(SLOPE * gate)
        dup = share * gate * grad
        dgate = (1 - share).mul_(gate).mul_(SLOPE).add_(1).mul_(share)
        dgate.mul_(up.add_(1)).mul_(grad)
        # Where a part was clamped, it has no gradient.
        return torch.cat((dgate, dup), dim=-1).masked_fill_(_is_clamped(x), 0.0)


def _is_clamped(x: torch.Tensor) -> torch.Tensor:
    """bool, like x = [gate; up]."""
    gate, up = x.chunk(2, dim=-1)
    return torch.cat((gate > LIMIT, up.abs() > LIMIT), dim=-1)
