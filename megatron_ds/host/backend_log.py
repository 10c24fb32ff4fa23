"""`only_errors`: warnings of torch's C++ code are not printed for a while.

When a connection fails torch prints C++ stack frames, fifty lines on each rank, and then raises an error that
contains the cause. Its level is otherwise read from the environment, when torch is imported.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

ERROR = 2


@contextmanager
def only_errors() -> Iterator[None]:
    """Let torch's C++ code print errors only, in all threads, during the block; nothing changes where its level is
    not found."""
    level = _level()
    if level is None:
        yield
        return
    before = level.value
    level.value = max(before, ERROR)
    try:
        yield
    finally:
        level.value = before


def _level() -> ctypes.c_int | None:
    """Return the variable of c10 that holds the level."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
