"""`check_outputs`: whether a run can measure and write what its options ask for."""

from pathlib import Path

import torch

from ...config import RunConfig
from ...errors import ConfigError
from ...mpu.mesh import Mesh
from ...training.observe.sink import check_folder
from .options import ProfilerConfig


def check_outputs(config: RunConfig, mesh: Mesh) -> None:
    """Check the options against the device, and the folder of --trace. Raises ConfigError."""
    check_profile(config.of(ProfilerConfig), mesh.device)
    if config.logging.trace:
        check_folder("--trace", Path(config.logging.trace))


def check_profile(config: ProfilerConfig, device: torch.device) -> None:
    """Check whether --profile can be had on a device. Raises ConfigError."""
    if config.profile and not config.use_pytorch_profiler and device.type != "cuda":
        raise ConfigError(
            "--profile without --use-pytorch-profiler marks steps for Nsight Systems, which needs a GPU, and this "
            f"run is on {device.type}. Add --use-pytorch-profiler, which records the CPU, too."
        )
