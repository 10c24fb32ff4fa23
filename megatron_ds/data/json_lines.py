"""Text corpora as JSON lines, plain or gzipped: read in blocks of whole lines, each line's number known.

    {"text": "The whole document, line breaks escaped.", "source": "anything else is ignored"}
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import DataError

BLOCK_BYTES = 1 << 18


@dataclass(frozen=True)
class Block:
    """Consecutive lines of a file; `position` is where its reader stands, in bytes on disk."""

    path: str
    first_line: int                                         # counted from 1
    lines: list[bytes]
    position: int


@dataclass(frozen=True)
class BadLine:
    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.reason}"


def check_files(paths: Sequence[str]) -> None:
    """All inputs are there: told at once, not when their turn comes."""
    for path in paths:
        if not os.path.isfile(path):
            what = "this is a folder; name the files in it" if os.path.isdir(path) else "there is no such file"
            raise DataError(f"--input {path}: {what}.")


def read_blocks(path: str, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Raises DataError for a file that is missing or is not the gzip file its name says."""
    number = 1
    try:
        with open(path, "rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
            while lines := file.readlines(block_bytes):
                yield Block(path, number, lines, raw.tell())
                number += len(lines)
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise DataError(f"{path} is damaged after line {number - 1}: {e}.") from None
    except OSError as e:
        raise DataError(f"cannot read {path}: {e.strerror or e}.") from None


def texts_of(block: Block, keys: Sequence[str]) -> tuple[list[list[str]], list[BadLine]]:
    """For each key the texts of the good lines, and the bad lines. A blank line is neither."""
    texts: list[list[str]] = [[] for _ in keys]
    bad = []
    for number, line in enumerate(block.lines, block.first_line):
        if not line.strip():
            continue
        try:
            found = _texts(line, keys)
        except ValueError as e:
            bad.append(BadLine(block.path, number, str(e)))
            continue
        for column, text in zip(texts, found):
            column.append(text)
    return texts, bad


def _texts(line: bytes, keys: Sequence[str]) -> list[str]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise ValueError(f"not UTF-8 at byte {e.start}") from None
    except json.JSONDecodeError as e:
        raise ValueError(f"not JSON: {e.msg} at column {e.colno}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deep") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object with the key {keys[0]!r}")
    return [_text(record, key) for key in keys]


def _text(record: dict, key: str) -> str:
    if key not in record:
        raise ValueError(f"no key {key!r}; it has {', '.join(map(repr, record)) or 'none'}")
    text = record[key]
    if not isinstance(text, str):
        raise ValueError(f"{key!r} is {type(text).__name__}, not text")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:                     # "\\ud83d" alone is legal JSON, but no character
            raise ValueError(f"{key!r} holds half a surrogate pair at character {e.start}") from None
    return text
