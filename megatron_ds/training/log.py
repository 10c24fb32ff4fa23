"""The log of a run: console lines, a progress bar, and the same records for metric sinks. On rank 0 only."""

import logging
import secrets
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager

from ..config import RunConfig
from ..ramps import Progress
from .metrics_file import MetricsFile
from .progress_bar import NoBar, ProgressBar, columns, is_terminal, make_bar
from .records import EvalRecord, Record, TrainRecord
from .sink import Sink, Tolerant
from .tensorboard import TensorBoard

SINKS = (MetricsFile, TensorBoard)
logger = logging.getLogger(__name__)


class Log:
    """Writes records to the console and to all sinks.

    A failing sink does not end the run (`sink.Tolerant`).
    """

    def __init__(self, sinks: Iterable[Sink] = (), bar: ProgressBar | NoBar | None = None):
        self.sinks = [Tolerant(sink) for sink in sinks]
        self.bar = bar or NoBar()

    def begin(self, step: int, steps: int) -> None:
        """Training starts after `step` of `steps`. Must be followed by `close`, also after an error."""
        self.bar.begin(step, steps)

    def advance(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Update the bar after a step."""
        self.bar.advance(step, loss, tokens_per_second)

    def train(self, record: TrainRecord) -> None:
        """Write the record of a logged interval."""
        self._write(record)

    def evaluating(self, split: str, batches: int, size: int) -> AbstractContextManager:
        """A context around an evaluation.

        It yields a function to call after each batch, of `size` samples.
        """
        logger.info("evaluating on %s: %d batch%s of %d samples", split, batches, "es" * (batches > 1), size)
        return self.bar.evaluating(split, batches)

    def evaluation(self, record: EvalRecord) -> None:
        """Write the record of a finished evaluation."""
        self._write(record)

    def close(self) -> None:
        """Remove the bar, and report how many records could not be written."""
        self.bar.close()
        for sink in self.sinks:
            sink.close()

    def _write(self, record: Record) -> None:
        logger.info("%s", console_text(record))
        for sink in self.sinks:
            sink.write(record)


def console_text(record: Record) -> str:
    """Megatron's line; on a terminal that is too narrow for it, the short one."""
    text = record.line()
    widest = max(map(len, text.splitlines()))
    return record.short() if is_terminal(sys.stdout) and widest > columns() else text


def check_log(config: RunConfig) -> None:
    """Raises ConfigError, naming the flag, for a sink whose file or folder cannot be written."""
    for sink in SINKS:
        sink.check(config)


def open_log(config: RunConfig, progress: Progress, run_id: str | None = None) -> Log:
    """The log of rank 0, with the sinks that the config enables.

    progress  where the run starts; TensorBoard drops points of earlier processes beyond it
    run_id    the same after each resume; None: a new random id
    """
    opened = (sink.open(config, progress, run_id or secrets.token_hex(8)) for sink in SINKS)
    return Log((sink for sink in opened if sink is not None), make_bar(config.logging.progress_bar))
