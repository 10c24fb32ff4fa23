"""The log of a run: lines and a progress bar for people, and the same records for metric sinks. Only rank 0 has one."""

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
    """The console and every sink that the config asks for. A failing sink never raises (`sink.Tolerant`)."""

    def __init__(self, sinks: Iterable[Sink] = (), bar: ProgressBar | NoBar | None = None):
        self.sinks = [Tolerant(sink) for sink in sinks]
        self.bar = bar or NoBar()

    def begin(self, step: int, steps: int) -> None:
        """Training starts with `step` of `steps` done. `close` must follow, also after an error."""
        self.bar.begin(step, steps)

    def advance(self, step: int, loss: float, tokens_per_second: float) -> None:
        """After each step: move the bar."""
        self.bar.advance(step, loss, tokens_per_second)

    def train(self, record: TrainRecord) -> None:
        self._write(record)

    def evaluating(self, split: str, batches: int, size: int) -> AbstractContextManager:
        """An evaluation begins; the context yields a function to call after each batch."""
        logger.info("evaluating on %s: %d batch%s of %d samples", split, batches, "es" * (batches > 1), size)
        return self.bar.evaluating(split, batches)

    def evaluation(self, record: EvalRecord) -> None:
        self._write(record)

    def close(self) -> None:
        """Remove the bar, and report records that could not be written."""
        self.bar.close()
        for sink in self.sinks:
            sink.close()

    def _write(self, record: Record) -> None:
        logger.info("%s", console_text(record))
        for sink in self.sinks:
            sink.write(record)


def console_text(record: Record) -> str:
    """Megatron's line, or on a terminal that is narrower than it, a short one."""
    text = record.line()
    widest = max(map(len, text.splitlines()))
    return record.short() if is_terminal(sys.stdout) and widest > columns() else text


def check_log(config: RunConfig) -> None:
    """Raises ConfigError, naming the flag, for a sink that could not be written to."""
    for sink in SINKS:
        sink.check(config)


def open_log(config: RunConfig, progress: Progress, run_id: str | None = None) -> Log:
    """The log of rank 0.

    progress  where the run stands; TensorBoard's points beyond it are superseded
    run_id    the same for all processes of a run (None: made here)
    """
    opened = (sink.open(config, progress, run_id or secrets.token_hex(8)) for sink in SINKS)
    return Log((sink for sink in opened if sink is not None), make_bar(config.logging.progress_bar))
