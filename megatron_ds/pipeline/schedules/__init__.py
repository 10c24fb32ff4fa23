"""Schedules by name: each a pure function (pipeline_size, num_microbatches, chunks) → `Schedule` of F, B, I
and W.

A schedule is the order in which each rank computes; `pipeline.passes` adds the transfers and reductions that
follow from it. A new schedule is one file in this folder with such a function under `@schedule(name)`. All
files here are imported, and `tests/contracts` runs each schedule through the passes and the simulator for
many shapes.
"""

from importlib import import_module
from pkgutil import iter_modules

from .family import SCHEDULES, ScheduleFamily, placement, schedule, stages_of

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["SCHEDULES", "ScheduleFamily", "placement", "schedule", "stages_of"]
