"""The compiled index builder, csrc/index_builder.cpp: the same arrays as numpy's, several times faster.

Optional: `index_maps.py`, `blend.py` and `bert_maps.py` also build their arrays with numpy, which the tests
compare.
"""

import functools
import logging
import os
from types import ModuleType
from typing import Any

import numpy as np

from ...host import load_compiled

logger = logging.getLogger(__name__)

MOST_THREADS = 16                                           # random reads are limited by memory, not by cores


@functools.cache
def extension() -> ModuleType | Any:
    """The compiled module; None, logged once, where the package was installed without a compiler."""
    return load_compiled("_index_builder", "the index builder", "numpy builds index maps instead, "
                         "slowly where there are millions of samples", logger)


def num_threads() -> int:
    """Threads to build with: the processors that this process may run on, at most MOST_THREADS."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, MOST_THREADS)


def shuffle(array: np.ndarray, random: np.random.RandomState) -> None:
    """`random.shuffle(array)`, in place: the same order, and the same state of `random` afterwards."""
    is_supported = 1 < len(array) <= 2**32 and array.itemsize in (4, 8) and array.flags.c_contiguous
    if not is_supported or not extension():
        return random.shuffle(array)
    state = random.get_state(legacy=False)
    position = extension().shuffle(array, state["state"]["key"], state["state"]["pos"])
    state["state"]["pos"] = position
    random.set_state(state)
