"""The compiled index builder, csrc/index_builder.cpp, an optional extension: the same arrays as numpy's, several times faster.

`index_maps.py`, `blend.py` and `bert_maps.py` ask here first and have a plain way of their own, which is also what the
tests compare with.
"""

import functools
import logging
import os
from types import ModuleType
from typing import Any

import numpy as np

from ...compiled import load_compiled

logger = logging.getLogger(__name__)

MOST_THREADS = 16                                           # reading at random places is limited by memory, not by cores


@functools.cache
def extension() -> ModuleType | Any:
    """The compiled module; None, said once, where the package was installed without a compiler."""
    return load_compiled("_index_builder", "the index builder", "numpy builds index maps instead, "
                         "slowly where there are millions of samples", logger)


def num_threads() -> int:
    """Threads to build with: the processors this process may run on."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, MOST_THREADS)


def shuffle(array: np.ndarray, random: np.random.RandomState) -> None:
    """`random.shuffle(array)`, in place: the same order, and the same state of `random` afterwards."""
    if not 1 < len(array) <= 2**32 or not extension() or array.itemsize not in (4, 8) or not array.flags.c_contiguous:
        return random.shuffle(array)
    state = random.get_state(legacy=False)
    position = extension().shuffle(array, state["state"]["key"], state["state"]["pos"])
    state["state"]["pos"] = position
    random.set_state(state)
