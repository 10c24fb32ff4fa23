"""Limits for a part of a test: memory and processor time that a hostile input must not exceed, and the end of what
hangs."""

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

GIGABYTE = 10**9
SECONDS = 100.0  # of processor time: the load of the machine does not matter
# Seconds after which a test takes a process, a thread or a connection to hang. No test measures by it.
HUNG = 600
# Seconds for which ranks of a test wait for a peer that never comes. Between ranks that do come a slow machine must not
# take as long.
VAIN = 10.0


@contextmanager
def bounded(more_bytes: int = GIGABYTE, seconds: float = SECONDS) -> Iterator[None]:
    """At most so many bytes more than now are mapped inside, then MemoryError is raised; afterwards, asserts
    that the process took at most `seconds`."""
    mapped = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more_bytes, hard))
    began = time.process_time()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.process_time() - began <= seconds


def refusal_in_child(
    call: Callable[[], object], kinds: type | tuple[type, ...], seconds: float = HUNG
) -> str:
    """The text of the exception that `call()` raises in a child, which may hang or crash."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        try:
            call()
        except kinds as error:
            sender.send(str(error))

    child = context.Process(target=run)
    child.start()
    sender.close()
    answered = receiver.poll(seconds)
    if not answered:
        child.kill()
    child.join()
    assert answered, f"no answer within {seconds} s"
    assert child.exitcode == 0, f"the child ended with code {child.exitcode}"
    return receiver.recv()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let writes beyond so many bytes of a file fail, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    written = sys.dont_write_bytecode
    # Else a module that is imported now would be compiled to a file that is cut off.
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = written
