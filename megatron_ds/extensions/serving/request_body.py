"""Bodies of requests: read by their length or in chunks (RFC 9112, sections 6 and 7.1), and bounded, each and together.

    most      bytes of a body that the model can use; more are read and dropped, so that the client reads the refusal
    HeldBytes bytes of large bodies that all connections hold together
    check_structure   how many values and lists a body may have, before it becomes objects of Python

The last one is found in pieces: the interpreter runs no other thread while it reads one JSON text, so that a text of
millions of lists would stop all clients for seconds.
"""

import io
import threading
from collections.abc import Iterator
from email.message import Message

from .refused_request import BUSY, RefusedRequest

MOST_BODY = 16 << 20  # bytes, whatever the model is
SMALL_BODY = 64 << 10  # bytes; those of all connections together need no bound
MOST_HELD = 64 << 20  # bytes of larger bodies at a time
PIECE = 64 << 10  # bytes that are looked at without a pause
MOST_LINE = 1 << 10  # bytes of the line before a chunk, and of a trailer
MOST_CHUNKS = 1 << 17
MOST_TRAILERS = 100
MOST_VALUES = 1_000_000  # of a body; to read as many takes a tenth of a second
MOST_CONTAINERS = 100_000  # lists and objects, and also keys
TOO_LARGE = 413
UNKNOWN_CODING = 501


class HeldBytes:
    """How many bytes of large bodies are held, over all connections."""

    def __init__(self, most: int = MOST_HELD):
        self._most = most
        self._held = 0
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Hold more bytes. Raises RefusedRequest if others hold too many."""
        with self._lock:
            if self._held + count > self._most:
                raise RefusedRequest(
                    f"large requests of others hold {self._held:,} of {self._most:,} bytes. Try again later.",
                    status=BUSY,
                    headers={"Retry-After": "1"},
                )
            self._held += count

    def give(self, count: int) -> None:
        """Hold fewer bytes."""
        with self._lock:
            self._held -= count


class Body:
    """The body of one request, a context that holds its bytes. most: bytes of a usable one."""

    def __init__(
        self, file: io.BufferedIOBase, headers: Message, most: int, held: HeldBytes
    ):
        self._file = file
        self._headers = headers
        self._most = most
        self._held = held
        self._taken = 0
        self._has_ended = False

    def __enter__(self) -> "Body":
        return self

    def __exit__(self, *error: object) -> None:
        self._release()

    def _release(self) -> None:
        self._held.give(self._taken)
        self._taken = 0

    @property
    def is_read(self) -> bool:
        """Whether what follows on the connection is the next request."""
        return self._has_ended

    def read(self) -> bytes:
        """All bytes. Raises RefusedRequest, and ConnectionError for a client that leaves."""
        pieces = self._chunks() if self._is_chunked() else self._by_length()
        kept: list[bytes] = []
        size = 0
        refusal: RefusedRequest | None = None
        for piece in pieces:
            size += len(piece)
            if refusal is not None:
                continue
            refusal = self._refusal(size)
            if refusal is not None:
                # The rest is read and dropped, so that the client reads the refusal; others get the room.
                kept.clear()
                self._release()
                continue
            kept.append(piece)
        if refusal is not None:
            raise refusal
        return b"".join(kept)

    def _refusal(self, size: int) -> RefusedRequest | None:
        """Return why so many bytes are not kept; None if they are."""
        if size > self._most:
            return self._too_large(f"more than {self._most:,} bytes")
        if size <= SMALL_BODY:
            return None
        try:
            self._held.take(size - self._taken)
        except RefusedRequest as refusal:
            return refusal
        self._taken = size
        return None

    def _too_large(self, size: str) -> RefusedRequest:
        return RefusedRequest(
            f"the body has {size}; at most {self._most:,} can be of use to this model and server. Send less at a time.",
            status=TOO_LARGE,
        )

    def _is_chunked(self) -> bool:
        """Return whether the body comes in chunks. Raises RefusedRequest if its end is not certain."""
        codings = self._headers.get_all("Transfer-Encoding", [])
        if not codings:
            return False
        if "Content-Length" in self._headers:
            raise RefusedRequest(
                "the request has a Content-Length and a Transfer-Encoding, which contradict each other. Send one."
            )
        if ", ".join(codings).strip().lower() != "chunked":
            raise RefusedRequest(
                f"Transfer-Encoding {', '.join(codings)[:40]!r} is not known. Send chunked, or a Content-Length.",
                status=UNKNOWN_CODING,
            )
        return True

    def _by_length(self) -> Iterator[bytes]:
        """Yield the bytes of a body whose length is given."""
        lengths = map(str.strip, self._headers.get_all("Content-Length", ["0"]))
        text = ", ".join(
            dict.fromkeys(lengths)
        )  # two different lengths are joined to a text that is no number
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise RefusedRequest(f"Content-Length {text[:40]!r} is not a number.")
        if int(text) > MOST_BODY:
            raise self._too_large(f"{int(text):,} bytes")
        yield from self._pieces(int(text))
        self._has_ended = True

    def _pieces(self, left: int) -> Iterator[bytes]:
        while left:
            piece = self._file.read(min(left, PIECE))
            if not piece:
                raise ConnectionError("the client left before its request was complete")
            left -= len(piece)
            yield piece

    def _chunks(self) -> Iterator[bytes]:
        """Yield the data of the chunks. Raises RefusedRequest for a malformed chunk, and beyond MOST_BODY."""
        size = 0
        for _ in range(MOST_CHUNKS):
            length = self._chunk_length()
            if not length:
                self._skip_trailers()
                self._has_ended = True
                return
            size += length
            if size > MOST_BODY:
                raise self._too_large(f"more than {MOST_BODY:,} bytes")
            yield from self._pieces(length)
            if self._line():
                raise RefusedRequest("a chunk is longer than its length.")
        raise RefusedRequest(
            f"the body has more than {MOST_CHUNKS:,} chunks. Send larger ones.",
            status=TOO_LARGE,
        )

    def _chunk_length(self) -> int:
        """Return the hexadecimal number before a chunk; extensions after it have no effect."""
        digits = self._line().partition(b";")[0].strip(b" \t")
        is_number = digits and not digits.strip(b"0123456789abcdefABCDEF")
        if not is_number or len(digits) > 16:
            raise RefusedRequest(
                f"a chunk begins with {digits[:20]!r}, which is no length in hexadecimal."
            )
        return int(digits, 16)

    def _skip_trailers(self) -> None:
        for _ in range(MOST_TRAILERS):
            if not self._line():
                return
        raise RefusedRequest(f"the body has more than {MOST_TRAILERS} trailers.")

    def _line(self) -> bytes:
        """Return a line without its end."""
        line = self._file.readline(MOST_LINE)
        if not line:
            raise ConnectionError("the client left before its request was complete")
        if not line.endswith(b"\n"):
            raise RefusedRequest(
                f"a line between chunks has more than {MOST_LINE - 1} bytes."
            )
        return line[:-1].removesuffix(b"\r")


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
