"""Memory that torch's CUDA allocator reserves for tensors, by its rules for requests and segments.

    request          rounded to      taken from a segment of
    up to 1 MiB      512 bytes       2 MiB, shared with other small ones
    up to 10 MiB     512 bytes       20 MiB, shared with others below 10 MiB, or the rest of a larger segment
    larger           512 bytes       its own, rounded to 2 MiB; a rest above 1 MiB serves others

(The default settings of torch 2: kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc, kRoundLarge in
c10/cuda/CUDACachingAllocator.cpp. PYTORCH_CUDA_ALLOC_CONF changes them.)

`reserved` is what is reserved after the given requests, in their order, when nothing is freed: a lower bound
of a run, where freed blocks are found again only if they fit.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

MIB = 1 << 20
GRAIN = 512
SMALL = MIB
LARGE = 10 * MIB
SMALL_SEGMENT = 2 * MIB
MIDDLE_SEGMENT = 20 * MIB
ROUND_LARGE = 2 * MIB


def reserved(requests: Iterable[int]) -> int:
    """Return the bytes of the segments that hold these requests, each a number of bytes."""
    small: list[int] = []  # bytes that are free at the ends of segments, ascending
    large: list[int] = []
    total = 0
    for nbytes in requests:
        size = -(-nbytes // GRAIN) * GRAIN
        if not size:
            continue
        rests, least = (small, GRAIN) if size <= SMALL else (large, SMALL + 1)
        at = bisect_left(rests, size)
        if at < len(rests):  # the smallest rest that is large enough
            room = rests.pop(at)
        else:
            room = segment_of(size)
            total += room
        if room - size >= least:  # otherwise the rest belongs to the block
            insort(rests, room - size)
    return total


def segment_of(size: int) -> int:
    """Return the bytes of the new segment for a request that fits into no rest."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return MIDDLE_SEGMENT if size < LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE
