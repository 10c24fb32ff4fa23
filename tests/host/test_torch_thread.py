"""Threads inside torch do not abort a process that ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.limits import HUNG

pytestmark = pytest.mark.processes

# Threads that are in torch's C++ code nearly all the time, until they are stopped.
PROGRAM = """
import sys, threading
from datetime import timedelta
import torch.distributed as dist
from megatron_ds.host import torch_thread as module

store = dist.HashStore()
stopped = threading.Event()

def wait():
    while not stopped.is_set():
        try:
            store.wait(["never"], timedelta(milliseconds=2))
        except RuntimeError:
            pass

for _ in range(20):
    if sys.argv[1] == "plain":
        threading.Thread(target=wait, daemon=True).start()
    else:
        module.torch_thread(wait, "waiting", stop=stopped.set)
sys.exit(2)
"""


def codes(kind: str, times: int) -> list[int]:
    """Exit codes of programs with such threads."""
    words = [sys.executable, "-c", PROGRAM, kind]
    folder = Path(__file__).parents[2]
    run = lambda: subprocess.run(words, cwd=folder, capture_output=True, timeout=HUNG)
    return [run().returncode for _ in range(times)]


@pytest.mark.quick
def test_a_process_ends_with_its_own_code():
    assert codes("ours", 3) == [2] * 3


def test_plain_threads_abort_the_process():
    """Without this the test above shows nothing. It ends at the first one of several processes."""
    assert any(codes("plain", 1) == [-6] for _ in range(10))


def test_a_thread_that_does_not_stop_is_waited_for_a_while_only():
    import threading

    from megatron_ds.host.torch_thread import end_threads, torch_thread

    over = threading.Event()
    thread = torch_thread(over.wait, "waiting")
    end_threads(longest=0.1)
    assert thread.is_alive()
    over.set()
    end_threads(longest=60)
    assert not thread.is_alive()


def test_a_command_that_fails_ends_with_its_code_though_threads_of_pools_wait_for_work():
    """Threads of a loader live until the end, since errors keep references to it."""
    program = (
        "import sys; from concurrent.futures import ThreadPoolExecutor; from megatron_ds import cli; "
        "pool = ThreadPoolExecutor(2); pool.submit(int).result(); print('printed'); cli._end_process(2)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HUNG
    )
    assert (done.returncode, done.stdout) == (2, "printed\n")
