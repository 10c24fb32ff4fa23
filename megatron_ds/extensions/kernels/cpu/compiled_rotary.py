"""Rotary position embedding of one tensor, or of packed queries, keys and values while they are split, compiled from
csrc/elementwise/rotary.cpp: an optional extension. Bits are those of torch's operations.
"""

import functools
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from ....host import load_compiled
from ....host.autograd_functions import differentiable_once, direct_apply
from ....host.valueless_tensor import ValuelessTensor
from ....ops import rotary as ops_rotary
from ....ops.kernel_table import CPU

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)
# the direction of the rotation
FORWARD = 1.0
BACKWARD = -1.0


@functools.cache
def extension() -> ModuleType | Any:
    """Return the compiled rotation; None, with one line in the log, where the package was installed without a
    compiler."""
    return load_compiled(
        "_rotary",
        "rotary positions",
        "torch's operations run instead, slower on CPU",
        logger,
    )


def suits(x: torch.Tensor, *_: object) -> bool:
    """Return whether the functions below take heads x [.., d]."""
    return x.shape[-1] <= extension().MOST_CHANNELS


def rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """x [s, b, n, d], any strides, turned by tables fp32 [s, 1 or b, 1, r/2] → contiguous, of the same dtype."""
    return _rotate(x, cos, sin, interleaved)


def split_rotary(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv [s, b, g, n/g + 2, d] → turned q [s, b, n, d] and k [s, b, g, d], and v [s, b, g, d], contiguous.

    Nothing of qkv is kept: what attention keeps are the three results.
    """
    return _split_and_rotate(qkv, cos, sin, interleaved)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotated(x, cos, sin, interleaved, FORWARD)

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        dx = _rotated(dy, *ctx.saved_tensors, ctx.interleaved, BACKWARD)
        return dx, None, None, None


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        s, b, g, slots, d = qkv.shape
        q = qkv.new_empty(s, b, g * (slots - 2), d)
        k = qkv.new_empty(s, b, g, d)
        v = torch.empty_like(k)
        _move(False, qkv, (q, k, v), cos, sin, interleaved, FORWARD)
        return q, k, v

    @staticmethod
    @differentiable_once
    def backward(ctx, *gradients):
        dq, dk, _ = gradients
        s, b, g, d = dk.shape
        packed = dq.new_empty(s, b, g, dq.shape[2] // g + 2, d)
        _move(True, packed, gradients, *ctx.saved_tensors, ctx.interleaved, BACKWARD)
        return packed, None, None, None


_rotate = direct_apply(_Rotate)
_split_and_rotate = direct_apply(_SplitAndRotate)


def _rotated(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    direction: float,
) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # One group of heads that are all turned.
    _move(False, x.unsqueeze(2), (y,), cos, sin, interleaved, direction)
    return y


def _move(
    to_packed: bool,
    packed: torch.Tensor,
    parts: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    direction: float,
) -> None:
    """packed [s, b, g, slots, d] ↔ parts: q, k, v, or a tensor of all slots. A plan's tensors have no memory, and
    nothing is computed."""
    if isinstance(packed, ValuelessTensor) or not packed.numel():
        return
    s, b, groups, slots, d = packed.shape
    # The kernel wants contiguous channels, and heads of all groups at one distance.
    packed = _with_rows(packed)
    if groups > 1 and packed.stride(2) != slots * packed.stride(3):
        packed = packed.contiguous()
    parts = [_with_rows(t) for t in parts]
    cos = cos.contiguous()
    sin = sin.contiguous()
    places = [_place(t, 2) for t in parts]
    extension().rotate(
        _place(packed, 3),
        places + [places[0]] * (3 - len(places)),
        (cos.data_ptr(), sin.data_ptr()),
        (cos.stride(0), cos.stride(1) if cos.shape[1] > 1 else 0),
        (s, b, groups, slots, parts[0].shape[2] // groups, d, cos.shape[-1]),
        interleaved,
        to_packed,
        direction,
        packed.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )


def _with_rows(t: torch.Tensor) -> torch.Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _place(t: torch.Tensor, heads: int) -> tuple[int, int, int, int]:
    """Address, and the strides of positions, samples and heads, which are in dimension `heads`."""
    return t.data_ptr(), t.stride(0), t.stride(1), t.stride(heads)


_LIMITS = {
    "devices": CPU,
    "dtypes": DTYPES,
    "suits": suits,
    "available": lambda: "" if extension() else "not compiled",
}
ops_rotary.apply_rotary.kernel("c++", **_LIMITS)(rotary)
ops_rotary.split_rotary.kernel("c++", **_LIMITS)(split_rotary)
