"""AdamW over rows of flat tensors, a launch for all that are alike: csrc/gpu/adam.cu."""

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..product import has_memory
from .gpu_kernel import GpuKernel, type_name

if TYPE_CHECKING:
    from ..adam import AdamRow, AdamStep

KERNEL = GpuKernel("adam.cu", "adamw", "ptr i32 i32 f32 f32 f32 f32 f32 f32 f32 f32 ptr ptr")
THREADS = 256
CHUNK, SHORT_CHUNK = 8192, 2048      # elements of a block
MANY_ELEMENTS = 1 << 23              # from which on a GPU is full with blocks of CHUNK elements
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
LOWS = (torch.bfloat16, torch.float16)


def adamw(grad: torch.Tensor, rows: Sequence["AdamRow"], how: "AdamStep") -> None:
    """`ops.adam.adamw` with the bits of its reference. Rows of one step and the same dtypes are one launch.

    The host does not wait for numbers of `how` that are on the device. Raises ValueError for tensors that it
    cannot take.
    """
    on_device = isinstance(how.divisor, torch.Tensor)
    for r in rows:
        _check(r)
    for alike in _groups_alike(rows):
        step, (beta1, beta2) = alike[0].step, how.betas
        _launch(alike, (1 - beta1, beta2, 1 - beta2, (1 - beta2**step) ** -0.5, how.eps,
                        1 - how.lr * how.weight_decay, how.lr / (1 - beta1**step),
                        1.0 if on_device else how.grad_scale), how.divisor if on_device else None, how.skip)


def _groups_alike(rows: Sequence["AdamRow"]) -> Iterator[list["AdamRow"]]:
    groups: dict[tuple, list] = {}
    for r in rows:
        if r.p.numel() and has_memory(r.p):
            groups.setdefault((r.step, r.grad.dtype, r.low is None or r.low.dtype), []).append(r)
    yield from groups.values()


def _launch(rows: Sequence["AdamRow"], rates: tuple[float, ...], divisor: torch.Tensor | None,
            skip: torch.Tensor | None) -> None:
    table = np.array([[r.p.data_ptr(), r.grad.data_ptr(), r.m.data_ptr(), r.v.data_ptr(),
                       0 if r.low is None else r.low.data_ptr(), r.p.numel(), 0] for r in rows], np.int64)
    chunk = CHUNK if table[:, 5].sum() >= MANY_ELEMENTS else SHORT_CHUNK
    ends = np.cumsum(-(-table[:, 5] // chunk))
    table[1:, 6] = ends[:-1]
    types = type_name(rows[0].grad), "float" if rows[0].low is None else type_name(rows[0].low)
    KERNEL(types, int(ends[-1]), THREADS, _on_device(table.tobytes(), rows[0].p.device), len(rows), chunk,
           *rates, divisor, skip)


@functools.lru_cache(maxsize=64)
def _on_device(table: bytes, device: torch.device) -> torch.Tensor:
    """Addresses stay the same from step to step, so a table is copied once."""
    numbers = torch.frombuffer(bytearray(table), dtype=torch.int64)
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


def _check(r: "AdamRow") -> None:
    low = [] if r.low is None else [r.low]
    for t in (r.grad, r.m, r.v, *low, r.p):
        if t.device != r.p.device or t.numel() != r.p.numel() or not t.is_contiguous():
            how = "" if t.is_contiguous() else "not "
            raise ValueError(f"GPU Adam got {t.numel()} elements on {t.device}, {how}contiguous, beside a "
                             f"parameter of {r.p.numel()} on {r.p.device}: all must be on one device, "
                             "contiguous, and equally long.")
    wrong = [t.dtype for t in (r.p, r.m, r.v) if t.dtype != torch.float32]
    wrong += [r.grad.dtype] * (r.grad.dtype not in GRADIENTS) + [t.dtype for t in low if t.dtype not in LOWS]
    if wrong:
        raise ValueError(f"GPU Adam got {wrong[0]}: parameter and moments must be fp32, gradients fp32, bf16 "
                         "or fp16, low bf16 or fp16.")
    if r.step < 1:
        raise ValueError(f"GPU Adam got step {r.step}: updates count from 1, bias corrections divide by zero "
                         "at 0.")
