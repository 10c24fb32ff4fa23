"""`Monitor`: curves of a run for TensorBoard, under DeepSpeed's names, with samples on the x-axis.

    Train/Samples/train_loss    mean of the losses given to `backward` since the last update, on rank 0
    Train/Samples/lr            the learning rate of the first parameter group
    Train/Samples/loss_scale    fp16 only

The config's "tensorboard" block enables it; a program writes its own curves with
`engine.monitor.write_events`. As in a training script, a disk error is reported once and does not end the
program (training/sink.py).
"""

from collections.abc import Iterable
from pathlib import Path

import torch

from ..training.sink import Tolerant, check_folder
from ..training.tensorboard import EventFile

Event = tuple[str, float, int]


class Monitor:
    """Writes event files into `folder` on global rank 0. None, on the other ranks: events are dropped."""

    def __init__(self, folder: str | None):
        """Raises ConfigError where the folder is not writable."""
        self._sink = None if folder is None else Tolerant(_Curves(Path(folder)))
        self._losses: list[torch.Tensor] = []

    @property
    def enabled(self) -> bool:
        """Whether curves are written: on global rank 0, when the config asks for them."""
        return self._sink is not None

    def write_events(self, events: Iterable[Event]) -> None:
        """events: (name of the curve, value, number of samples)"""
        for event in events if self.enabled else ():
            self._sink.write(event)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Keep the loss of a micro-batch.

        It is read in `end_step`, after the update, without stalling the device.
        """
        if self.enabled:
            self._losses.append(loss.detach())

    def end_step(self, samples: int, lr: float, loss_scale: float | None) -> None:
        """Write the curves' points of an update. samples: their number so far, the x-coordinate."""
        if not self.enabled:
            return
        losses, self._losses = self._losses, []
        mean = sum(loss.item() for loss in losses) / len(losses) if losses else None
        points = {"train_loss": mean, "lr": lr, "loss_scale": loss_scale}
        self.write_events((f"Train/Samples/{name}", value, samples)
                          for name, value in points.items() if value is not None)


class _Curves:
    """A sink that writes one event file."""

    def __init__(self, folder: Path):
        check_folder('"tensorboard.output_path"', folder)
        self.place, self._file = folder, EventFile(folder)

    def write(self, event: Event) -> None:
        name, value, samples = event
        self._file.add({name: float(value)}, samples)
