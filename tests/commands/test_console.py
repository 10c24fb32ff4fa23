"""What a terminal and a log show of paths with control characters, of a full disk, and of paths too long."""

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ds.checkpoint.folder import check_writable, write_durably
from megatron_ds.checkpoint.save_folder import move_aside
from megatron_ds.cli import main_guard
from megatron_ds.config.sources.reading import ConfigProblems
from megatron_ds.console import one_line, paragraph, printable, set_up_logging
from megatron_ds.errors import CheckpointError
from tests.checkpoint.test_save_folder import checkpoint
from tests.harness.deaths import forked, survived

pytestmark = pytest.mark.plan

ROOT = Path(__file__).parents[2]
FORGED = "a\nerror: fake line\x1b[31m"


@pytest.fixture
def console():
    """A log in memory; afterwards the root logger is as before."""
    root, stream = logging.getLogger(), io.StringIO()
    before = root.handlers[:], root.level
    try:
        root.handlers = []
        set_up_logging(logging.INFO, stream=stream)
        yield stream
    finally:
        root.handlers, root.level = before


def test_controls_are_shown_as_escapes_and_other_letters_as_they_are():
    assert (
        printable("a\x1b[0m\rb\x7f\x9b\n\tc\u2028é漢😀")
        == "a\\x1b[0m\\x0db\\x7f\\x9b\n\tc\\u2028é漢😀"
    )
    assert one_line(FORGED) == "a\\nerror: fake line\\x1b[31m"
    assert printable(os.fsdecode(b"\xff\xfe")) == "\\xff\\xfe"


def test_a_value_in_a_log_message_is_one_line_and_a_table_keeps_its_lines(console):
    log = logging.getLogger("test")
    log.info("saved %s in %.1f s", Path(FORGED), 1.5)
    log.info("loaded %s: %s", FORGED, OSError(2, "gone", FORGED))
    log.info("%s", "one\ntwo\x1b")
    log.info("100 % as it is\x07")
    assert console.getvalue().splitlines() == [
        "saved a\\nerror: fake line\\x1b[31m in 1.5 s",
        "loaded a\\nerror: fake line\\x1b[31m: [Errno 2] gone: 'a\\nerror: fake line\\x1b[31m'",
        "one",
        "two\\x1b",
        "100 % as it is\\x07",
    ]


def test_an_error_is_one_paragraph_and_a_list_of_problems_keeps_its_lines(capsys):
    def fail(error):
        raise error

    main_guard(lambda: fail(CheckpointError(f"--save {FORGED}: full")), rank=0)
    assert (
        capsys.readouterr().err == "error: --save a\\nerror: fake line\\x1b[31m: full\n"
    )
    problems = ConfigProblems([f"--save {FORGED}", "--lr 0"])
    shown = paragraph(str(problems)).splitlines()[1:]
    assert shown == ["  1. --save a\\nerror: fake line\\x1b[31m", "  2. --lr 0"]
    assert (
        main_guard(lambda: fail(OSError(36, "File name too long", "x" * 5000)), rank=0)
        == 2
    )
    assert "a path is longer than" in capsys.readouterr().err


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_full_disk_under_stdout_is_said_once(capsys, console):
    set_up_logging(logging.INFO, stream=Full())
    for step in range(5):
        logging.getLogger("test").info("step %d", step)
    assert capsys.readouterr().err == (
        "warning: log lines cannot be written (No space left on device) and are lost; the run goes on\n"
    )


def test_a_name_that_the_terminal_cannot_encode_is_escaped():
    code = (
        "import logging, os; from megatron_ds.console import set_up_logging; set_up_logging(20); "
        "logging.info('saved %s %s', os.fsdecode(b'\\xff'), 'é')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (done.stdout, done.stderr) == ("saved \\xff \\xe9\n", "")


# ------------------------------------------------------------------ files
@pytest.mark.parametrize("length", [3950, 4060, 5000])
def test_a_folder_whose_files_would_have_paths_too_long_is_refused_at_the_start(
    tmp_path, length
):
    path = f"{tmp_path}/" + "/".join(["d" * 99] * 60)
    with pytest.raises(
        CheckpointError, match="can be written there .*(too long|longer than 3,935)"
    ):
        check_writable(Path(path[:length].rstrip("/")))


def test_a_write_beyond_the_limit_of_a_file_names_the_path(tmp_path):
    def write():
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        with pytest.raises(OSError, match=rf"File too large: '{tmp_path}/tracker'"):
            write_durably(tmp_path / "tracker", "1" * 11)
        with pytest.raises(
            CheckpointError, match=rf"cannot save .*File too large: '{tmp_path}/\.lock"
        ):
            checkpoint(tmp_path, 1)

    assert survived(forked(write))


def test_another_run_is_moved_aside_twice_in_one_second(tmp_path):
    from datetime import datetime

    now, names = datetime(2026, 11, 26), []
    for _ in range(3):
        checkpoint(tmp_path, 1)
        names.append(move_aside(tmp_path, now).name)
    assert names == [f"replaced-aa11-20261126-000000{end}" for end in ("", "-2", "-3")]
