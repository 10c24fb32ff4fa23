"""Packets: kernels read and write 16 bytes at a time where rows and addresses are multiples of that, and
fewer elements where they are not (`vector_width`).
"""

import math
from collections.abc import Iterable

import torch

from ....ops.meta_tensors import has_memory

BYTES = 16  # of a packet, the widest access of a thread


def lanes(t: torch.Tensor) -> int:
    """Elements of t in a packet."""
    return BYTES // t.element_size()


def reason_against_packets(x: torch.Tensor, *others: object) -> str:
    """ "" if kernels can read the tensors in packets: rows of x are multiples of 16 bytes, tensors among
    `others` have its dtype and last dim or None, and the addresses of contiguous ones are multiples of 16."""
    if reason := reason_against_rows(x, *others):
        return reason
    for t in (x, *others):
        if isinstance(t, torch.Tensor) and t.is_contiguous() and not _is_aligned(t):
            return f"an address that is not a multiple of {BYTES} bytes"
    return ""


def reason_against_rows(x: torch.Tensor, *others: object) -> str:
    """`reason_against_packets` for tensors that `packed` will have at right addresses."""
    # Whole packets in each row.
    cols = x.shape[-1] if x.dim() else 1
    if not cols or cols % lanes(x):
        return f"rows of {cols} elements are not a multiple of {BYTES} bytes"
    # One dtype, and aligned addresses.
    for t in (x, *others):
        if not isinstance(t, torch.Tensor):
            continue
        if t.dtype != x.dtype:
            return f"tensors of {t.dtype} and {x.dtype}"
    return ""


def packed(t: torch.Tensor) -> torch.Tensor:
    """t itself, or a copy whose rows follow one another from an address that is a multiple of 16 bytes."""
    if t.is_contiguous() and not t.data_ptr() % BYTES:  # 0 on the meta device
        return t
    t = t.contiguous()
    return t if _is_aligned(t) else t.clone()


def vector_width(lengths: Iterable[int], *tensors: torch.Tensor) -> int:
    """Return the largest power of two of elements, of at most 16 bytes, that divides all lengths, the strides of all
    dimensions but the last, and the addresses of the tensors, which have one dtype."""
    # What divides all of them, in elements.
    itemsize = tensors[0].element_size()
    width = math.gcd(BYTES // itemsize, *lengths)
    for t in tensors:
        # Tensors of a plan have no address.
        if has_memory(t):
            address = t.data_ptr()
            width = math.gcd(width, address // itemsize)
        # A dimension of one element has no stride that is used.
        for size, stride in zip(t.shape[:-1], t.stride()):
            if size > 1:
                width = math.gcd(width, stride)
    return width


def common_width(length: int, *tensors: torch.Tensor) -> int:
    """`vector_width` of contiguous tensors that are read as one row whose parts have this length."""
    itemsize = tensors[0].element_size()
    most = BYTES // itemsize
    addresses = 0
    for t in tensors:
        address = t.data_ptr()  # 0 on the meta device
        addresses |= address
    return math.gcd(most, length, addresses // itemsize)


def rows_together(t: torch.Tensor) -> torch.Tensor:
    """t itself if its last dimension is contiguous, else a contiguous copy."""
    is_row = t.shape[-1] <= 1 or t.stride(-1) == 1
    return t if is_row else t.contiguous()


def _is_aligned(t: torch.Tensor) -> bool:
    """Return whether its address is a multiple of 16 bytes."""
    return not has_memory(t) or t.data_ptr() % BYTES == 0
