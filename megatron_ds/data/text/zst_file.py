"""Reading `.zst`: frames one after the other, and an error, not silence, when the last one is cut short."""

import io
from typing import BinaryIO

from .table_files import needs

CHUNK_BYTES = 1 << 17


def open_zst(raw: BinaryIO) -> BinaryIO:
    """Raises ConfigError without the package zstandard; reading raises EOFError or ValueError for damaged data."""
    try:
        import zstandard
    except ImportError as e:
        raise needs("data", "zstandard", "a .zst file", e) from None
    return io.BufferedReader(_Frames(raw, zstandard), CHUNK_BYTES)


class _Frames(io.RawIOBase):
    def __init__(self, raw: BinaryIO, zstandard):
        self._raw, self._zstandard = raw, zstandard
        self._frame, self._input, self._output = None, b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(CHUNK_BYTES)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("compressed data end in the middle of a frame")
                return 0
            self._decompress()
        count = min(len(buffer), len(self._output))
        buffer[:count], self._output = self._output[:count], self._output[count:]
        return count

    def _decompress(self) -> None:
        self._frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
        try:
            self._output = memoryview(self._frame.decompress(self._input))
        except self._zstandard.ZstdError as e:
            raise ValueError(str(e)) from None
        self._input = self._frame.unused_data if self._frame.eof else b""
        self._frame = None if self._frame.eof else self._frame
