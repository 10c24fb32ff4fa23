"""`torch_thread`: a daemon thread that may be inside torch when the process ends.

The interpreter ends a daemon thread that returns from torch's C++ code while it takes itself apart, and C++ then
aborts the whole process (SIGABRT), whatever its exit code. So all these threads are stopped and waited for before.
"""

import atexit
import threading
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

LONGEST_END = 5.0  # seconds for which a process that ends waits for its threads

# Thread → a call that makes its function return soon.
_stops: WeakKeyDictionary[threading.Thread, Callable[[], object]] = WeakKeyDictionary()


def torch_thread(
    function: Callable[[], object], name: str, stop: Callable[[], object] = lambda: None
) -> threading.Thread:
    """Start a thread. stop: called by another thread at the end of the process, makes `function` return soon"""
    thread = threading.Thread(target=function, name=name, daemon=True)
    _stops[thread] = stop
    thread.start()
    return thread


def end_threads(longest: float = LONGEST_END) -> None:
    """Stop the threads that still run, and wait at most this many seconds for all of them together."""
    running = [thread for thread in _stops if thread.is_alive()]
    for thread in running:
        _stops[thread]()
    deadline = time.monotonic() + longest
    for thread in running:
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(end_threads)
