"""Tiles of attention by torch's FlashAttention of GPUs (Dao 2023, arXiv:2307.08691), for tiles without a bias.

The operations of aten return the log-sum-exp of each row, and their backward takes the output and the
log-sum-exp of all keys, so tiles can be merged. Keys and values have their own number of heads: they are not
repeated for the query heads of a group.

`activate_newer_kernels` replaces the kernels behind these operations by FlashAttention 4 or 3 where the package
is installed and made for the GPU; torch then runs them in its own attention as well. It has not run on a GPU
yet: the first call of a process compares two merged tiles with attention written out.

Letters: q and k rows, b samples, n query heads, g key-value heads (g divides n), d channels.
"""

import logging
import math
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

from ....ops.kernel_table import random_tensors
from .kernel_check import tensor_error

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
CHANNELS = range(8, 257, 8)
OLDEST = (8, 0)  # compute capability
# Name for torch → (its module, compute capabilities that it is made for), the newest first.
NEWER = {
    "FA4": ("flash_attn.cute", ((9, 0), (10, 0))),
    "FA3": ("flash_attn_interface", ((9, 0),)),
}
# Sizes of the check.
ROWS = 160
HEADS = 4
GROUPS = 2
LIMIT = 8  # times the tolerance of kernels, for roundings of probabilities in 16 bits

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward


class FinalRows(NamedTuple):
    """Tensors of the rows of a tile over all keys: dout and out [b, n, q, d], log-sum-exp fp32 [b, n, q]."""

    dout: torch.Tensor
    out: torch.Tensor
    sums: torch.Tensor


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, triangle: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [b, n, q, d], k and v [b, g, k, d] → out [b, n, q, d], log-sum-exp fp32 [b, n, q].

    triangle: hide the keys behind each query; q and k have the same number of rows
    """
    out, sums, *_ = _FORWARD(q, k, v, 0.0, triangle, False, scale=scale)
    return out, sums


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    final: FinalRows,
    triangle: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq [b, n, q, d], dk and dv [b, g, k, d] of a tile."""
    unused = torch.empty(0, device=q.device, dtype=torch.int64)  # state of a dropout
    return _BACKWARD(
        final.dout,
        q,
        k,
        v,
        final.out,
        final.sums.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        triangle,
        unused,
        unused,
        scale=scale,
    )


def suits(q: torch.Tensor) -> bool:
    """Return whether tiles of these queries run here; the first call for a dtype and width checks it."""
    if q.dtype not in DTYPES or q.shape[-1] not in CHANNELS:
        return False
    return not reason_against(q.dtype, q.shape[-1], q.device)


@lru_cache
def reason_against(dtype: torch.dtype, channels: int, device: torch.device) -> str:
    """Return why this GPU does not compute tiles with FlashAttention; "" if it does. Logged once."""
    if torch.cuda.get_device_capability(device) < OLDEST:
        return f"FlashAttention needs compute capability {OLDEST[0]}.{OLDEST[1]}"
    newer = activate_newer_kernels(device)
    reason = _failed_check(dtype, channels, device)
    if reason and newer:
        logger.warning("%s is not used: %s", newer, reason)
        torch.nn.attention.restore_flash_attention_impl()
        reason = _failed_check(dtype, channels, device)
    if reason:
        logger.warning(
            "FlashAttention failed the check for %s and heads of %d channels on %s, so torch's "
            "memory-efficient kernels compute parts of attention there: %s",
            dtype,
            channels,
            device,
            reason,
        )
    return reason


@lru_cache
def activate_newer_kernels(device: torch.device) -> str:
    """Have torch run the newest FlashAttention that is installed for this GPU; its name, "" for torch's own."""
    capability = torch.cuda.get_device_capability(device)
    for name, (module, capabilities) in NEWER.items():
        if capability not in capabilities or not _is_installed(module):
            continue
        try:
            torch.nn.attention.activate_flash_attention_impl(name)
        except Exception as error:  # whatever it is: torch's own kernels remain
            logger.warning("%s is installed, but torch cannot use it: %s", name, error)
            continue
        logger.info("attention: torch runs %s of the package %s", name, module)
        return name
    return ""


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that holds the module
        return False


def _failed_check(dtype: torch.dtype, channels: int, device: torch.device) -> str:
    """Return what is wrong with the merged results of a whole tile and a triangle; "" if nothing is."""
    try:
        # Hooks of a checkpoint around this call must not count what the comparison saves.
        with (
            torch.inference_mode(False),
            torch.autocast(device.type, enabled=False),
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        ):
            error = _error(dtype, channels, device)
    except Exception as failure:  # whatever it is: the run goes on without the kernel
        return f"{type(failure).__name__}: {failure}"
    if error <= LIMIT:
        return ""
    return f"results are wrong by {error:.3g} times the tolerance"


def _error(dtype: torch.dtype, channels: int, device: torch.device) -> float:
    """Return the largest error of output and gradients, in tolerances."""
    shapes = [(2, heads, ROWS, channels) for heads in (HEADS, *[GROUPS] * 4, HEADS)]
    given = [t.detach() for t in random_tensors(dtype, device, *shapes)]
    q, k0, v0, k1, v1, dout = given
    got = _in_tiles(q, [(k0, v0, False), (k1, v1, True)], dout)
    expected = _written_out(q, torch.cat([k0, k1], 2), torch.cat([v0, v1], 2), dout)
    pairs = zip(got, expected, strict=True)
    return max(tensor_error(mine.to(dtype), right) for mine, right in pairs)


def _in_tiles(q: torch.Tensor, tiles: Sequence, dout: torch.Tensor) -> list:
    """Output, dq, dk and dv of keys in several tiles."""
    scale = 1 / math.sqrt(q.shape[-1])
    parts = [forward(q, k, v, triangle, scale) for k, v, triangle in tiles]
    sums = torch.stack([of_tile for _, of_tile in parts]).logsumexp(0)

    # the merged output
    wide = torch.zeros_like(q, dtype=torch.float32)
    for out, of_tile in parts:
        weight = (of_tile - sums).exp()
        wide += weight[..., None] * out
    final = FinalRows(dout, wide.to(q.dtype), sums)

    # gradients of each tile
    found = [backward(q, k, v, final, triangle, scale) for k, v, triangle in tiles]
    of_queries, of_keys, of_values = zip(*found, strict=True)
    dq = torch.stack(of_queries).float().sum(0)
    return [final.out, dq, torch.cat(of_keys, 2), torch.cat(of_values, 2)]


def _written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
) -> list[torch.Tensor]:
    """Return the same in double precision: the first half of the keys is visible, the second is causal."""
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    groups = HEADS // GROUPS
    keys, values = (t.repeat_interleave(groups, 1) for t in leaves[1:])
    scores = leaves[0] @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    scores = scores.masked_fill(hidden.triu(1 + k.shape[2] - q.shape[2]), -math.inf)
    out = scores.softmax(-1) @ values
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.double())]
