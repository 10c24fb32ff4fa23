"""Attention of bf16 tensors compiled from csrc/attention.cpp, for CPUs with AVX-512 BF16 and without AMX.

An optional extension. It keeps no probabilities: backward computes them again from the output and the
log-sum-exp. Tensors are read where they are, with the strides of parts of a packed projection.

With AMX, tiles of which are eight times as fast as vectors, batched products of torch (`blocked_attention`)
are faster.
"""

import functools
import logging
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...host import load_compiled
from ..product import has_memory

logger = logging.getLogger(__name__)

CHANNELS = range(32, 129, 32)           # of a head


@functools.cache
def extension() -> ModuleType | Any:
    """The compiled attention; None, with one line in the log, where the package was installed without a
    compiler."""
    return load_compiled("_attention", "attention in bf16",
                         "torch's products run instead, slower on a CPU with AVX-512 BF16", logger)


def reason_against() -> str:
    """Why this machine has no compiled attention; "" if it has."""
    compiled = extension()
    if compiled is None:
        return "not compiled"
    if not compiled.has_products():
        return "no AVX-512 BF16"
    return "AMX is faster" if compiled.has_tiles() else ""


def suits(q: torch.Tensor, k: torch.Tensor, is_causal: bool) -> bool:
    """Whether the kernel takes bf16 tensors q [sq, b, n, d] and k [sk, b, g, d] without mask."""
    has_rows = q.shape[0] > 1 and k.shape[0] > 0 and q.shape[1] > 0
    return has_rows and q.shape[3] in CHANNELS and (not is_causal or q.shape[0] == k.shape[0])


def compiled_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
                       is_causal: bool) -> torch.Tensor:
    """q [sq, b, n, d], k and v [sk, b, g, d], bf16 on the CPU → [sq, b, n * d]; any strides."""
    return _CompiledAttention.apply(q, k, v, scale, is_causal)


class _CompiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, is_causal):
        q, k, v = (_with_rows(t) for t in (q, k, v))
        if k.untyped_storage()._cdata != v.untyped_storage()._cdata:
            v = v.contiguous()              # else what is kept were the whole projection, for its values
        out, lse = attend(q, k, v, scale, is_causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.is_causal = scale, is_causal
        return out.view(*q.shape[:2], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        return *gradients(q, k, v, out, lse, dout.reshape(q.shape), ctx.scale, ctx.is_causal), None, None


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
           is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """q [sq, b, n, d], k and v [sk, b, g, d] → out [sq, b, n, d] and the log-sum-exp fp32 [b, n, sq]."""
    q, k, v = (_with_rows(t) for t in (q, k, v))
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[1], q.shape[2], q.shape[0], dtype=torch.float32)
    threads = torch.get_num_threads()
    work = _memory(q, threads * extension().forward_bytes(_sizes(q, k)))
    if has_memory(q):
        tensors = [_place(t) for t in (q, k, v, out)]
        extension().forward(_sizes(q, k), tensors, lse.data_ptr(), scale, is_causal, work.data_ptr(), threads)
    return out, lse


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
              dout: torch.Tensor, scale: float, is_causal: bool
              ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv of keys [sk, b, g, d], which may be some of the keys that out and lse are about.

    out, dout  [sq, b, n, d], of all keys
    lse        contiguous fp32 [b, n, sq], of all keys
    """
    q, k, v, out, dout = (_with_rows(t) for t in (q, k, v, out, dout))
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    threads = torch.get_num_threads()
    work = _memory(q, threads * extension().backward_bytes(_sizes(q, k)))
    if has_memory(q):
        tensors = [_place(t) for t in (q, k, v, out, dout, dq, dk, dv)]
        extension().backward(_sizes(q, k), tensors, lse.data_ptr(), scale, is_causal, work.data_ptr(),
                             threads)
    return dq, dk, dv


def _with_rows(t: torch.Tensor) -> torch.Tensor:
    """The tensor with the channels of a head next to each other."""
    return t if t.stride(3) == 1 else t.contiguous()


def _memory(like: torch.Tensor, count: int) -> torch.Tensor:
    return like.new_empty(count, dtype=torch.uint8)


def _sizes(q: torch.Tensor, k: torch.Tensor) -> tuple[int, ...]:
    return q.shape[0], k.shape[0], q.shape[1], q.shape[2], k.shape[2], q.shape[3]


def _place(t: torch.Tensor) -> tuple[int, int, int, int]:
    """Address, and the strides of positions, samples and heads."""
    return t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)
