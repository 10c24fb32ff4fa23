"""Files of text, whole or in part: JSON lines plain, compressed or from standard input, Parquet, HDF5.

    .jsonl .json …                 cut at any line
    .gz .bz2 .xz .zst              whole: nothing but reading it from the start finds a line
    .parquet .h5 .hdf5             cut at any row
    -                              standard input, JSON lines, whole
"""

import bz2
import gzip
import lzma
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from ..errors import ConfigError, DataError
from .json_lines import BadLine, Block, Text, line_range, texts_of_lines
from .tables import TableBlock, num_rows, read_rows, texts_of_rows
from .zst_file import open_zst

BLOCK_BYTES = 1 << 18
STDIN = "-"
TABLES = (".parquet", ".h5", ".hdf5")
AnyBlock = Block | TableBlock


@dataclass(frozen=True)
class Slice:
    """A part of a file: the lines that begin at bytes start … stop − 1, or these rows of a table. stop None: to the end."""

    path: str
    start: int = 0
    stop: int | None = None


COMPRESSED = {".gz": lambda raw: gzip.GzipFile(fileobj=raw), ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile, ".zst": open_zst}


def check_files(paths: Sequence[str]) -> None:
    """All inputs are there: told at once, not when their turn comes."""
    for path in paths:
        if path != STDIN and not os.path.isfile(path):
            what = "this is a folder; name the files in it" if os.path.isdir(path) else "there is no such file"
            raise DataError(f"--input {path}: {what}.")
    if paths.count(STDIN) > 1:
        raise DataError("--input - - : standard input can be read once.")


def size_of(path: str) -> int:
    """Bytes on disk; 0 for standard input, of which nobody knows."""
    return 0 if path == STDIN else os.path.getsize(path)


def read_blocks(path: str, block_bytes: int = BLOCK_BYTES, *, keys: Sequence[str] = ("text",), start: int = 0,
                stop: int | None = None) -> Iterator[AnyBlock]:
    """A file, or a slice of it.  keys: the columns to read of a table.

    Raises DataError for a file that is missing, damaged, or not what its name says.
    """
    if path.endswith(TABLES):
        return read_rows(path, keys, size_of(path), start, stop)
    return _read_lines(path, block_bytes, start, stop)


def texts_of(block: AnyBlock, keys: Sequence[str], sentences: bool = False) -> tuple[list[list[Text]], list[BadLine]]:
    """For each key the texts of the good lines or rows, and the bad ones."""
    return (texts_of_rows if isinstance(block, TableBlock) else texts_of_lines)(block, keys, sentences)


def place_of(block: AnyBlock) -> str:
    """Where a block stands, for messages."""
    return f"{block.path}, in " + (f"rows {block.first_row} to {block.first_row + block.num_rows - 1}"
                                   if isinstance(block, TableBlock) else line_range(block))


def slices_of_shard(paths: Sequence[str], keys: Sequence[str], index: int, count: int) -> list[Slice]:
    """Shard `index` of `count`: laid end to end the files are cut into stretches of as many bytes.

    Every line and row belongs to the one shard in whose stretch it begins; a compressed file as a whole. So the shards, one
    after the other, are the files in order.  Raises DataError for standard input.
    """
    if STDIN in paths and count > 1:
        raise DataError("standard input cannot be cut into shards or partitions: write it to a file first.")
    total = sum(map(size_of, paths))
    low, high = total * index // count, total * (index + 1) // count
    slices, before = [], 0
    for path in paths:
        size = size_of(path)
        start, stop = (min(max(edge - before, 0), size) for edge in (low, high))
        if path == STDIN or path.endswith(tuple(COMPRESSED)):
            slices += [Slice(path)] if low <= before < high or path == STDIN or count == 1 else []
        elif path.endswith(TABLES):
            rows = num_rows(path, keys)
            start, stop = (rows * edge // max(size, 1) for edge in (start, stop))
            slices += [Slice(path, start, stop)] if start < stop else []
        elif start < stop:
            slices.append(Slice(path, start, stop))
        before += size
    return slices


def _read_lines(path: str, block_bytes: int, start: int, stop: int | None) -> Iterator[Block]:
    number = 1
    try:
        with (open(path, "rb") if path != STDIN else os.fdopen(os.dup(sys.stdin.fileno()), "rb")) as raw:
            file = COMPRESSED.get(os.path.splitext(path)[1], lambda raw: raw)(raw)
            if start:
                file.seek(start - 1)                        # if the byte before ends a line, the next line is mine
                file.readline()
            while lines := _lines(file, block_bytes, stop):
                yield Block(path, number, lines, raw.tell() if raw.seekable() else 0, start)
                number += len(lines)
    except ConfigError:                                     # a ValueError, too
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, ValueError) as e:
        raise DataError(f"{path} is damaged after line {number - 1}: {e}.") from None
    except OSError as e:
        if path.endswith(".bz2") and not e.strerror:        # what the library raises for data that are no bz2
            raise DataError(f"{path} is damaged after line {number - 1}: {e}.") from None
        raise DataError(f"cannot read {path}: {e.strerror or e}.") from None


def _lines(file: BinaryIO, block_bytes: int, stop: int | None) -> list[bytes]:
    left = block_bytes if stop is None else min(block_bytes, stop - file.tell())
    if left <= 1:                                           # readlines stops behind more bytes than it is told, and 0 is all
        return [file.readline()] if left == 1 else []
    return file.readlines(left - 1)
