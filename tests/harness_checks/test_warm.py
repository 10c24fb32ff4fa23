"""A command that starts warm ends as one of a fresh interpreter does."""

import subprocess
import sys

import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from tests.harness.limits import HUNG
from tests.harness.warm import cheapen_torchrun, warm_python

pytestmark = pytest.mark.processes


def ended(python: str, text: str) -> tuple[int, str, str]:
    """Exit code, output, and the last line of the errors."""
    done = subprocess.run(
        [python, "-c", text], capture_output=True, text=True, timeout=HUNG
    )
    return done.returncode, done.stdout, (done.stderr.splitlines() or [""])[-1]


@pytest.mark.parametrize(
    "text",
    [
        "print('done')",
        "import sys; sys.exit(3)",
        "import sys; sys.exit(-1)",
        "import sys; sys.exit('why')",
        "raise ValueError(3)",
        "raise KeyboardInterrupt",
        "import os; os.kill(os.getpid(), 15)",
        "import atexit; atexit.register(print, 'at exit'); print('done')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    ],
)
def test_a_warm_command_ends_as_a_cold_one(text):
    assert ended(warm_python(), text) == ended(sys.executable, text)


def test_the_cheap_name_of_the_method_that_torchrun_notes_is_the_one_that_it_finds(
    monkeypatch,
):
    def step():
        return note()

    def note():
        return dynamic_rendezvous.get_method_name()

    found = step()
    monkeypatch.setattr(
        dynamic_rendezvous, "get_method_name", dynamic_rendezvous.get_method_name
    )
    cheapen_torchrun()
    assert step() == found == "step"
