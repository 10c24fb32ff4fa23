"""Keep freed memory: on a CPU, a training step asks the system for the same gigabytes again and again.

glibc returns large blocks to the kernel when they are freed, and the next use of each page is a fault. Training frees and
allocates the same activations every micro-batch, so we tell glibc to keep them. On other systems nothing happens.
"""

import ctypes
import sys

# From glibc's <malloc.h>.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
TOP_PAD_BYTES = 64 << 20


def keep_freed_memory() -> bool:
    """Ask the C library's allocator, once per process, not to give memory back; whether it listened."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)      # musl has none
    if mallopt is None:
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, TOP_PAD_BYTES))
    return all([mallopt(option, value) == 1 for option, value in settings])
