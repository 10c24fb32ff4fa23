"""Schedules by name: each is a pure function (pipeline_size, num_microbatches, chunks=1) → `Schedule` of F, B, I and W.

A schedule says in which order a rank computes; whatever follows from that order (transfers, reductions) is added by
`pipeline.passes`. A new schedule is one file with such a function, and one line here; `tests/contracts` then runs it
through the passes and the simulator for many shapes.
"""

from collections.abc import Callable

from ...registry import Registry
from ..instruction import Schedule
from .gpipe import gpipe
from .one_f_one_b import one_f_one_b

SCHEDULES: Registry[Callable[..., Schedule]] = Registry("pipeline schedule")
SCHEDULES.register("gpipe")(gpipe)
SCHEDULES.register("1f1b", "one_f_one_b")(one_f_one_b)
