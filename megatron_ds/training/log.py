"""The log of a run: console lines, a progress bar, and the same records for metric sinks. On rank 0 only.

A progress bar on a terminal; log lines are printed above it.

    step 1200/5000 |████████▍                         |  24%, loss 2.8317 | 41.2k tok/s | ETA 1:18:11

The numbers are those of the step's report, already on the host. Without a terminal there is no bar.
"""

import logging
import os
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, TextIO

from ..config import RunConfig
from ..ramps import Progress
from .metrics_file import MetricsFile
from .records import EvalRecord, Record, TrainRecord, rate
from .sink import Sink, Tolerant
from .tensorboard import TensorBoard

SINKS = (MetricsFile, TensorBoard)
logger = logging.getLogger(__name__)
FORMAT = "step {n_fmt}/{total_fmt} |{bar}| {percentage:3.0f}%{postfix} | ETA {remaining}"
EVALUATION_FORMAT = "{desc} {n_fmt}/{total_fmt} |{bar}| ETA {remaining}"


def is_terminal(stream: TextIO) -> bool:
    """Whether the stream is a terminal."""
    return hasattr(stream, "isatty") and stream.isatty()


def columns() -> int:
    """Width of the terminal of stdout, in characters."""
    return shutil.get_terminal_size().columns


def make_bar(wanted: bool) -> "ProgressBar | NoBar":
    """A bar on stdout if `wanted` and stdout is a terminal that can draw one; else a `NoBar`."""
    draws = wanted and is_terminal(sys.stdout) and os.environ.get("TERM") != "dumb"
    return ProgressBar(sys.stdout) if draws else NoBar()


class NoBar:
    """The interface of `ProgressBar` without output."""

    def begin(self, step: int, steps: int) -> None:
        """Nothing to draw."""

    def advance(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Nothing to draw."""

    def close(self) -> None:
        """Nothing to remove."""

    @contextmanager
    def evaluating(self, what: str, batches: int) -> Iterator[Callable[[], Any]]:
        """Yields a function without effect."""
        yield lambda: None


class ProgressBar:
    """One bar for the steps of a run and, during an evaluation, one below it.

    An error of the terminal, for instance because it was closed, removes the bar and does not end the run.
    """

    def __init__(self, stream: TextIO):
        self._stream, self._bar, self._redirected = stream, None, []

    def begin(self, step: int, steps: int) -> None:
        """Draw the bar at `step` of `steps`. Until `close`, log lines on the stream are printed above it."""
        self._bar = self._new(total=steps, initial=step, bar_format=FORMAT)
        for handler in logging.getLogger().handlers:
            if getattr(handler, "stream", None) is self._stream:
                handler.stream = _Above(self._stream)
                self._redirected.append(handler)

    def advance(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Update the bar after a step. tqdm draws at most ten times a second."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f} | {rate(tokens_per_second)}", refresh=False)
            self._attempt(lambda: self._bar.update(step - self._bar.n))

    @contextmanager
    def evaluating(self, what: str, batches: int) -> Iterator[Callable[[], Any]]:
        """Yields a function to call after each batch."""
        # Not `self._bar and …`: a tqdm bar of 0 steps is false.
        bar = None if self._bar is None else self._new(total=batches, desc=what, bar_format=EVALUATION_FORMAT)
        if bar is None:
            yield lambda: None
            return
        try:
            yield lambda: self._attempt(bar.update)
        finally:
            self._attempt(bar.close)

    def close(self) -> None:
        """Remove the bar; log lines are written directly to the stream again."""
        for handler in self._redirected:
            handler.stream = self._stream     # `setStream` would flush, which fails on a closed terminal
        self._redirected.clear()
        bar, self._bar = self._bar, None
        if bar is not None:
            self._attempt(bar.close)

    def _new(self, **options: Any) -> Any:
        """A new tqdm bar; None when the terminal fails."""
        return self._attempt(lambda: _tqdm()(file=self._stream, dynamic_ncols=True, leave=False, **options))

    def _attempt(self, draw: Callable[[], Any]) -> Any:
        try:
            return draw()
        except OSError:
            bar, self._bar = self._bar, None
            if bar is not None:
                bar.disable = True
            self.close()
            return None


class _Above:
    """A stream for a log handler: writes to the real stream, above its bars."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> None:
        _tqdm().write(text, file=self._stream, end="")

    def flush(self) -> None:
        self._stream.flush()


@cache
def _tqdm() -> type:
    """tqdm without its monitor thread and its lock between processes: only one thread of rank 0 draws."""
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0

    Bar.set_lock(threading.RLock())
    return Bar


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
