"""Records that only metrics.jsonl keeps: what a process of the run was started with, and its saves."""

import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from ... import __version__
from ...config import RunConfig
from ...mpu.mesh import Mesh


class Fact:
    """A record that only metrics.jsonl keeps. kind: its name there."""

    kind: str

    def fields(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(cast(Any, self))


@dataclass(frozen=True)
class ProcessRecord(Fact):
    """The start of training in a process: before the first step, or after a resume.

    step         of the loaded checkpoint; 0 at the start of the run
    began        when the process began, in seconds since the epoch; building and loading follow
    settings     path of each option that has not its default → (value as text, its source)
    environment  name → text
    """

    step: int
    began: float
    settings: Mapping[str, tuple[str, str]]
    environment: Mapping[str, str]

    kind = "process"


@dataclass(frozen=True)
class SaveRecord(Fact):
    """A complete checkpoint. save_seconds: how long steps waited for it."""

    step: int
    save_seconds: float

    kind = "save"


def process_record(
    config: RunConfig, mesh: Mesh, step: int, started: float
) -> ProcessRecord:
    """Return the record of this process. started: time.monotonic() at its start."""
    return ProcessRecord(
        step,
        round(time.time() - (time.monotonic() - started), 6),
        settings_of(config),
        environment_of(mesh),
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
