"""The record of the memory of rank 0 (--record-memory-history)."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...training.observe.run_facts import Fact


@dataclass(frozen=True)
class MemoryRecord(Fact):
    """Bytes of rank 0 by owner (memory_history.py), such as "weights": planned, and measured in the step.

    measuring_seconds: after the step, for the plan and the file, while training waited
    """

    step: int
    planned: Mapping[str, int]
    measured: Mapping[str, int]
    measuring_seconds: float = 0.0

    kind = "memory"
