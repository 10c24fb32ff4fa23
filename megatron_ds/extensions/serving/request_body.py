"""Bodies of requests, which are bounded, each and together.

    most      bytes of a body that the model can use
    HeldBytes bytes of large bodies that all connections hold together
    check_structure   how many values and lists a body may have, before it becomes objects of Python

The last one is found in pieces: the interpreter runs no other thread while it reads one JSON text, so that a text of
millions of lists would stop all clients for seconds.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from .refused_request import BUSY, TOO_LARGE, RefusedRequest

SMALL_BODY = 64 << 10  # bytes; those of all connections together need no bound
MOST_HELD = 64 << 20  # bytes of larger bodies at a time
PIECE = 64 << 10  # bytes that are looked at without a pause
MOST_VALUES = 1_000_000  # of a body; to read as many takes a tenth of a second
MOST_CONTAINERS = 100_000  # lists and objects, and also keys


class HeldBytes:
    """`count`, how many bytes of large bodies are held, over all connections of one event loop."""

    def __init__(self) -> None:
        self.count = 0

    def take(self, more: int) -> None:
        """Hold more bytes. Raises RefusedRequest if others hold too many."""
        if self.count + more > MOST_HELD:
            raise RefusedRequest(
                f"large requests of others hold {self.count:,} of {MOST_HELD:,} bytes. Try again later.",
                status=BUSY,
                headers={"Retry-After": "1"},
            )
        self.count += more

    def give(self, fewer: int) -> None:
        """Hold fewer bytes."""
        self.count -= fewer


@asynccontextmanager
async def body_of(request: Request, most: int, held: HeldBytes) -> AsyncIterator[bytes]:
    """Yield the body of a request, and hold its bytes during the block. most: bytes of a usable one.

    Raises RefusedRequest, after which the connection drops the rest, and ClientDisconnect.
    """
    parts: list[bytes] = []
    size = taken = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise RefusedRequest(
                    f"the body has more than {most:,} bytes; at most as many can be of use to this model and server. "
                    "Send less at a time.",
                    status=TOO_LARGE,
                )
            if size > SMALL_BODY:
                held.take(size - taken)
                taken = size
            parts.append(part)
        yield b"".join(parts)
    finally:
        held.give(taken)


def check_structure(body: bytes) -> None:
    """Raises RefusedRequest for a JSON text with more values, lists or keys than a request can use."""
    if len(body) <= SMALL_BODY:
        return
    values = containers = keys = 0
    for part in _outside_of_strings(body):
        values += part.count(b",")
        containers += part.count(b"[") + part.count(b"{")
        keys += part.count(b":")
        if values > MOST_VALUES:
            raise _too_many("values", MOST_VALUES)
        if max(containers, keys) > MOST_CONTAINERS:
            raise _too_many("lists, objects or keys", MOST_CONTAINERS)


def _too_many(what: str, most: int) -> RefusedRequest:
    return RefusedRequest(
        f"the body has more than {most:,} {what}. Ask for fewer texts at a time.",
        status=TOO_LARGE,
    )


def _outside_of_strings(body: bytes) -> Iterator[bytes]:
    """Yield the bytes of a JSON text that are in no string, piece by piece."""
    is_inside = False
    start = 0
    while start < len(body):
        # A piece must not end between a backslash and the character that it escapes.
        stop = min(start + PIECE, len(body))
        escapes = stop - start - len(body[start:stop].rstrip(b"\\"))
        stop += escapes % 2
        plain = body[start:stop].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = plain.split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
        start = stop
