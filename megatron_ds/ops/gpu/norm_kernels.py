"""LayerNorm and RMSNorm with an optional residual addition, forward and backward: csrc/gpu/norm.cu."""

import torch

from .gpu_kernel import GpuKernel, type_name

EXAMPLES = [("bf16", 4096, 256, True, True), ("float", 1000, 128, False, False)]
FORWARD = GpuKernel("norm.cu", "norm_forward", "ptr ptr ptr ptr ptr ptr ptr ptr f32", EXAMPLES)
BACKWARD = GpuKernel("norm.cu", "norm_backward", "ptr ptr ptr ptr ptr ptr ptr ptr ptr i32", EXAMPLES)


def fits(x: torch.Tensor, weight: torch.Tensor, *_: object) -> str:
    """"" if the kernels take rows like those of x."""
    if x.shape[-1] % (16 // x.element_size()):
        return f"rows of {x.shape[-1]} elements are not a multiple of 16 bytes"
    return ""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [.., hidden] → x / sqrt(mean(x²) + eps) * weight, of the same shape and dtype."""
    return _Norm.apply(x, weight, eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rows = x.numel() // x.shape[-1]
        x = x.contiguous()
        y, rstd = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
        threads = _threads(x)
        FORWARD((type_name(x), x.shape[-1], threads, True, False), rows, threads,
                x, None, weight, None, None, y, None, rstd, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        rows, threads = len(rstd), _threads(x)
        blocks = min(rows, 3)
        dx = torch.empty_like(x)
        dws = x.new_empty(blocks, x.shape[-1], dtype=torch.float32)
        BACKWARD((type_name(x), x.shape[-1], threads, True, False), blocks, threads,
                 dy.contiguous(), None, x, weight, None, rstd, dx, dws, None, rows)
        return dx, dws.sum(0).to(weight.dtype), None


def _threads(x: torch.Tensor) -> int:
    """A thread has two packets of 16 bytes of a row."""
    packets = -(-x.shape[-1] * x.element_size() // 16)
    return min(1024, max(32, -(-packets // 64) * 32))
