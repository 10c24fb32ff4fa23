"""Files of text, whole or in part: JSON lines or plain text, compressed or not, Parquet, HDF5.

    .txt .md                       plain text, cut into documents (plain_text.py), at any of which a slice may begin
    .jsonl .json …                 JSON lines, cut at any line
    .gz .bz2 .xz .zst              one of these, compressed; read whole, since lines are found only by reading from the start
    .parquet .h5 .hdf5             tables, cut at any row
    -                              standard input, JSON lines, read whole
"""

import bz2
import gzip
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from ...errors import ConfigError, DataError
from .json_lines import BadLine, Block, Text, lines_before, texts_of_lines
from .plain_text import TextBlock, TextCut, blocks_of, check_is_text, cut_documents, texts_of_documents
from .table_files import TableBlock, num_rows, read_rows, texts_of_rows
from .zst_file import open_zst

BLOCK_BYTES = 1 << 18
STDIN = "-"
TABLES = (".parquet", ".h5", ".hdf5")
PLAIN = (".txt", ".md")
AnyBlock = Block | TableBlock | TextBlock
WHOLE_FILES = TextCut()
_TEXTS_OF = {Block: texts_of_lines, TableBlock: texts_of_rows, TextBlock: texts_of_documents}


@dataclass(frozen=True)
class Slice:
    """A part of a file: the lines that begin at bytes start … stop − 1, or these rows of a table. stop None: to the end."""

    path: str
    start: int = 0
    stop: int | None = None


COMPRESSED = {".gz": lambda raw: gzip.GzipFile(fileobj=raw), ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile, ".zst": open_zst}


def is_plain_text(path: str) -> bool:
    """By its name."""
    return without_compression(path).lower().endswith(PLAIN)


def without_compression(path: str) -> str:
    """The name without the ending of a compressed file."""
    stem, end = os.path.splitext(path)
    return stem if end in COMPRESSED else path


def check_files(paths: Sequence[str], keys: Sequence[str] = ("text",)) -> None:
    """Raises DataError unless all inputs are files that can give a text for each key; checked before any is read."""
    for path in paths:
        if path != STDIN and not os.path.isfile(path):
            raise DataError(f"--input {path}: there is no such file.")
        if len(keys) > 1 and is_plain_text(path):
            raise DataError(f"--json-keys {' '.join(keys)}: {path} is plain text, which has one text for each document and no "
                            "keys. Name one key, or leave out the files of plain text.")
    if paths.count(STDIN) > 1:
        raise DataError("--input - -: standard input can be read only once. Name it once.")


def size_of(path: str) -> int:
    """Bytes on disk; 0 for standard input, whose size is unknown."""
    return 0 if path == STDIN else os.path.getsize(path)


def read_blocks(path: str, block_bytes: int = BLOCK_BYTES, *, keys: Sequence[str] = ("text",), start: int = 0,
                stop: int | None = None, cut: TextCut = WHOLE_FILES) -> Iterator[AnyBlock]:
    """A file, or a slice of it.  keys: the columns to read of a table.  cut: where documents of plain text end.

    Raises DataError for a file that is missing, damaged, or not what its name says.
    """
    if path.endswith(TABLES):
        return read_rows(path, keys, size_of(path), start, stop)
    piece = Slice(path, start, stop)
    if is_plain_text(path):
        return _read_bytes(piece, lambda file, raw: _documents(file, raw, piece, block_bytes, keys, cut))
    return _read_bytes(piece, lambda file, raw: _lines(file, raw, piece, block_bytes))


def texts_of(block: AnyBlock, keys: Sequence[str], sentences: bool = False) -> tuple[list[list[Text]], list[BadLine]]:
    """For each key the texts of the good lines, rows or documents, and the bad ones."""
    return _TEXTS_OF[type(block)](block, keys, sentences)


def place_of(block: AnyBlock) -> str:
    """Where a block stands, for messages."""
    if isinstance(block, TableBlock):
        return f"{block.path}, in rows {block.first_row} to {block.first_row + block.num_rows - 1}"
    before = lines_before(block.path, block.start)
    return f"{block.path}, in lines {block.first_line + before} to {block.last_line + before}"


def slices_of_shard(paths: Sequence[str], keys: Sequence[str], index: int, count: int,
                    cut: TextCut = WHOLE_FILES) -> list[Slice]:
    """Shard `index` of `count`: laid end to end the files are cut into stretches of as many bytes.

    Every line and row belongs to the one shard in whose stretch it begins, and so does a file that is read whole: a
    compressed one, or one of plain text that is one document. Of other plain text the documents belong to the shard in whose
    stretch the end of the document before them begins. So the shards, one after the other, are the files in order.
    Raises DataError for standard input.
    """
    if STDIN in paths and count > 1:
        raise DataError("standard input cannot be cut into shards or partitions: write it to a file first.")
    total = sum(map(size_of, paths))
    low, high = total * index // count, total * (index + 1) // count
    slices, before = [], 0
    for path in paths:
        size = size_of(path)
        start, stop = (min(max(edge - before, 0), size) for edge in (low, high))
        if path == STDIN or path.endswith(tuple(COMPRESSED)) or cut.is_whole and is_plain_text(path):
            slices += [Slice(path)] if low <= before < high or path == STDIN or count == 1 else []
        elif path.endswith(TABLES):
            rows = num_rows(path, keys)
            start, stop = (rows * edge // max(size, 1) for edge in (start, stop))
            slices += [Slice(path, start, stop)] if start < stop else []
        elif start < stop:
            slices.append(Slice(path, start, stop))
        before += size
    return slices


def _read_bytes(piece: Slice, read: Callable[[BinaryIO, BinaryIO], Iterator[AnyBlock]]) -> Iterator[AnyBlock]:
    """`read(file, the file on disk)` over the opened file, its errors as DataErrors."""
    path, line = piece.path, 0
    damaged = lambda e: DataError(f"{path} is damaged after line {line}: {e}.")
    try:
        with (open(path, "rb", BLOCK_BYTES) if path != STDIN else os.fdopen(os.dup(sys.stdin.fileno()), "rb")) as raw:
            for block in read(COMPRESSED.get(os.path.splitext(path)[1], lambda raw: raw)(raw), raw):
                line = block.last_line
                yield block
    except ConfigError:                                     # a ValueError, too
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, ValueError) as e:
        raise damaged(e) from None
    except OSError as e:
        if path.endswith(".bz2") and not e.strerror:        # what the library raises for data that are not bz2
            raise damaged(e) from None
        raise DataError(f"cannot read {path}: {e.strerror or e}.") from None


def _documents(file: BinaryIO, raw: BinaryIO, piece: Slice, block_bytes: int, keys: Sequence[str],
               cut: TextCut) -> Iterator[TextBlock]:
    at = _next_line(file, piece.start)
    if not at:
        check_is_text(piece.path, file.peek(BLOCK_BYTES).partition(b"\n")[0], keys)
    documents = cut_documents(file, piece.path, at, piece.stop, cut)
    return blocks_of(documents, piece.path, block_bytes, piece.start, raw.tell)


def _lines(file: BinaryIO, raw: BinaryIO, piece: Slice, block_bytes: int) -> Iterator[Block]:
    _next_line(file, piece.start)
    number = 1
    while lines := _some_lines(file, block_bytes, piece.stop):
        yield Block(piece.path, number, lines, raw.tell() if raw.seekable() else 0, piece.start)
        number += len(lines)


def _next_line(file: BinaryIO, at: int) -> int:
    """Go to the first line that begins at byte `at` or after it; where it begins."""
    if not at:                                              # a compressed file cannot be moved in
        return 0
    file.seek(at - 1)                                       # if the byte before ends a line, the next line begins at `at`
    return at - 1 + len(file.readline())


def _some_lines(file: BinaryIO, block_bytes: int, stop: int | None) -> list[bytes]:
    left = block_bytes if stop is None else min(block_bytes, stop - file.tell())
    if left <= 1:                                           # readlines(n) returns lines of more than n bytes, readlines(0) all
        return [file.readline()] if left == 1 else []
    return file.readlines(left - 1)
