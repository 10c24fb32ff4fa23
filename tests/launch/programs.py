"""A program for the ranks of the launcher's tests: each rank does what PLAN names for it, and prints what it got.

PLAN is JSON: rank → action; "print" is that of the others.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

NAMES = (
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES",
    "A_VARIABLE",
    "MEGATRON_DS_RESTARTS",
    "MEGATRON_DS_RUN",
)


def be_at_work() -> None:
    """Show the others that this rank has begun."""
    print(f"rank {RANK} waits", flush=True)
    Path(f".at-work-{RANK}").touch()


def wait_for_others() -> None:
    """Wait until all others have begun."""
    ranks = {str(rank) for rank in range(int(os.environ["WORLD_SIZE"]))} - {RANK}
    while not all(Path(f".at-work-{rank}").exists() for rank in ranks):
        time.sleep(0.05)


def wait(*caught: int) -> None:
    """Wait for a signal, and end by exit code 0 as a training that has saved."""

    def stop(number: int, frame: object) -> None:
        print(f"rank {RANK} saves after {signal.Signals(number).name}", flush=True)
        time.sleep(1)
        print(f"rank {RANK} saved", flush=True)
        sys.exit(0)

    for number in caught:
        signal.signal(number, stop)
    be_at_work()
    while True:
        time.sleep(0.05)


def ignore() -> None:
    """Go on for ever, whatever asks this rank to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    be_at_work()
    while True:
        time.sleep(0.05)


def print_all() -> None:
    """Print the arguments and some variables in one line."""
    found = {name: os.environ.get(name) for name in NAMES}
    print(json.dumps({"rank": int(RANK), "words": sys.argv[1:], **found}), flush=True)
    Path(f".at-work-{RANK}").touch()


def fail() -> None:
    wait_for_others()
    raise RuntimeError(f"a mistake on rank {RANK}")


def kill_in_start(start: str) -> None:
    """Die by SIGKILL in this start; in others, print all."""
    if os.environ["MEGATRON_DS_RESTARTS"] == start:
        wait_for_others()
        os.kill(os.getpid(), signal.SIGKILL)
    print_all()


def fail_on_signal() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    be_at_work()
    time.sleep(3600)


def flood() -> None:
    """Print more than pipes hold."""
    print(f"rank {RANK} waits", flush=True)
    while True:
        print("x" * 200)


def leave_a_child() -> None:
    """End before a process that this rank has started."""
    subprocess.Popen(["sleep", "3600"])
    print_all()


def record_an_error() -> None:
    """Record an error of ten seconds ago, as a rank that is still closing its connections."""
    details = {"py_callstack": "a recorded mistake", "timestamp": time.time() - 10}
    text = json.dumps({"message": {"message": "a mistake", "extraInfo": details}})
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(text)
    be_at_work()
    time.sleep(3600)


ACTIONS = {
    "record an error": record_an_error,
    "flood": flood,
    "leave a child": leave_a_child,
    "print": print_all,
    "wait": lambda: wait(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1),
    "ignore": ignore,
    "fail": fail,
    "exit 2": lambda: sys.exit(2),
    "kill in start 0": lambda: kill_in_start("0"),
    "fail on SIGTERM": fail_on_signal,
    "exit 7": lambda: (wait_for_others(), sys.exit(7)),
    "kill": lambda: (wait_for_others(), os.kill(os.getpid(), signal.SIGKILL)),
    "bar": lambda: (
        print("50 %", end="\r", flush=True),
        time.sleep(0.5),
        print("100 %"),
    ),
}

if __name__ == "__main__":
    RANK = os.environ["RANK"]
    plan = json.loads(os.environ.get("PLAN", "{}"))
    ACTIONS[plan.get(RANK, plan.get("others", "print"))]()
