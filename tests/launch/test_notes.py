"""What the launcher prints fits a terminal of 80 columns, and is one line each in a log."""

import contextlib
import io
import os
import pty
import termios

import pytest

from megatron_ds.extensions.launch.failures import Failure
from megatron_ds.extensions.launch.notes import note
from megatron_ds.extensions.launch.rank_places import (
    RankPlace,
    behind,
    hang_text,
    table_text,
)
from megatron_ds.extensions.launch.supervise import ranks_text
from tests.launch.test_job import JOB

pytestmark = pytest.mark.plan

PLACE = {
    "step": 15,
    "phase": "training",
    "instruction": "F",
    "stage": 0,
    "microbatch": 2,
    "collective": "all_reduce over tp-cp-dp-pp",
    "collectives": 75,
}
RANKS = [RankPlace(i, f"worker-{i}", idle_seconds=9.2 + i, **PLACE) for i in range(3)]
WRITTEN = f"Traceback\n    x = {'1 + ' * 30}1\nRuntimeError: a  mistake"
FAILURE = Failure(1, 0, "n1", -9, 5.0, WRITTEN, "/logs/rank1.log", "step 15, training")
TEXTS = {
    "hang": f"{table_text(RANKS)}\n{hang_text(behind(RANKS), 3)}",
    "failure": FAILURE.text(),
    "ranks": ranks_text(JOB),
}


def on_terminal(text: str, kept: str) -> str:
    """What a terminal of 80 columns gets, to which errors go."""
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (24, 80))
    with open(writer, "w") as stream, contextlib.redirect_stderr(stream):
        note(text, kept)
    # The terminal has what was written until it is read.
    shown = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(reader, 1 << 16):
            shown += chunk
    os.close(reader)
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("name", TEXTS)
def test_lines_fit_the_terminal_with_all_their_words(name):
    text = on_terminal(TEXTS[name], WRITTEN)
    assert text.split() == ["megatron-ds", "launch:", *TEXTS[name].split()]
    own = [line for line in text.split("\n") if line not in WRITTEN.split("\n")]
    assert max(map(len, own)) <= 80
    # The lines of a rank stay as they are.
    assert name != "failure" or f"\n{WRITTEN}\n" in text


def test_a_log_has_whole_lines():
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream):
        note(TEXTS["hang"])
    assert stream.getvalue() == f"megatron-ds launch: {TEXTS['hang']}\n"
    assert max(map(len, stream.getvalue().split("\n"))) > 80
