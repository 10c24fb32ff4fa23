"""LayerNorm and RMSNorm over the last dimension, computed in fp32 for every dtype of x.

Implementations: on GPUs, and for bf16 on CPUs, one pass over memory for the addition of a residual and the
norm. Else torch's, but for RMSNorm on a CPU, which is a dozen of
its operations: `_RMSNorm` takes a third of the time.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..host.autograd_functions import Halves, halves_of
from ..mpu.context import new_parameter
from ..mpu.param_spec import Init, ParamSpec
from .kernel_table import CPU, FLOATS, Bound, Operation, random_tensors


class Norm(nn.Module):
    """A norm of the last dimension."""

    is_centred: bool
    has_bias: bool
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden: int,
        *,
        name: str,
        eps: float = 1e-5,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        partial_over: tuple[str, ...] = (),
        decay: bool = False,
        zero_centred: bool = False,
    ):
        """partial_over: ("tp",) if x is a slice of the sequence, or some of the heads; see `ParamSpec`.

        decay: weight decay applies. zero_centred: `weight` is the factor minus one.
        """
        super().__init__()
        self.eps = eps
        self.offset = 1.0 if zero_centred else 0.0
        make = lambda leaf, init: new_parameter(
            ParamSpec(
                f"{name}.{leaf}",
                (hidden,),
                Init(init),
                partial_over=partial_over,
                decay=decay,
            ),
            dtype=dtype,
            device=device,
        )
        self.weight = make("weight", "zeros" if zero_centred else "ones")
        bias = make("bias", "zeros") if self.has_bias else None
        self.register_parameter("bias", bias)
        self.norm = Bound(layer_norm if self.is_centred else rms_norm)
        self.residual_norm = Bound(residual_norm)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x [.., hidden] → its shape and dtype. With a residual like x: norm(x + residual) and the sum."""
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if self.offset:
            weight = weight + self.offset
        if self.is_centred and bias is None:
            bias = torch.zeros_like(weight, requires_grad=False)
        if residual is not None:
            return self.residual_norm(x, residual, weight, bias, self.eps)
        if self.is_centred:
            return self.norm(x, weight, bias, self.eps)
        return self.norm(x, weight, self.eps)

    def halves(self, x: torch.Tensor, adds: bool) -> Halves | None:
        """Return the halves of what computes the norm of x [.., hidden], or if it `adds`, of its sum with a
        residual, as `layer_norm_rows` and `layer_norm_gradients`. None where there are none."""
        weight = self.weight
        bias = self.bias
        if self.offset or (self.is_centred and bias is None):
            return None
        if adds:
            chosen = self.residual_norm.chosen(x, x, weight, bias, self.eps)
        elif self.is_centred:
            chosen = self.norm.chosen(x, weight, bias, self.eps)
        else:
            chosen = self.norm.chosen(x, weight, self.eps)
        found = halves_of(chosen)
        return found if self.is_centred or found is not _LAYER_NORM else None


class LayerNorm(Norm):
    """(x - mean) / sqrt(var + eps) * weight + bias. Ba et al. 2016 (arXiv:1607.06450)."""

    is_centred = True
    has_bias = True


class UnbiasedLayerNorm(LayerNorm):
    """(x - mean) / sqrt(var + eps) * weight."""

    has_bias = False


class RMSNorm(Norm):
    """x / sqrt(mean(x²) + eps) * weight. Zhang & Sennrich 2019 (arXiv:1910.07467), equation 4."""

    is_centred = False
    has_bias = False


NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def layer_norm_rows(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """x [.., hidden] → the norm of the sum with the residual, and (sum, mean, rstd), which the gradients need."""
    total = x if residual is None else residual + x
    y, mean, rstd = torch.native_layer_norm(total, weight.shape, weight, bias, eps)
    return y, total, mean, rstd


def layer_norm_gradients(
    dy: torch.Tensor,
    past: torch.Tensor | None,
    total: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    parameters: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the sum, the weight and the bias. past: the gradient of the sum from elsewhere."""
    weight, bias = parameters
    dx, dw, db = _layer_norm_backward(
        dy, total, weight.shape, mean, rstd, weight, bias, (True, True, True)
    )
    return dx if past is None else dx.add_(past), dw, db


_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
_LAYER_NORM = Halves(layer_norm_rows, layer_norm_gradients)


@Operation
@_LAYER_NORM.of
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """x [.., hidden] → the same shape and dtype."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


@Operation
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [.., hidden] → the same shape and dtype."""
    if x.is_meta:  # like torch's GPU kernel, `_RMSNorm` keeps x and one number a row
        return _RMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


@Operation
def residual_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), both [.., hidden] as x: LayerNorm with a bias, RMSNorm without."""
    total = residual + x
    if bias is None:
        return rms_norm(total, weight, eps), total
    return layer_norm(total, weight, bias, eps), total


_LAYER_NORM.of(residual_norm.in_torch)


@residual_norm.example
def _residual_norm_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    return (
        *random_tensors(
            dtype, device, (rows, width), (rows, width), (width,), (width,)
        ),
        1e-5,
    )


@residual_norm.example
def _residual_rms_norm_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    return (
        *random_tensors(dtype, device, (rows, width), (rows, width), (width,)),
        None,
        1e-5,
    )


@layer_norm.example
def _layer_norm_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    return (*random_tensors(dtype, device, (rows, width), (width,), (width,)), 1e-5)


@rms_norm.example
def _rms_norm_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    return (*random_tensors(dtype, device, (rows, width), (width,)), 1e-5)


@rms_norm.implementation("four passes", devices=CPU, dtypes=FLOATS)
def _rms_norm_on_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    # With n = x r, r = 1 / sqrt(mean(x²) + eps):   y = n w,   dw = Σ dy n,   dx = r (dy w - n mean(dy w n)).

    @staticmethod
    def forward(ctx, x, weight, eps):
        r = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, weight, r = ctx.saved_tensors
        n = x * r
        dyn = dy * n
        dw = (
            dyn.reshape(-1, dyn.shape[-1]).sum(0).to(weight.dtype)
            if ctx.needs_input_grad[1]
            else None
        )
        dx = None
        if ctx.needs_input_grad[0]:
            mean = dyn.matmul(weight.to(dyn.dtype)).div_(-x.shape[-1]).unsqueeze(-1)
            dx = n.mul_(mean).addcmul_(dy, weight).mul_(r).to(x.dtype)
        return dx, dw, None


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """fp32 [.., 1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def reference_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """LayerNorm in elementary operations."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float() + bias.float()).to(x.dtype)


def reference_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm in elementary operations."""
    wide = x.float()
    return (
        wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    ).to(x.dtype)
