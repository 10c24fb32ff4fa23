"""The output of a process, in pieces that are passed on at once."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import IO

CHUNK_BYTES = 65536
LONGEST_BYTES = 1 << 20  # of a line that is kept until it ends


def pieces(stream: IO[bytes]) -> Iterator[bytes]:
    r"""Lines, as soon as they end by \n or by \r, which progress bars write; the last one may have no end."""
    rest = b""
    while chunk := os.read(stream.fileno(), CHUNK_BYTES):
        rest += chunk
        cut = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
        if len(rest) > LONGEST_BYTES:
            cut = len(rest)
        yield from rest[:cut].splitlines(keepends=True)
        rest = rest[cut:]
    if rest:
        yield rest


def write_out(data: bytes) -> None:
    """Write to the output of this process at once. Its reader may be gone, or its disk full."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
