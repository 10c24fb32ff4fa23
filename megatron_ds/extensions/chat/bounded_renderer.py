"""`render_bounded`: a chat template rendered in a process of its own, which has limits of time and memory.

A template is a program that arrives with a tokenizer from elsewhere. The sandbox of jinja2 keeps it from files and
from Python, but one line of it can fill the memory or never end. The process is started once and reused; other
threads of this one go on meanwhile. A template that exceeds a limit ends its worker, and the next request has
another one.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...host.packages import missing_package

PROGRAM = Path(__file__).with_name("render_process.py")
WAIT_SECONDS = 60.0  # for a reply, of which the machine may give to other processes
START_SECONDS = 300.0  # to import transformers, from a slow disk
MOST_REQUEST = 64 << 20  # bytes
MOST_REPLY = 256 << 20  # bytes
LENGTH = 8


class RenderFailure(Exception):
    """The error of a process that gave no reply. The message has the reason."""


def render_bounded(
    messages: list[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Render a conversation with transformers' `render_jinja_template`.

    Returns {"text", "spans"}; {"refusal"} with a reason, also for what exceeds a limit; or {"syntax", "line"} for
    what is no template. Raises ConfigError without the packages that it needs.
    """
    try:
        request = json.dumps({"messages": messages, "arguments": arguments})
    except (TypeError, ValueError, RecursionError) as error:
        return {"refusal": f"its messages and values are no JSON values: {error}"}
    if len(request) > MOST_REQUEST:
        return {
            "refusal": f"the conversation has {len(request):,} bytes, and at most {MOST_REQUEST:,} are rendered"
        }
    with _LOCK:
        try:
            return _process().ask(request.encode())
        except (RenderFailure, OSError) as error:
            _stop()
            return {"refusal": f"the process that renders it ended ({error})"}


class _Process:
    """A running `render_process`, of this process and not of one that is forked from it."""

    def __init__(self):
        self.owner = os.getpid()
        # -P: modules beside the program are not those of packages with the same names.
        self.child = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        for pipe in (self.child.stdin, self.child.stdout):
            os.set_blocking(pipe.fileno(), False)
        first = self._reply(time.monotonic() + START_SECONDS)
        if "missing" in first:
            raise ConfigError(_missing(first["missing"]))

    def ask(self, request: bytes) -> dict[str, Any]:
        """Return the reply to a request. Raises RenderFailure and OSError."""
        deadline = time.monotonic() + WAIT_SECONDS
        left = memoryview(len(request).to_bytes(LENGTH, "little") + request)
        target = self.child.stdin.fileno()
        while left:
            self._wait(target, select.POLLOUT, deadline)
            left = left[os.write(target, left) :]
        return self._reply(deadline)

    def _reply(self, deadline: float) -> dict[str, Any]:
        size = int.from_bytes(self._exactly(LENGTH, deadline), "little")
        if size > MOST_REPLY:
            raise RenderFailure(f"its reply has {size:,} bytes")
        content = self._exactly(size, deadline)
        return json.loads(content.decode("utf-8", "surrogatepass"))

    def _exactly(self, size: int, deadline: float) -> bytes:
        source = self.child.stdout.fileno()
        content = bytearray()
        while len(content) < size:
            self._wait(source, select.POLLIN, deadline)
            part = os.read(source, min(size - len(content), 1 << 20))
            if not part:
                raise RenderFailure("it closed its pipe")
            content += part
        return bytes(content)

    def _wait(self, pipe: int, event: int, deadline: float) -> None:
        """Wait until a pipe is ready, or closed. Raises RenderFailure at the deadline."""
        waiting = select.poll()
        waiting.register(pipe, event)
        if not waiting.poll(1000 * max(deadline - time.monotonic(), 0)):
            raise RenderFailure(f"no reply within {WAIT_SECONDS:g} s")

    def stop(self) -> None:
        """End the process and its worker, unless they belong to another one."""
        self.child.stdin.close()
        self.child.stdout.close()
        if self.owner != os.getpid():
            return
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.child.wait(WAIT_SECONDS)


_LOCK = threading.Lock()
_running: _Process | None = None


def _process() -> _Process:
    """Return the process, started at the first request, and again after one that ended."""
    global _running
    if _running is not None and _running.owner != os.getpid():
        _stop()
    if _running is None:
        for name in ("jinja2", "transformers"):
            if find_spec(name) is None:
                raise ConfigError(_missing(f"no module named {name}"))
        _running = _Process()
        atexit.register(_stop)
    return _running


def _stop() -> None:
    global _running
    ended = _running
    _running = None
    if ended is not None:
        ended.stop()


def _missing(reason: str) -> str:
    packages = "transformers and jinja2"
    return str(missing_package("a chat template", packages, "hf", reason))
