"""Where ZeRO keeps training state: `OffloadSettings`."""

from dataclasses import dataclass

from ..config.options.parallel import ZeroConfig

DEVICE = "device"


@dataclass(frozen=True)
class OffloadSettings:
    """Where state is kept: "device", "cpu" (host memory) or "nvme" (a scratch file in a folder).

    optimizer           masters and moments
    parameters          shards of the weights (stage 3)
    ratio               share of the optimizer state that is offloaded; the device keeps and updates the rest
    sub_group_elements  of the state that is brought to the host at a time
    """

    optimizer: str = DEVICE
    parameters: str = DEVICE
    ratio: float = 1.0
    sub_group_elements: int = 4 * 2**20
    optimizer_folder: str | None = None
    parameters_folder: str | None = None
    io: str = "auto"
    io_block_bytes: int = 1 << 20
    io_queue_depth: int = 32
    io_threads: int = 4

    @classmethod
    def from_config(cls, zero: ZeroConfig) -> "OffloadSettings":
        """Read the settings from the section `zero` of the configuration."""
        place = lambda where: DEVICE if where == "none" else where
        return cls(
            place(zero.offload_optimizer),
            place(zero.offload_param),
            zero.offload_optimizer_ratio,
            zero.sub_group_size,
            zero.offload_nvme_path,
            zero.param_nvme_path,
            zero.nvme_io,
            zero.nvme_block_size,
            zero.nvme_queue_depth,
            zero.nvme_threads,
        )
