"""The memory allocator of this process: glibc's, or jemalloc or mimalloc, preloaded by LD_PRELOAD.

Training frees and allocates the same activations every micro-batch. An allocator keeps freed memory for the
next block, or returns it to the kernel; then the next use of each page is a page fault, of 1 to 4 µs.

    glibc      keep: all blocks lie in one heap. torch asks for aligned blocks, which need about 96 bytes more
               than a freed block of the same size offers (glibc 2.36), so freed tensors leave holes.
               return: a block of 1 MiB and more has pages of its own, which go back when it is freed. By
               default glibc has such blocks in the heap once the first was freed: a recomputing GPT of 14 M
               parameters took 280 MiB more for 4,096 tokens, of 1,010. torch can put tensors of 2 MiB and
               more on huge pages, which fault less often: a step with 8,192 tokens takes 10 % less time. In
               a heap that keeps freed memory this increases the peak, 1,704 to 2,046 MiB.
               one arena: glibc gives each thread an arena of its own, and memory freed in one serves no
               other. Communication threads copy buckets: their arenas would be held in addition to the main
               one, which has enough free memory when gradients are summed.
    jemalloc,  keep: freed blocks leave no holes, as a block of the same size takes their place.
    mimalloc   return: the pages of a freed block go back at once. With full recomputation of 8,192 tokens
               the peak is 531 MiB (mimalloc 553) in place of 644 (693), as with glibc, 530.

Other allocators keep their own settings.
"""

import ctypes
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# From glibc's <malloc.h>.
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4
M_ARENA_MAX = -8
TOP_PAD_BYTES = 64 << 20
OWN_PAGES_BYTES = 1 << 20
ONE_ARENA = ((M_ARENA_MAX, 1),)
KEEP_FREED = (
    (M_MMAP_MAX, 0),
    (M_TRIM_THRESHOLD, 2**31 - 1),
    (M_TOP_PAD, TOP_PAD_BYTES),
)
RETURN_FREED = ((M_MMAP_THRESHOLD, OWN_PAGES_BYTES),)
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch reads it at its first allocation on a CPU
DECAYS = ("dirty_decay_ms", "muzzy_decay_ms")
# when jemalloc and mimalloc return the pages of freed blocks
NEVER = -1
AT_ONCE = 0
KEPT = "freed memory is kept"
RETURNED = "freed memory is returned"
LARGE_RETURNED = "freed blocks of 1 MiB and more are returned"
OWN = "with its own settings"
Process = Any  # ctypes.CDLL(None): the symbols of this process


@dataclass(frozen=True)
class AllocatorSetting:
    """name: of the allocator, with its version. effect: a clause. is_ours: `set_allocator` made the setting,
    and the allocator accepted all of it."""

    name: str
    effect: str
    is_ours: bool = False

    def __str__(self) -> str:
        return f"allocator: {self.name}, {self.effect}"


_SETTINGS: list[AllocatorSetting] = []  # the setting of this process, once it is made


def set_allocator(keep_freed: bool) -> AllocatorSetting:
    """Keep freed memory in this process, or return it to the system; returns the setting that is in force.

    To be called once in a process: before communication threads exist, as a thread chooses its arena when it
    starts, and before torch's first allocation on the CPU.
    """
    setting = AllocatorSetting("that of the system", OWN)
    if sys.platform.startswith("linux"):
        setting = configure(ctypes.CDLL(None), keep_freed)
    _SETTINGS[:] = [setting]
    return setting


def allocator_text() -> str:
    """Return what `set_allocator` did, in one line; empty before."""
    return "".join(map(str, _SETTINGS))


def configure(process: Process, keep_freed: bool) -> AllocatorSetting:
    """Configure the allocator that serves malloc in a process."""
    file = library_of(process.malloc)
    for symbol, settle in ALLOCATORS.items():
        # A library may have the symbol, and not be the one that serves malloc.
        if (function := getattr(process, symbol, None)) is not None and library_of(
            function
        ) == file:
            setting = settle(process, keep_freed)
            if setting.is_ours and not keep_freed:
                os.environ.setdefault(HUGE_PAGES, "1")
            return setting
    return AllocatorSetting(Path(file).name or "unknown", OWN)


class _Found(ctypes.Structure):
    """Dl_info of <dlfcn.h>."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def library_of(function: Any) -> str:
    """Return the file that has the code of a C function; "" if it cannot be found."""
    found = _Found()
    find = ctypes.CDLL(None).dladdr
    find.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Found)]
    succeeded = find(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(found))
    return os.fsdecode(found.file) if succeeded and found.file else ""


def _set_glibc(process: Process, keep_freed: bool) -> AllocatorSetting:
    process.gnu_get_libc_version.restype = ctypes.c_char_p
    name = f"glibc {process.gnu_get_libc_version().decode()}"
    settings = ONE_ARENA + (KEEP_FREED if keep_freed else RETURN_FREED)
    refused = [
        f"{option} = {value}"
        for option, value in settings
        if process.mallopt(option, value) != 1
    ]
    if refused:
        return AllocatorSetting(name, f"which refused mallopt {', '.join(refused)}")
    return AllocatorSetting(name, KEPT if keep_freed else LARGE_RETURNED, is_ours=True)


def _set_jemalloc(process: Process, keep_freed: bool) -> AllocatorSetting:
    """Let all arenas return the pages of freed blocks at once, or never.

    jemalloc 5.3.0 refuses the index of all arenas, 4096, for these names, so each arena is set.
    """
    read, write = _jemalloc_calls(process)
    _, version = read("version", ctypes.c_char_p)
    name = f"jemalloc {(version or b'').decode().partition('-')[0]}".strip()
    if "decay_ms" in os.environ.get("MALLOC_CONF", ""):
        return AllocatorSetting(name, "as MALLOC_CONF sets it")
    _, arenas = read("arenas.narenas", ctypes.c_uint)
    there = [
        f"arena.{i}"
        for i in range(arenas or 0)
        if read(f"arena.{i}.initialized", ctypes.c_bool)[1]
    ]
    refused = []
    when = NEVER if keep_freed else AT_ONCE
    for key in (f"{arena}.{decay}" for arena in ("arenas", *there) for decay in DECAYS):
        error = write(key, when)
        if error or read(key, ctypes.c_ssize_t) != (0, when):
            refused.append(f"{key} ({os.strerror(error) if error else 'unchanged'})")
    if refused:
        return AllocatorSetting(name, f"which refused {', '.join(refused)}")
    return AllocatorSetting(name, KEPT if keep_freed else RETURNED, is_ours=True)


def _jemalloc_calls(
    process: Process,
) -> tuple[Callable[[str, type], tuple[int, Any]], Callable[[str, int], int]]:
    """read(key, C type) → errno and value, None with an error; write(key, value of ssize_t) → errno."""
    control = process.mallctl
    size_t = ctypes.c_size_t
    control.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 3, size_t]

    def read(key: str, kind: type) -> tuple[int, Any]:
        value = kind()
        size = size_t(ctypes.sizeof(kind))
        error = control(key.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
        return error, None if error else value.value

    def write(key: str, number: int) -> int:
        value = ctypes.c_ssize_t(number)
        return control(
            key.encode(), None, None, ctypes.byref(value), ctypes.sizeof(value)
        )

    return read, write


def _set_mimalloc(process: Process, keep_freed: bool) -> AllocatorSetting:
    """Pages of freed blocks are returned at once, or never.

    Numbers, names and meanings of options differ between versions. So the number is that of the line with
    the name in the listing, and the listing is read again. Versions without one keep their own settings.
    """
    number = process.mi_version()  # 209 is 2.0.9, 30403 is 3.4.3
    digits = (
        (number // 10000, number // 100 % 100, number % 100)
        if number >= 10000
        else (number // 100, number // 10 % 10, number % 10)
    )
    name = "mimalloc " + ".".join(map(str, digits))
    if "MIMALLOC_PURGE_DELAY" in os.environ:
        return AllocatorSetting(name, "as MIMALLOC_PURGE_DELAY sets it")
    if getattr(process, "mi_options_print_out", None) is None:
        return AllocatorSetting(name, f"{OWN}: this version does not list them")
    names = [option for option, _ in _mimalloc_options(process)]
    if "purge_delay" not in names:
        return AllocatorSetting(name, f"{OWN}: purge_delay is not among them")
    process.mi_option_set.argtypes = [ctypes.c_int, ctypes.c_long]
    when = NEVER if keep_freed else AT_ONCE
    process.mi_option_set(names.index("purge_delay"), when)
    if dict(_mimalloc_options(process))["purge_delay"] != str(when):
        return AllocatorSetting(name, f"which refused purge_delay = {when}")
    return AllocatorSetting(name, KEPT if keep_freed else RETURNED, is_ours=True)


def _mimalloc_options(process: Process) -> list[tuple[str, str]]:
    """Return the name and value of each option, in the order of their numbers."""
    parts: list[bytes] = []
    add = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)(
        lambda text, _: parts.append(text)
    )
    process.mi_options_print_out(add, None)
    return re.findall(
        r"^option '(\w+)': (-?\d+)", b"".join(parts).decode(), re.MULTILINE
    )


# A symbol that only this allocator has → the function that configures it.
ALLOCATORS: dict[str, Callable[[Process, bool], AllocatorSetting]] = {
    "mallctl": _set_jemalloc,
    "mi_option_set": _set_mimalloc,
    "gnu_get_libc_version": _set_glibc,
}
