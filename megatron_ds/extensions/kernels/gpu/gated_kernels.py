"""SwiGLU and squared ReLU, forward and backward; x alone is kept: csrc/gpu/gated.cu."""

import torch

from ....host.autograd_functions import Halves, differentiable_once, direct_apply
from ....ops import activation
from ....ops.kernel_table import FLOATS, GPU
from .gpu_kernel import GpuKernel, type_name
from .packets import common_width, vector_width

THREADS = 256
MOST_PACKETS = 2**31 - 1

EXAMPLES = [("bf16", 8), ("fp16", 8), ("float", 4)]

SWIGLU_FORWARD = GpuKernel("gated.cu", "swiglu_forward", "ptr ptr u32 i32", EXAMPLES)
SWIGLU_BACKWARD = GpuKernel(
    "gated.cu", "swiglu_backward", "ptr ptr ptr u32 i32", EXAMPLES
)
SQUARED_RELU_FORWARD = GpuKernel(
    "gated.cu", "squared_relu_forward", "ptr ptr u32", EXAMPLES
)
SQUARED_RELU_BACKWARD = GpuKernel(
    "gated.cu", "squared_relu_backward", "ptr ptr ptr u32", EXAMPLES
)


def fits_gated(x: torch.Tensor) -> str:
    """ "" if `swiglu` takes x [.., 2f], else the reason."""
    return _too_many(x.numel() // 2 // vector_width([x.shape[-1] // 2], x))


def fits_plain(x: torch.Tensor) -> str:
    """ "" if `squared_relu` takes x, else the reason."""
    return _too_many(x.numel() // vector_width([x.numel()], x))


def _too_many(packets: int) -> str:
    return (
        f"{packets} packets are more than {MOST_PACKETS}"
        if packets > MOST_PACKETS
        else ""
    )


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for x = [gate; up] [.., 2f] → [.., f]. Shazeer 2020 (arXiv:2002.05202), eq. 6."""
    return _swiglu(x)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)², of the shape of x. So et al. 2021 (arXiv:2109.08668), section 4.1."""
    return _squared_relu(x)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        return _swiglu_forward(x)

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return _swiglu_backward(dy, x)


def _swiglu_forward(x: torch.Tensor) -> torch.Tensor:
    """x contiguous."""
    f = x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], f)
    _launch(SWIGLU_FORWARD, f, x, y, f=f)
    return y


def _swiglu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    dx = torch.empty_like(x)
    f = dy.shape[-1]
    _launch(SWIGLU_BACKWARD, f, x, dy.contiguous(), dx, f=f)
    return dx


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        _launch(SQUARED_RELU_FORWARD, x.numel(), x, y)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        (x,), dy = ctx.saved_tensors, dy.contiguous()
        dx = torch.empty_like(x)
        _launch(SQUARED_RELU_BACKWARD, x.numel(), x, dy, dx)
        return dx


_swiglu = direct_apply(_SwiGLU)
_squared_relu = direct_apply(_SquaredReLU)


def _launch(
    kernel: GpuKernel, row: int, *tensors: torch.Tensor, f: int | None = None
) -> None:
    """row: a multiple of the length of a packet. f: of a gated function."""
    width = common_width(row, *tensors)
    packets = tensors[1].numel() // width  # of the result, or of its gradient
    kernel(
        (type_name(tensors[0]), width),
        -(-packets // THREADS),
        THREADS,
        *tensors,
        packets,
        *([] if f is None else [f]),
    )


Halves(_swiglu_forward, _swiglu_backward).of(swiglu)
_LIMITS = {"devices": GPU, "dtypes": FLOATS}
activation.squared_relu.kernel("cuda", fits=fits_plain, **_LIMITS)(squared_relu)
activation.swiglu.kernel("cuda", fits=fits_gated, **_LIMITS)(swiglu)
