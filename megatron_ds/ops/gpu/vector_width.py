"""How many elements a thread may load at once: the addresses and lengths of tensors decide."""

import math
from collections.abc import Iterable

import torch

from ..product import has_memory

PACKET = 16      # bytes, the widest access of a thread


def vector_width(lengths: Iterable[int], *tensors: torch.Tensor) -> int:
    """The largest power of two of elements, of at most 16 bytes, that divides all lengths, the strides of all
    dimensions but the last, and the addresses of the tensors, which have one dtype."""
    itemsize = tensors[0].element_size()
    width = math.gcd(PACKET // itemsize, *lengths)
    for t in tensors:
        address = t.data_ptr() // itemsize if has_memory(t) else 0
        strides = (stride for size, stride in zip(t.shape[:-1], t.stride()) if size > 1)
        width = math.gcd(width, address, *strides)
    return width


def rows_together(t: torch.Tensor) -> torch.Tensor:
    """t itself if its last dimension is contiguous, else a contiguous copy."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()
