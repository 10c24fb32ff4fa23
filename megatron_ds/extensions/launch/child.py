"""`Child`: a process that was started here, in a session of its own, so that Ctrl-C comes to it from here only."""

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .output import pieces

POLL_SECONDS = 0.1  # between two looks at children
LAST_OUTPUT_SECONDS = 2.0  # after the end of a child, to read what it wrote


class Child:
    """A process whose output and errors are read as one. ended: when, in seconds since 1970; None while it runs

    variables  more than those of this process
    take       is called with each piece of the output, in a thread
    options    of Popen
    Raises OSError if it cannot be started.
    """

    def __init__(
        self,
        words: Sequence[str],
        variables: Mapping[str, str],
        take: Callable[[bytes], None],
        **options: Any,
    ):
        self.process = subprocess.Popen(
            words,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )
        self.ended: float | None = None
        self._take = take
        self._reader = threading.Thread(target=self._read, daemon=True)

    def read(self) -> None:
        """Begin to read the output. Threads begin after the last fork."""
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None  # a pipe
        for piece in pieces(self.process.stdout):
            self._take(piece)

    def read_to_end(self) -> None:
        """Wait until all output is read, at most LAST_OUTPUT_SECONDS after the end: a child may hold the pipe."""
        assert self.ended is not None, "it runs"
        end = self.ended + LAST_OUTPUT_SECONDS
        self._reader.join(timeout=max(0.0, end - time.time()))

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        code = self.process.poll()
        if code is not None and self.ended is None:
            self.ended = time.time()
        return code

    def send(self, number: int) -> None:
        """Send a signal to the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def write(self, data: bytes) -> None:
        """Write to the input, a pipe that the process may have closed."""
        assert self.process.stdin is not None  # a pipe
        with contextlib.suppress(OSError):
            self.process.stdin.write(data)
            self.process.stdin.flush()
