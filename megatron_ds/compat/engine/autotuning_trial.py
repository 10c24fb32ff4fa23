"""`AutotuningTrial`: an engine's run that an autotuner starts, measures and ends.

`megatron-ds launch --autotuning` writes "autotuning.metric_path" into the JSON of each trial. The engine then
times the updates behind "start_profile_step", writes the numbers to that file, and ends the program behind
"end_profile_step" + 1 updates. Without the path the block has no effect on an engine.
"""

import json
import os
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from ...checkpoint.folder import write_durably
from ...errors import ConfigError

BLOCK = "autotuning"
START = "start_profile_step"
END = "end_profile_step"
BACKWARD = 2  # FLOPs of a backward over those of its forward


class AutotuningTrial:
    """Measures updates from `start`, which is at least 1, to `end`, both numbers of updates that are complete.

    path: of the file of numbers; None: nothing is measured
    """

    def __init__(self, path: str | None, start: int, end: int):
        self.path = path
        self.start = start
        self.end = end
        self._began = 0.0
        self._flops: int | None = None

    @contextmanager
    def around_forward(self, updates: int) -> Iterator[None]:
        """Count the FLOPs of a forward before the updates that are timed. updates: that are complete"""
        if self.path is None or self._flops is not None or updates >= self.start:
            yield
            return
        with FlopCounterMode(display=False) as counter:
            yield
        self._flops = counter.get_total_flops()

    def end_update(self, engine: Any) -> None:
        """Note the time; raise SystemExit(0) on all ranks, behind the last update, with the file written."""
        updates = engine.global_steps
        if self.path is None or updates not in (self.start, self.end):
            return
        _wait(engine.device)
        now = time.perf_counter()
        if updates == self.start:
            self._began = now
            return
        if engine.global_rank == 0:
            seconds = (now - self._began) / (self.end - self.start)
            numbers = self._numbers(engine, seconds)
            write_durably(Path(self.path), json.dumps(numbers) + "\n")
        raise SystemExit(0)

    def _numbers(self, engine: Any, seconds: float) -> dict[str, float]:
        """By DeepSpeed's names: ms, samples per second, FLOP/s of a rank; and bytes of this rank."""
        _, _, steps = engine.get_batch_info()
        flops = (self._flops or 0) * (1 + BACKWARD) * steps
        return {
            "latency": seconds * 1000,
            "throughput": engine.train_batch_size() / seconds,
            "FLOPS_per_gpu": flops / seconds,
            "ranks": engine.world.data.size,
            "num_params": sum(p.spec.numel for p in engine.module.parameters()),
            "memory": _peak(engine.device),
            "memory_of_device": _whole(engine.device),
        }


def trial_of(name: str, block: Mapping[str, Any]) -> AutotuningTrial:
    """Return the trial of a JSON. Raises ConfigError for wrong numbers of steps."""
    found = block.get(BLOCK)
    found = found if isinstance(found, Mapping) else {}
    path = found.get("metric_path") if found.get("enabled") is True else None
    start = found.get(START, 3)
    end = found.get(END, 5)
    if path is not None and not 1 <= start <= end:
        raise ConfigError(
            f'{name}: "{BLOCK}.{START}" is {start} and "{END}" {end}: what is measured begins with an update of 1 or '
            "more, and not behind the end. Give 1 and a larger number."
        )
    return AutotuningTrial(path, start, end + 1)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device) -> int:
    """Return the most bytes so far, of the device or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _whole(device: torch.device) -> int:
    """Return the bytes of the device, or of this machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
