"""Offload tiers: where training state is kept between two uses, on the device, in host memory or on a disk.

A tier makes `Array`s: flat state that is read into a buffer and written from one. `Array.tensor` is the same
state as a tensor (the memory itself, or a memory map of the file), for uses that are not in a hurry:
initialization, saving, loading. What an update needs of a disk is read and written past the page cache
instead.
"""

from dataclasses import dataclass
from functools import cache

import torch

from .arrays import Tier
from .offload_settings import DEVICE, OffloadSettings


@dataclass(frozen=True)
class Tiers:
    """The opened tiers; None: the device."""

    optimizer: Tier | None = None
    parameters: Tier | None = None

    def settle(self) -> None:
        """`Tier.settle` of both."""
        for tier in {self.optimizer, self.parameters}:
            if tier is not None:
                tier.settle()


def open_tiers(settings: OffloadSettings, device: torch.device) -> Tiers:
    """Open a scratch file in each folder. Raises ConfigError if that fails.

    A run loads the tiers that it uses.
    """

    @cache  # the same place is opened once
    def tier(place: str, folder: str | None) -> Tier | None:
        if place == DEVICE:
            return None
        if place == "cpu":
            from .memory_tier import MemoryTier

            return MemoryTier(torch.device("cpu"), page_locked=device.type == "cuda")
        assert folder is not None, "the rules demand a folder for nvme"
        from .disk_tier import open_disk

        return open_disk(folder, settings)

    return Tiers(
        tier(settings.optimizer, settings.optimizer_folder),
        tier(settings.parameters, settings.parameters_folder),
    )
