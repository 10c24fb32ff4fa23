"""How the C library's allocator serves training on a CPU (glibc; on other systems nothing happens).

Keep freed memory. glibc returns large blocks to the kernel when they are freed, and the next use of each page is a fault.
Training frees and allocates the same activations every micro-batch.

One arena. glibc gives each thread a pool of its own, and what was freed in one serves no other. Backends of communication copy
buckets in threads of theirs: their pools would stay beside the main one, which has room enough when gradients are summed.
"""

import ctypes
import sys

# From glibc's <malloc.h>.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8
TOP_PAD_BYTES = 64 << 20
ONE_ARENA = ((M_ARENA_MAX, 1),)
KEEP_FREED = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, TOP_PAD_BYTES))


def set_allocator(keep_freed: bool) -> bool:
    """Once per process, before there are threads of communication, which would choose their arena; whether glibc listened."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)      # musl has none
    if mallopt is None:
        return False
    return all([mallopt(option, value) == 1 for option, value in ONE_ARENA + KEEP_FREED * keep_freed])
