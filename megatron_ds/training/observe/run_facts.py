"""Records that only metrics.jsonl keeps: what a process of the run was started with, its saves, its memory."""

import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ... import __version__
from ...config import RunConfig
from ...mpu.mesh import Mesh
from ..run_summary import summary_of


@dataclass(frozen=True)
class ProcessRecord:
    """The start of training in a process: before the first step, or after a resume.

    step         of the loaded checkpoint; 0 at the start of the run
    began        when the process began, in seconds since the epoch; building and loading follow
    settings     path of each option that has not its default → (value as text, its source)
    environment  name → text
    about        what is trained, as `run_summary.summary_of` has it
    """

    step: int
    began: float
    settings: Mapping[str, tuple[str, str]]
    environment: Mapping[str, str]
    about: Mapping[str, Any]

    kind = "process"

    def fields(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


@dataclass(frozen=True)
class SaveRecord:
    """A complete checkpoint. save_seconds: how long steps waited for it."""

    step: int
    save_seconds: float

    kind = "save"

    def fields(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


@dataclass(frozen=True)
class MemoryRecord:
    """Bytes of rank 0 by owner (memory_history.py), such as "weights": planned, and measured in the step.

    measuring_seconds: after the step, for the plan and the file, while training waited
    """

    step: int
    planned: Mapping[str, int]
    measured: Mapping[str, int]
    measuring_seconds: float = 0.0

    kind = "memory"

    def fields(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


Fact = ProcessRecord | SaveRecord | MemoryRecord


def process_record(
    config: RunConfig, mesh: Mesh, step: int, started: float
) -> ProcessRecord:
    """Return the record of this process. started: time.monotonic() at its start."""
    return ProcessRecord(
        step,
        round(time.time() - (time.monotonic() - started), 6),
        settings_of(config),
        environment_of(mesh),
        summary_of(config, mesh.grid),
    )


def settings_of(config: RunConfig) -> dict[str, tuple[str, str]]:
    """Path of each option that has not its default → (value as text, source)."""
    return {
        path: (str(config.get(path)), str(source))
        for path, source in sorted(config.sources.items())
        if not config.is_default(path)
    }


def environment_of(mesh: Mesh) -> dict[str, str]:
    """Versions, and the machine and the device of this rank."""
    device = mesh.device
    is_gpu = device.type == "cuda"
    return {
        "megatron_ds": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "host": socket.gethostname(),
        "ranks": str(mesh.grid.world_size),
        "device": torch.cuda.get_device_name(device) if is_gpu else device.type,
    }
