"""Child of `test_stores.py`: saves into a store in forked processes that SIGKILL ends at random moments.

Run as `python -m tests.checkpoint.killed_store_saves s3://bucket/run KILLS SEED`. torch is imported once. A saver
reports each step when its save has returned; after its death a forked reader loads the newest checkpoint, which must
be, to the bit, the last one that was reported or the one behind it.
"""

import os
import random
import signal
import sys
import time

import torch
import torch.distributed.checkpoint  # noqa: F401  before the forks

from megatron_ds.checkpoint.load import latest, load
from megatron_ds.checkpoint.save import save
from megatron_ds.mpu.group import solo
from tests.harness.states import Layout, pieces_of


def save_until_killed(store: str, report: int) -> None:
    """Save step after step, behind the newest one, and write a byte for each that is complete."""
    newest = latest(store) or 0
    while True:
        newest += 1
        pieces = pieces_of(Layout(), 0, newest)
        save(store, newest, pieces, coordinates={}, world=solo(), run={}, limit=2)
        os.write(report, b".")


def newest_intact(store: str) -> int:
    """The step of the newest checkpoint, whose values are compared; 0 without one."""
    step = latest(store)
    if step is None:
        return 0
    pieces = pieces_of(Layout(), 0, seed=None)
    load(store, step, pieces, coordinates={}, world=solo())
    for piece, right in zip(pieces, pieces_of(Layout(), 0, step), strict=True):
        assert torch.equal(piece.tensor, right.tensor), f"iteration {step} is damaged"
    return step


def forked(function, *arguments) -> tuple[int, int]:
    """(process, the end of a pipe that it writes to). fsspec's threads would not survive a fork: children have own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    code = 1
    try:
        function(*arguments, writing)
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def report_newest(store: str, report: int) -> None:
    os.write(report, str(newest_intact(store)).encode())


def everything_from(process: int, reading: int) -> tuple[bytes, int]:
    """What it wrote until its end, and its status."""
    with os.fdopen(reading, "rb") as pipe:
        written = pipe.read()
    return written, os.waitpid(process, 0)[1]


def kill_once(store: str, before: int, seconds: float) -> int:
    """Kill a saver after so many seconds. Returns the step of the newest checkpoint then."""
    process, reading = forked(save_until_killed, store)
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    written, _ = everything_from(process, reading)
    found, status = everything_from(*forked(report_newest, store))
    assert status == 0, "the newest checkpoint cannot be loaded"
    complete = before + len(written)
    assert complete <= int(found) <= complete + 1, (complete, int(found))
    return int(found)


def main(store: str, kills: int, seed: int) -> None:
    """Kill as often, at moments up to the time of three saves, and print how many saves survived."""
    draw = random.Random(seed)
    begin = time.monotonic()
    process, reading = forked(save_until_killed, store)
    os.read(reading, 1)
    start = time.monotonic() - begin
    os.read(reading, 1)
    one = time.monotonic() - begin - start
    os.kill(process, signal.SIGKILL)
    everything_from(process, reading)
    newest = int(everything_from(*forked(report_newest, store))[0])
    for _ in range(kills):
        newest = kill_once(store, newest, draw.uniform(0.2 * start, start + 3 * one))
    print(f"{kills} kills, {newest} saves")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
