"""`Monitor`: the curves of an engine, under DeepSpeed's names, with samples on the x-axis.

    Train/Samples/train_loss    mean of the losses given to `backward` since the last update, on rank 0
    Train/Samples/lr            the learning rate of the first parameter group
    Train/Samples/loss_scale    fp16 only

The config's blocks "tensorboard", "csv_monitor", "wandb" and "comet" enable them; a program writes its own
curves with `engine.monitor.write_events`. The sinks are those of a training script
(training/observe/sink.py): an error of a disk or a service is reported once and does not end the program.
"""

import logging
import secrets
from collections.abc import Iterable, Iterator
from typing import cast

import torch

from ...config import RunConfig
from ...errors import ConfigError
from ...features import metric_sinks
from ...mpu.host_reads import read_number
from ...training.observe.sink import (
    PointSink,
    Sink,
    Tolerant,
)
from .json_settings import in_words_of_json

logger = logging.getLogger(__name__)


def sinks_of(config: RunConfig) -> Iterator[PointSink]:
    """Yield the sinks that the JSON enables. Raises ConfigError where a folder is not writable.

    A service whose package is missing, or that cannot begin, is left out with a warning: a program that only asks for
    curves goes on without them.
    """
    for service in metric_sinks(config):
        if service.points is None:
            continue
        if service.check is not None:
            service.check(config)
        try:
            if service.require is not None:
                service.require()
            sink = service.points(config, secrets.token_hex(8))
        except ConfigError as error:
            logger.warning("no curves there: %s", in_words_of_json(str(error)))
            continue
        yield sink


class Monitor:
    """Writes the curves of a config. config: None on ranks that write nothing"""

    def __init__(self, config: RunConfig | None):
        """Raises ConfigError where a folder is not writable."""
        self._losses: list[torch.Tensor] = []
        try:
            found = [] if config is None else list(sinks_of(config))
        except ConfigError as error:
            raise ConfigError(in_words_of_json(str(error))) from error
        # It gives a sink what it gets itself: here points in place of records.
        self._sinks = [Tolerant(cast(Sink, sink)) for sink in found]

    @property
    def enabled(self) -> bool:
        """Whether curves are written: on global rank 0, when the config asks for them."""
        return bool(self._sinks)

    def write_events(self, events: Iterable[tuple[str, float, int]]) -> None:
        """events: (name of the curve, value, number of samples)"""
        for name, value, samples in events if self.enabled else ():
            for sink in self._sinks:
                sink.write({name: float(value)}, samples)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Keep the loss of a micro-batch. `end_step` reads it, without stalling the device."""
        if self.enabled:
            self._losses.append(loss.detach())

    def end_step(self, samples: int, lr: float, loss_scale: float | None) -> None:
        """Write the curves' points of an update. samples: their number so far, the x-coordinate."""
        if not self.enabled:
            return
        losses = self._losses
        self._losses = []
        mean = sum(map(read_number, losses)) / len(losses) if losses else None
        points = {"train_loss": mean, "lr": lr, "loss_scale": loss_scale}
        self.write_events(
            (f"Train/Samples/{name}", value, samples)
            for name, value in points.items()
            if value is not None
        )

    def close(self) -> None:
        """Send or complete what is waiting, once."""
        for sink in self._sinks:
            sink.close()
        self._sinks = []
