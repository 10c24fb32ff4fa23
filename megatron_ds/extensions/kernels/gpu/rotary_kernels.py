"""Rotary position embedding of one tensor, or of packed queries, keys and values while they are split:
csrc/gpu/rotary.cu.
"""

from typing import Literal

import torch

from ....host.autograd_functions import differentiable_once, direct_apply
from ....ops import rotary as ops_rotary
from ....ops.kernel_table import FLOATS, GPU
from .gpu_kernel import GpuKernel, type_name
from .packets import rows_together, vector_width

KERNEL = GpuKernel(
    "rotary.cu",
    "rotary",
    " ".join(["ptr"] * 6 + ["i64"] * 14 + ["i32"] * 5 + ["f32"]),
    examples=[
        ("bf16", 8, False),
        ("bf16", 8, True),
        ("fp16", 8, True),
        ("float", 4, False),
    ],
)
THREADS = 256  # of a block, about
# threads of a block; blocks in the grid's second dimension
MOST_CHANNELS = 512
MOST_SAMPLES = 65535
# the direction of the rotation
FORWARD = 1.0
BACKWARD = -1.0


def fits(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> str:
    """ "" if the kernel takes x [s, b, .., d], else the reason."""
    if interleaved:
        return "pairs are neighbouring channels"
    if x.shape[-1] - cos.shape[-1] > MOST_CHANNELS:
        return f"heads of {x.shape[-1]} channels are longer than {MOST_CHANNELS} and those turned in pairs"
    if x.shape[1] > MOST_SAMPLES:
        return f"{x.shape[1]} samples are more than {MOST_SAMPLES}"
    return ""


def rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: Literal[False] = False,
) -> torch.Tensor:
    """x [s, b, n, d], any strides, turned by tables [s, 1 or b, 1, r/2] → contiguous, of the same dtype."""
    return _rotate(x, cos, sin)


def split_rotary(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: Literal[False] = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv [s, b, g, n/g + 2, d] → turned q [s, b, n, d] and k [s, b, g, d], and v [s, b, g, d], contiguous.

    Nothing of qkv is kept: what attention keeps are the three results.
    """
    return _split_and_rotate(qkv, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, FORWARD)

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        return _rotated(dy, *ctx.saved_tensors, BACKWARD), None, None


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin):
        ctx.save_for_backward(cos, sin)
        s, b, g, slots, d = qkv.shape
        q = qkv.new_empty(s, b, g * (slots - 2), d)
        k = qkv.new_empty(s, b, g, d)
        v = torch.empty_like(k)
        _launch(False, qkv, (q, k, v), cos, sin, FORWARD)
        return q, k, v

    @staticmethod
    @differentiable_once
    def backward(ctx, *gradients):
        cos, sin = ctx.saved_tensors
        dq, dk, dv = map(rows_together, gradients)
        s, b, g, d = dk.shape
        packed = dq.new_empty(s, b, g, dq.shape[2] // g + 2, d)
        _launch(True, packed, (dq, dk, dv), cos, sin, BACKWARD)
        return packed, None, None


_rotate = direct_apply(_Rotate)
_split_and_rotate = direct_apply(_SplitAndRotate)


def _rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: float
) -> torch.Tensor:
    x = rows_together(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(
        False, x.unsqueeze(2), (y,), cos, sin, direction
    )  # one group of heads that are all turned
    return y


def _launch(
    to_packed: bool,
    packed: torch.Tensor,
    parts: tuple[torch.Tensor, ...],
    cos: torch.Tensor,
    sin: torch.Tensor,
    direction: float,
) -> None:
    """packed [s, b, g, slots, d] ↔ parts: q, k, v, or a tensor of all slots."""
    s, b, groups, slots, d = packed.shape
    packed = rows_together(packed)
    if groups > 1 and packed.stride(2) != slots * packed.stride(3):
        packed = packed.contiguous()
    half = cos.shape[-1]
    queries = parts[0].shape[2] // groups
    width = vector_width([half, d - 2 * half], packed, *parts)
    cos = cos.contiguous()
    sin = sin.contiguous()
    if vector_width([half], cos, sin) < min(width, 4):
        # at an aligned address
        cos = cos.clone()
        sin = sin.clone()
    units = (d - half) // width  # of a head, one a thread
    strides = [n for t in parts for n in t.stride()[:3]]
    at_once = max(1, min(groups * slots, THREADS // units))
    KERNEL(
        (type_name(packed), width, to_packed),
        (s, b),
        units * at_once,
        packed,
        *parts,
        *[None] * (3 - len(parts)),
        cos,
        sin,
        packed.stride(0),
        packed.stride(1),
        packed.stride(3),
        *strides,
        *[0] * (9 - len(strides)),
        cos.stride(0),
        cos.stride(1) if cos.shape[1] > 1 else 0,
        groups,
        slots,
        queries,
        d,
        half,
        direction,
    )


_LIMITS = {"devices": GPU, "dtypes": FLOATS, "fits": fits}
ops_rotary.apply_rotary.kernel("cuda", **_LIMITS)(rotary)
ops_rotary.split_rotary.kernel("cuda", **_LIMITS)(split_rotary)
