"""`Monitor`: curves of a run for TensorBoard, under DeepSpeed's names, with samples on the x-axis.

    Train/Samples/train_loss    mean of the losses given to `backward` since the last update, on rank 0
    Train/Samples/lr            the learning rate of the first parameter group
    Train/Samples/loss_scale    fp16 only

The config's "tensorboard" block enables it; a program writes curves of its own with `engine.monitor.write_events`.
"""

import os
from collections.abc import Iterable

import torch

from ..errors import ConfigError

Event = tuple[str, float, int]


class Monitor:
    """folder: of the event files; None: disabled, everything is dropped. Only global rank 0 has an enabled one."""

    def __init__(self, folder: str | None):
        self._writer = None if folder is None else _open(folder)
        self._losses: list[torch.Tensor] = []

    @property
    def enabled(self) -> bool:
        return self._writer is not None

    def write_events(self, events: Iterable[Event]) -> None:
        """events: (name of the curve, value, number of samples)"""
        for name, value, samples in events if self.enabled else ():
            self._writer.add_scalar(name, value, samples)
        if self.enabled:
            self._writer.flush()

    def add_loss(self, loss: torch.Tensor) -> None:
        """Of one micro-batch. It is read in `end_step` only, after the update, when it does not hold up the device."""
        if self.enabled:
            self._losses.append(loss.detach())

    def end_step(self, samples: int, lr: float, loss_scale: float | None) -> None:
        """The update after `samples` samples is done."""
        if not self.enabled:
            return
        losses, self._losses = self._losses, []
        events = [("Train/Samples/train_loss", sum(loss.item() for loss in losses) / len(losses), samples)] if losses else []
        scale = [] if loss_scale is None else [("Train/Samples/loss_scale", loss_scale, samples)]
        self.write_events([*events, ("Train/Samples/lr", lr, samples), *scale])


def _open(folder: str):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError('"tensorboard" is enabled in the config, but the package tensorboard is not installed. Run '
                          f"pip install tensorboard, or disable the block ({error}).") from None
    os.makedirs(folder, exist_ok=True)
    return SummaryWriter(folder)
