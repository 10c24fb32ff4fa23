"""What a person sees of a run: the progress bar on a terminal, short lines on a narrow one, why training
ended."""

import contextlib
import fcntl
import io
import logging
import os
import re
import select
import struct
import sys
import termios
import threading
import time
from dataclasses import replace

import pytest

from megatron_ds.config import CheckpointConfig
from megatron_ds.console import set_up_logging
from megatron_ds.progress.ramps import Progress
from megatron_ds.training.observe.data_stalls import stall_text
from megatron_ds.training.observe.log import open_log
from megatron_ds.training.step_metrics import stop_reason
from tests.training.test_train_log import EVALUATION, changed, logging_to

pytestmark = pytest.mark.plan

END = "<end of what was shown>"


class Terminal:
    """A pseudo terminal as stdout of this process, with the handler that a run's log has.

    A thread reads what the terminal shows: it holds a few kilobytes, and a write to a full one waits.
    """

    def __init__(self, patch: pytest.MonkeyPatch, columns: int):
        self.ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream = open(theirs, "w", encoding="utf-8")
        patch.setattr(sys, "stdout", self.stream)
        patch.setattr(sys, "__stdout__", self.stream)  # whose width shutil asks for
        for name in ("COLUMNS", "LINES"):
            patch.delenv(name, raising=False)
        patch.setenv("TERM", "xterm")
        self.handler = logging.StreamHandler(self.stream)
        root = logging.getLogger()
        patch.setattr(root, "handlers", [*root.handlers, self.handler])
        root.setLevel(logging.INFO)
        self.received, self.ended = b"", threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        while not self.ended.is_set():
            if select.select([self.ours], [], [], 0.01)[0]:
                self.received += os.read(self.ours, 1 << 16)

    def shown(self) -> str:
        """What the terminal showed so far."""
        self.stream.write(END)
        self.stream.flush()
        while END.encode() not in self.received:  # a terminal passes text on in parts
            time.sleep(0.01)
        return self.received.decode().partition(END)[0]

    def hang_up(self) -> None:
        """Close the terminal's end: writes to the other end fail from here on."""
        self.ended.set()
        self.reader.join()
        os.close(self.ours)


@pytest.fixture
def terminal(monkeypatch):
    opened, level = [], logging.getLogger().level

    def open_terminal(columns: int) -> Terminal:
        opened.append(Terminal(monkeypatch, columns))
        return opened[-1]

    yield open_terminal
    logging.getLogger().setLevel(
        level
    )  # `setLevel`, since loggers remember which levels are on
    for one in opened:
        if not one.ended.is_set():  # a test may have closed our end
            one.hang_up()
        with contextlib.suppress(OSError):
            one.stream.close()


def run(config) -> None:
    """Four steps, of which the second and fourth have a log line, and an evaluation of two batches."""
    log = open_log(config, Progress())
    log.begin(0, 4)
    for step in range(1, 5):
        log.advance(step, loss=7.0 - step, tokens_per_second=41200.0)
        if step % 2 == 0:
            log.write(
                changed(
                    step=step, steps=4, loss=7.0 - step, skipped_steps=0, nan_steps=0
                )
            )
    with log.evaluating("validation", 2, 8) as after_batch:
        after_batch()
        after_batch()
    log.write(EVALUATION)
    log.close()
    logging.getLogger().info("training ended")


def drawn(shown: str) -> list[str]:
    """What was drawn one over the other or below one another, without the control characters."""
    return [re.sub("\x1b\\[.", "", part).strip() for part in re.split("[\r\n]+", shown)]


def no_files(tmp_path, **logging):
    config = logging_to(tmp_path, **logging)
    return replace(config, checkpoint=CheckpointConfig())


def test_a_terminal_has_a_bar_with_log_lines_above_it(tmp_path, terminal):
    screen = terminal(100)
    run(no_files(tmp_path))
    lines = drawn(screen.shown())
    bars = [line for line in lines if re.match(r"step \d/4 \|", line)]
    assert bars[0].startswith("step 0/4 |") and bars[-1].startswith("step 4/4 |")
    assert re.search(r"\| 100%, loss 3.0000 \| 41.2k tok/s \| ETA 00:00$", bars[-1])
    assert [line for line in lines if line.startswith("step 2/4 | ")] == [
        "step 2/4 | loss 5.0000 | grad norm 0.412 | lr 2.94e-04 | 425k tok/s | 38.1% MFU | ETA 1:18:11"
    ]
    assert [line for line in lines if line.startswith("validation 0/2 |")], (
        "the evaluation has a bar while it lasts"
    )
    assert lines.index(
        "evaluating on validation: 2 batches of 8 samples"
    ) < lines.index(EVALUATION.short(100))
    assert lines[-2:] == ["training ended", ""] and lines[-3] == "", (
        "the bar is removed, and lines are plain again"
    )


def test_lines_and_bars_fit_80_columns(tmp_path, terminal):
    screen = terminal(80)
    run(no_files(tmp_path))
    lines = drawn(screen.shown())
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.startswith("step 2/4 | ")] == [
        "step 2/4 | loss 5.0000 | grad norm 0.412 | lr 2.94e-04 | 425k tok/s | 38.1% MFU"
    ]
    bars = [line for line in lines if re.search(r"\| ETA [\d?]", line)]
    assert {bar.split()[0] for bar in bars} == {"step", "validation"}


@pytest.mark.parametrize("columns", [80, 57])
def test_other_text_of_a_run_is_broken_between_words(monkeypatch, terminal, columns):
    screen = terminal(columns)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    set_up_logging(logging.INFO)
    path = "/data/" + "long/" * 20 + "file"
    text = f"kernels: {'adamw c++, gelu c++, ' * 9}all\n  stage 0:  100.0%  {'layer ' * 19}\n\nin {path} of a run"
    logging.getLogger().info("%s", text)
    lines = screen.shown().split("\r\n")
    assert all(len(line) <= columns or line.strip() == path for line in lines)
    assert "".join(" ".join(lines).split()) == "".join(text.split()), "nothing is lost"
    assert lines[1].startswith("  ") and "      layer" not in lines[0]
    assert any(line.startswith("  stage 0:  100.0%  layer") for line in lines)
    assert any(line.startswith("    layer") for line in lines)


def test_text_for_a_file_is_not_broken(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    set_up_logging(logging.INFO)
    logging.getLogger().info("%s", "word " * 100)
    assert capsys.readouterr().out == "word " * 100 + "\n"


def test_a_terminal_wide_enough_has_megatrons_line(tmp_path, terminal):
    screen = terminal(600)
    run(no_files(tmp_path))
    lines = drawn(screen.shown())
    assert sum("| elapsed time per iteration (ms):" in line for line in lines) == 2
    assert not [line for line in lines if line.startswith("step 2/4 | ")]


@pytest.mark.parametrize("why", ["the flag", "a dumb terminal", "a file"])
def test_without_a_bar_there_are_lines_alone(tmp_path, terminal, monkeypatch, why):
    screen = terminal(100)
    if why == "a dumb terminal":
        monkeypatch.setenv("TERM", "dumb")
    if why == "a file":
        monkeypatch.setattr(sys, "stdout", io.StringIO())
    run(no_files(tmp_path, progress_bar=why != "the flag"))
    shown = screen.shown()
    assert (
        "\x1b" not in shown
        and "\r" not in shown.replace("\r\n", "\n")
        and "%," not in shown
    )
    assert ("elapsed time per iteration" in shown) == (why == "a file"), (
        "a file has Megatron's line at any width"
    )


def test_a_terminal_that_is_closed_ends_no_run(tmp_path, terminal, monkeypatch):
    screen = terminal(100)
    monkeypatch.setattr(
        logging, "raiseExceptions", False
    )  # the log handler's own complaint, on stderr
    log = open_log(logging_to(tmp_path), Progress())
    log.begin(0, 4)
    screen.hang_up()
    for step in range(1, 5):
        log._bar.mininterval = 0
        log.advance(step, loss=1.0, tokens_per_second=1.0)
        log.write(changed(step=step))
    with log.evaluating("validation", 1, 8) as after_batch:
        after_batch()
    log.close()
    with pytest.raises(OSError):
        os.write(screen.stream.fileno(), b"text")
    assert len((tmp_path / "save" / "metrics.jsonl").read_text().splitlines()) == 4


# ------------------------------------------------------------------ why training ended, why it waits
@pytest.mark.parametrize(
    "requests, words",
    [
        ([("SIGINT", None)], "received SIGINT"),
        ([(None, 30.0)], "time limit of 30 min reached"),
        ([(None, None)] * 3 + [("SIGTERM", None)], "rank 3 received SIGTERM"),
        ([("SIGTERM", None)] * 8, "all 8 ranks received SIGTERM"),
        (
            [("SIGTERM", None), (None, None), ("SIGTERM", None)],
            "ranks 0, 2 received SIGTERM",
        ),
        (
            [("SIGUSR1", 0.05), ("SIGTERM", None), (None, 0.05)],
            "rank 0 received SIGUSR1, rank 1 received SIGTERM, time limit of 0.05 min reached",
        ),
    ],
)
def test_the_reason_for_stopping_names_ranks_signals_and_the_limit(requests, words):
    assert stop_reason([(*request, None) for request in requests]) == words


def test_waiting_for_mock_data_is_not_blamed_on_a_disk():
    mock, corpus = stall_text(0.18, 2, mock=True), stall_text(0.18, 2, mock=False)
    assert (
        mock.startswith("18% of a step is waiting for mock data")
        and "no disk is read" in mock
    )
    assert "disk is the limit" in corpus and "disk is the limit" not in mock
    assert "--num-workers (now 2)" in mock and "--num-workers (now 2)" in corpus
