"""Schedules by name: each is a pure function (pipeline_size, num_microbatches, chunks=1) → `Schedule` of F, B, I and W.

A schedule says in which order a rank computes; whatever follows from that order (transfers, reductions) is added by
`pipeline.passes`. A new schedule is one file in this folder with such a function under `@schedule(name)`; each file here is
read, and `tests/contracts` then runs the schedule through the passes and the simulator for many shapes.
"""

from importlib import import_module
from pkgutil import iter_modules

from .family import OPTIONS, PEAKS, SCHEDULES, check_shape, default_chunks, schedule, serves

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["OPTIONS", "PEAKS", "SCHEDULES", "check_shape", "default_chunks", "schedule", "serves"]
