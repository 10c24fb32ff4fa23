"""LayerNorm and RMSNorm over the last dimension. Computed in fp32 inside, whatever the dtype of x."""

import torch
import torch.nn.functional as F
from torch import nn

from ..mpu.param_spec import Init, ParamSpec
from .parameter import new_parameter


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias. Ba et al. 2016 (arXiv:1607.06450)."""

    def __init__(self, hidden: int, *, name: str, eps: float = 1e-5, dtype: torch.dtype = torch.float32, device=None,
                 partial_grad: bool = False):
        """`partial_grad`: x is this rank's slice of the sequence, so gradients are partial sums over tp."""
        super().__init__()
        self.eps = eps
        make = lambda leaf, init: new_parameter(
            ParamSpec(f"{name}.{leaf}", (hidden,), Init(init), partial_grad=partial_grad, decay=False),
            dtype=dtype, device=device)
        self.weight = make("weight", "ones")
        self.bias = make("bias", "zeros")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight. Zhang & Sennrich 2019 (arXiv:1910.07467), equation 4."""

    def __init__(self, hidden: int, *, name: str, eps: float = 1e-5, dtype: torch.dtype = torch.float32, device=None,
                 partial_grad: bool = False):
        """`partial_grad`: x is this rank's slice of the sequence, so the gradient is a partial sum over tp."""
        super().__init__()
        self.eps = eps
        spec = ParamSpec(f"{name}.weight", (hidden,), Init("ones"), partial_grad=partial_grad, decay=False)
        self.weight = new_parameter(spec, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def reference_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float() + bias.float()).to(x.dtype)


def reference_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
