"""CRC-32, the checksum of zlib and of zip archives, and its arithmetic.

A CRC-32 is a polynomial over the field of two elements, modulo the polynomial P of degree 32. Bit 31 of the
number is the coefficient of x**0 and bit 0 that of x**31. For bytes A followed by n bytes B

    crc32(A B) = crc32(A) · x**(8 n) + crc32(B)        (the conditioning of start and end cancels)

so that the checksum of a part follows from those of the file before and after it.

csrc/host/crc32.cpp, an optional extension, computes it several times as fast as zlib.
"""

import functools
import logging
import zlib
from collections.abc import Callable
from typing import Any

from . import load_compiled

logger = logging.getLogger(__name__)

P = 0xEDB88320  # without its coefficient of x**32
ONE = 1 << 31  # x**0
SHORT = 4096  # bytes, below which a call of zlib takes less time


def crc32(data: Any, value: int = 0) -> int:
    """Return the CRC-32 of a contiguous buffer, continued from that of the bytes before it, as zlib.crc32 does."""
    view = memoryview(data)
    return (zlib.crc32 if view.nbytes < SHORT else _compiled())(view, value)


@functools.cache
def _compiled() -> Callable[[memoryview, int], int]:
    module = load_compiled(
        "_crc32",
        "checksum of checkpoints",
        "zlib's runs instead, at a fraction of the speed",
        logger,
    )
    return module.crc32 if module is not None and len(module.WAYS) > 1 else zlib.crc32


def crc32_of_rest(before: int, after: int, length: int) -> int:
    """Return the CRC-32 of the last `length` bytes of a file, from those of the whole file and of the bytes
    before."""
    # x**0, x**8
    power = ONE
    square = ONE >> 8
    bits = length
    while bits:
        if bits & 1:
            power = _product(power, square)
        square = _product(square, square)
        bits = bits >> 1
    return _product(before, power) ^ after


def _product(a: int, b: int) -> int:
    """a · b modulo P."""
    total = 0
    # Coefficients of b from x**0 on; `a` is multiplied by x each time.
    for bit in range(31, -1, -1):
        if b >> bit & 1:
            total ^= a
        a = a >> 1 ^ (P if a & 1 else 0)
    return total
