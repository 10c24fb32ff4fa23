"""Limits for a part of a test: memory and processor time that a hostile input must not exceed."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GIGABYTE = 10**9
SECONDS = 20.0                           # of processor time: the load of the machine does not matter


@contextmanager
def bounded(more_bytes: int = GIGABYTE, seconds: float = SECONDS) -> Iterator[None]:
    """At most so many bytes more than now are mapped inside, then MemoryError is raised; afterwards, asserts
    that the process took at most `seconds`."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more_bytes, hard))
    began = time.process_time()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.process_time() - began <= seconds
