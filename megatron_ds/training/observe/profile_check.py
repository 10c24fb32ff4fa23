"""`check_profile`: whether --profile can be had on a device."""

import torch

from ...config.options.profiler import ProfilerConfig
from ...errors import ConfigError


def check_profile(config: ProfilerConfig, device: torch.device) -> None:
    """Check the options against the device. Raises ConfigError."""
    if config.profile and not config.use_pytorch_profiler and device.type != "cuda":
        raise ConfigError(
            "--profile without --use-pytorch-profiler marks steps for Nsight Systems, which needs a GPU, and this "
            f"run is on {device.type}. Add --use-pytorch-profiler, which records the CPU, too."
        )
