"""The process that renders chat templates: a program of its own, started by `bounded_renderer`.

    parent ── request ──► worker: renders, with limits of processor time and memory
           ◄── reply ───
                          this process: imports once, and forks a worker for the first request and after each that a
                          template has ended

Requests and replies are JSON behind their length in 8 bytes. Nothing of the package is imported here, so that the
process is small and starts fast.
"""

import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

SECONDS = 1.0  # processor time of one request
SECONDS_OF_BYTE = (
    1e-6  # besides, as loops over loops of a long conversation take longer
)
MOST_SECONDS = 5.0
MEMORY = 320 << 20  # bytes that a worker may allocate
MOST_CHARACTERS = 32 << 20  # of a result
LENGTH = 8
REQUESTS = 0
REPLIES = 1
NO_MEMORY = 3  # exit code of a worker that could not read a request


def main() -> int:
    """Answer requests until the other end is closed. Returns the exit code."""
    replies = os.dup(REPLIES)
    os.dup2(2, REPLIES)  # what a library prints is no reply
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as error:
        _write(replies, {"missing": str(error)})
        return 1
    _write(replies, {"ready": True})
    while True:
        worker = os.fork()
        if not worker:
            _work(render_jinja_template, replies)
        status = os.waitpid(worker, 0)[1]
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGPROF:
            return os.waitstatus_to_exitcode(status)
        reason = (
            f"it took more than {SECONDS:g} s of a processor, and {1e6 * SECONDS_OF_BYTE:g} s for each MB of the "
            f"conversation, at most {MOST_SECONDS:g} s"
        )
        _write(replies, {"refusal": reason})


def _work(render, replies: int) -> NoReturn:
    """Answer requests in a process with limits, which ends with the other end."""
    used = _address_space()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        while (request := _read(REQUESTS)) is not None:
            # The signal ends this process even within one long operation.
            seconds = min(SECONDS + len(request) * SECONDS_OF_BYTE, MOST_SECONDS)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            reply = _reply(render, request)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _write(replies, reply)
            del request, reply
    except MemoryError:
        os._exit(NO_MEMORY)
    except OSError:
        pass  # the other end is closed
    os._exit(0)


def _reply(render, request: bytes) -> dict[str, Any]:
    """Return the texts of a request and their marked spans, or why there are none."""
    try:
        wanted = json.loads(request)
        texts, spans = render([wanted["messages"]], **wanted["arguments"])
        size = len(texts[0])
        if size > MOST_CHARACTERS:
            return {
                "refusal": f"its text has {size:,} characters, and at most {MOST_CHARACTERS:,} are read"
            }
        return {"text": texts[0], "spans": next(iter(spans), [])}
    except MemoryError:
        return {"refusal": f"it needs more than {MEMORY >> 20} MiB of memory"}
    except Exception as error:  # a template can fail in any way that a program can
        kind = type(error).__name__
        if kind == "TemplateSyntaxError":
            return {"syntax": str(error)[:1000], "line": vars(error)["lineno"]}
        return {"refusal": f"{kind}: {error}"[:1000].strip(": ")}


def _address_space() -> int:
    """Bytes of the address space of this process."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
    except OSError:
        return 1 << 30  # another system than Linux
    return pages * resource.getpagesize()


def _read(source: int) -> bytes | None:
    """Return the next request; None at the end."""
    head = _exactly(source, LENGTH)
    if head is None:
        return None
    return _exactly(source, int.from_bytes(head, "little"))


def _exactly(source: int, size: int) -> bytes | None:
    content = bytearray()
    while len(content) < size:
        part = os.read(source, min(size - len(content), 1 << 20))
        if not part:
            return None
        content += part
    return bytes(content)


def _write(target: int, reply: dict[str, Any]) -> None:
    try:
        content = json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except MemoryError:
        refusal = {"refusal": f"it needs more than {MEMORY >> 20} MiB of memory"}
        content = json.dumps(refusal).encode()
    left = memoryview(len(content).to_bytes(LENGTH, "little") + content)
    while left:
        left = left[os.write(target, left) :]


if __name__ == "__main__":
    sys.exit(main())
