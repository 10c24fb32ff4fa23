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
from contextlib import contextmanager
from functools import cache
from typing import Any, TextIO

from ...config import RunConfig
from ...features import metric_sinks
from ...progress.ramps import Progress
from .metrics_file import MetricsFile, check_metrics_file, metrics_path
from .records import Record, rate
from .run_facts import Fact
from .sink import Continuing, Sink, Tolerant

logger = logging.getLogger(__name__)
FORMAT = (
    "step {n_fmt}/{total_fmt} |{bar}| {percentage:3.0f}%{postfix} | ETA {remaining}"
)
EVALUATION_FORMAT = "{desc} {n_fmt}/{total_fmt} |{bar}| ETA {remaining}"


class _Above:
    """A stream for a log handler: writes to the real stream, above its bars."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> None:
        _tqdm().write(text, file=self._stream, end="")

    def flush(self) -> None:
        self._stream.flush()


@cache
def _tqdm() -> type[Any]:
    """Return tqdm without its monitor thread and its lock between processes: only one thread of rank 0 draws."""
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0

    Bar.set_lock(threading.RLock())
    return Bar


class Log:
    """Writes records to the console and to all sinks. Draws a bar for the steps, and one for an evaluation.

    A failing sink does not end the run (`sink.Tolerant`), nor does a closed terminal, which removes the bar.
    """

    def __init__(self, sinks: Iterable[Sink] = (), stream: TextIO | None = None):
        """stream: where bars are drawn; None: nowhere."""
        self.sinks = [Tolerant(sink) for sink in sinks]
        self._stream = stream
        self._bar = None
        self._redirected: list[logging.StreamHandler] = []

    def begin(self, step: int, steps: int) -> None:
        """Training starts after `step` of `steps`. Must be followed by `close`, also after an error.

        Until then, log lines on the bar's stream are printed above the bar.
        """
        if self._stream is None:
            return
        self._bar = self._new(total=steps, initial=step, bar_format=FORMAT)
        for handler in logging.getLogger().handlers:
            if not isinstance(handler, logging.StreamHandler):
                continue
            if handler.stream is self._stream:
                handler.stream = _Above(self._stream)
                self._redirected.append(handler)

    def advance(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Update the bar after a step. tqdm draws at most ten times a second."""
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"loss {loss:.4f} | {rate(tokens_per_second)}", refresh=False
            )
            self._attempt(lambda: self._bar.update(step - self._bar.n))

    def write(self, record: Record) -> None:
        """Write the record of a logged interval, or of a finished evaluation."""
        logger.info("%s", console_text(record))
        for sink in self.sinks:
            sink.write(record)

    def note(self, fact: Fact) -> None:
        """Write a record that only metrics.jsonl keeps."""
        for sink in self.sinks:
            if isinstance(sink.sink, MetricsFile):
                sink.write(fact)

    @contextmanager
    def evaluating(
        self, split: str, batches: int, size: int
    ) -> Iterator[Callable[[], Any]]:
        """A context around an evaluation. Yields a function to call after each batch, of `size` samples."""
        logger.info(
            "evaluating on %s: %d batch%s of %d samples",
            split,
            batches,
            ("es" if batches > 1 else ""),
            size,
        )
        # Not `self._bar and …`: a tqdm bar of 0 steps is false.
        bar = None
        if self._bar is not None:
            bar = self._new(total=batches, desc=split, bar_format=EVALUATION_FORMAT)
        if bar is None:
            yield lambda: None
            return
        try:
            yield lambda: self._attempt(bar.update)
        finally:
            self._attempt(bar.close)

    def close(self) -> None:
        """Remove the bar, and report how many records could not be written."""
        self._remove_bar()
        for sink in self.sinks:
            sink.close()

    def _remove_bar(self) -> None:
        """Remove the bar; log lines are written directly to the stream again."""
        for handler in self._redirected:
            # `setStream` would flush, which fails on a closed terminal.
            handler.stream = self._stream
        self._redirected.clear()
        bar = self._bar
        self._bar = None
        if bar is not None:
            self._attempt(bar.close)

    def _new(self, **options: Any) -> Any:
        """Return a new tqdm bar; None when the terminal fails."""
        return self._attempt(
            lambda: _tqdm()(
                file=self._stream, dynamic_ncols=True, leave=False, **options
            )
        )

    def _attempt(self, draw: Callable[[], Any]) -> Any:
        try:
            return draw()
        except OSError:
            bar = self._bar
            self._bar = None
            if bar is not None:
                bar.disable = True
            self._remove_bar()
            return None


def console_text(record: Record) -> str:
    """Megatron's line; on a terminal that is too narrow for it, the short one."""
    text = record.line()
    widest = max(map(len, text.splitlines()))
    return (
        record.short()
        if _is_terminal() and widest > shutil.get_terminal_size().columns
        else text
    )


def _is_terminal() -> bool:
    return hasattr(sys.stdout, "isatty") and sys.stdout.isatty()


def check_log(config: RunConfig) -> None:
    """Raises ConfigError, naming the flag, for a sink whose file or folder cannot be written."""
    if path := metrics_path(config):
        check_metrics_file(path)
    for sink in metric_sinks(config):
        if sink.check is not None:
            sink.check(config)
        if sink.require is not None:
            sink.require()


def open_log(config: RunConfig, progress: Progress, run_id: str | None = None) -> Log:
    """Return the log of rank 0, with the sinks that the config enables.

    progress  where the run starts
    run_id    the same after each resume; None: a new random id
    """
    run_id = run_id or secrets.token_hex(8)
    sinks: list[Sink] = []
    if path := metrics_path(config):
        sinks.append(MetricsFile(path, run_id))
    # Sinks that are off are not loaded.
    sinks += [sink.make(config, run_id) for sink in metric_sinks(config)]
    for sink in sinks:
        if isinstance(sink, Continuing):
            sink.begin(progress)
    draws = (
        config.logging.progress_bar
        and _is_terminal()
        and os.environ.get("TERM") != "dumb"
    )
    return Log(sinks, sys.stdout if draws else None)
