"""Stop signals outside the training loop: during imports, start-up and exit. Signals are raised by the
process itself."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ds.cli import GRACEFUL, Stopped, StopRequest, main_guard
from tests.harness.limits import HUNG

pytestmark = pytest.mark.plan

ROOT = Path(__file__).parents[2]
# A command whose import, function or interpreter exit receives the signal; `megatron_ds` itself is not slow
# to import.
MODULE = """
import atexit, os, signal
at = os.environ["AT"]
send = lambda: signal.raise_signal(int(os.environ["SIGNAL"]))
if at == "import":
    send()
def main():
    atexit.register(send if at == "exit" else int)
    return 0
"""


@pytest.mark.parametrize("number", GRACEFUL)
def test_a_signal_during_start_up_of_one_rank_raises_at_once_and_ends_the_command_with_code_0(
    capsys, number
):
    def start_up() -> int:
        with StopRequest():
            signal.raise_signal(number)
            raise AssertionError("start-up went on")

    assert main_guard(start_up) == 0
    assert (
        f"stopped by {signal.Signals(number).name} before the first step"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("number", GRACEFUL)
def test_a_deferred_signal_is_noted_and_the_handlers_are_put_back(number):
    before = [signal.getsignal(n) for n in GRACEFUL]
    with StopRequest() as stop:
        stop.defer()
        signal.raise_signal(number)
        assert stop.received == signal.Signals(number).name
    assert [signal.getsignal(n) for n in GRACEFUL] == before


def test_a_second_ctrl_c_ends_the_command_as_a_shell_expects():
    def impatient() -> int:
        with StopRequest() as stop:
            stop.defer()
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    assert main_guard(impatient) == 130


def test_no_handler_of_exceptions_on_the_way_swallows_a_stop():
    with pytest.raises(Stopped), StopRequest():
        try:
            signal.raise_signal(signal.SIGTERM)
        except Exception:  # noqa: BLE001  what third-party code does
            pass


@pytest.mark.parametrize("at", ["import", "exit"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_entry_scripts_exit_with_code_0_when_signalled_in_their_imports_or_after_their_end(
    tmp_path, at, number
):
    (tmp_path / "slow_module.py").write_text(MODULE)
    command = (
        "from megatron_ds.cli import run_command; run_command('slow_module', 'main')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HUNG,
        env=os.environ
        | {"AT": at, "SIGNAL": str(int(number)), "PYTHONPATH": f"{ROOT}:{tmp_path}"},
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ("before the first step" in ended.stdout) == (at == "import")


@pytest.mark.parametrize("script", ["pretrain_gpt.py", "pretrain_bert.py"])
def test_the_entry_scripts_import_nothing_slow_before_they_handle_signals(
    tmp_path, script
):
    (tmp_path / "torch.py").write_text(
        "import signal; signal.raise_signal(signal.SIGINT)"
    )
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import runpy; runpy.run_path({script!r}, run_name='__main__')",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HUNG,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    assert (ended.returncode, ended.stderr) == (
        0,
        "",
    ) and "stopped by SIGINT" in ended.stdout


def test_a_rank_of_several_that_is_signalled_in_its_imports_goes_on_to_where_ranks_agree(
    tmp_path,
):
    (tmp_path / "slow_module.py").write_text(
        MODULE + "from megatron_ds.cli import StopRequest\n"
        "def main():\n    with StopRequest() as stop:\n        "
        "print(stop.received)\n"
    )
    command = (
        "from megatron_ds.cli import run_command; run_command('slow_module', 'main')"
    )
    environment = {
        "AT": "import",
        "SIGNAL": str(int(signal.SIGTERM)),
        "RANK": "1",
        "WORLD_SIZE": "2",
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
    }
    ended = subprocess.run(
        [sys.executable, "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HUNG,
        env=os.environ | environment,
    )
    assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", "SIGTERM\n")


def test_without_torch_an_entry_script_says_which_environment_to_activate(tmp_path):
    (tmp_path / "torch.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    )
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            "import runpy; runpy.run_path('pretrain_gpt.py', run_name='__main__')",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HUNG,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    assert ended.returncode == 2 and ended.stderr.startswith(
        "error: torch is not installed in this Python"
    )
    assert (
        "source .venv/bin/activate" in ended.stderr and "Traceback" not in ended.stderr
    )
