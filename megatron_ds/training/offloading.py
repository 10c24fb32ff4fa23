"""From the config to the homes of offloaded state."""

import torch

from ..config.parallel_options import ZeroConfig
from ..host.async_io import make_io
from ..zero.disk import DiskHome
from ..zero.offload import Offload
from ..zero.tiers import Home, MemoryHome


def make_offload(zero: ZeroConfig, device: torch.device) -> Offload:
    """Opens a scratch file in each folder. Raises ConfigError where that cannot be done."""
    disks: dict[str, DiskHome] = {}

    def disk(folder: str) -> DiskHome:
        if folder not in disks:
            io = make_io(zero.nvme_io, block_bytes=zero.nvme_block_size, queue_depth=zero.nvme_queue_depth,
                         threads=zero.nvme_threads)
            disks[folder] = DiskHome(folder, io)
        return disks[folder]

    def home(kind: str, folder: str | None) -> Home | None:
        if kind == "nvme":
            return disk(folder)
        return MemoryHome(torch.device("cpu"), "cpu", pin=device.type == "cuda") if kind == "cpu" else None

    return Offload(home(zero.offload_optimizer, zero.offload_nvme_path), home(zero.offload_param, zero.param_nvme_path),
                   zero.offload_optimizer_ratio, zero.sub_group_size)
