"""Packets: kernels read and write 16 bytes at a time where rows and addresses are multiples of that."""

import torch

from ..product import has_memory

BYTES = 16


def lanes(t: torch.Tensor) -> int:
    """Elements of t in a packet."""
    return BYTES // t.element_size()


def reason_against_packets(x: torch.Tensor, *others: object) -> str:
    """"" if kernels can read the tensors in packets: rows of x are multiples of 16 bytes, tensors among
    `others` have its dtype and last dim or None, and the addresses of contiguous ones are multiples of 16."""
    cols = x.shape[-1] if x.dim() else 1
    if not cols or cols % lanes(x):
        return f"rows of {cols} elements are not a multiple of {BYTES} bytes"
    for t in (x, *others):
        if isinstance(t, torch.Tensor):
            if t.dtype != x.dtype:
                return f"tensors of {t.dtype} and {x.dtype}"
            if t.is_contiguous() and not _is_aligned(t):
                return f"an address that is not a multiple of {BYTES} bytes"
    return ""


def packed(t: torch.Tensor) -> torch.Tensor:
    """t itself, or a copy whose rows follow one another from an address that is a multiple of 16 bytes."""
    t = t.contiguous()
    return t if _is_aligned(t) else t.clone()


def _is_aligned(t: torch.Tensor) -> bool:
    return not has_memory(t) or t.data_ptr() % BYTES == 0
