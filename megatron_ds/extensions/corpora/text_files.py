"""Input files of text: the files of a folder, the part of them that a shard reads, and their blocks of texts.

.txt .md                       plain text, cut into documents (plain_text.py), at any of them
.jsonl .json …                 JSON lines, cut at any line
.gz .bz2 .xz .zst              one of these, compressed; read from the start, so never cut
.parquet .h5 .hdf5             tables, cut at any row
-                              standard input, JSON lines, never cut
"""

import bz2
import codecs
import glob
import gzip
import io
import logging
import lzma
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from ...errors import ConfigError, DataError
from ...host.packages import import_extra
from .plain_text import (
    LONGEST_BYTES,
    TextCut,
    blocks_of,
    check_is_text,
    cut_documents,
    texts_of_documents,
)
from .text_records import TextBlock, Texts, open_table, read_rows
from .text_records import texts_of as texts_of_records

logger = logging.getLogger(__name__)
BLOCK_BYTES = 1 << 18
ZST_BYTES = 1 << 17  # of compressed data, decompressed together
STDIN = "-"
ARRAY = re.compile(rb"\s*\[\s*(\{|$)")  # first line of an array of objects
TABLES = (".parquet", ".h5", ".hdf5")
PLAIN = (".txt", ".md")
FOLDER_ENDINGS = (*PLAIN, ".jsonl", *TABLES)
INPUT_HELP = (
    "plain text (.txt, .md); JSON lines (.jsonl and other names; - for standard input); either of "
    "them compressed (.gz, .bz2, .xz, .zst); tables (.parquet, .h5); or folders, of which all such "
    "files are read, ordered by path"
)
WHOLE_FILES = TextCut()
EXAMPLES = 3  # names of ignored files in a message


@dataclass(frozen=True)
class FileSlice:
    """The lines of a file that begin at bytes start … stop − 1, or rows of a table. stop None: to the end."""

    path: str
    start: int = 0
    stop: int | None = None


def is_plain_text(path: str) -> bool:
    """Return whether the name is that of a plain text file, possibly compressed."""
    return _uncompressed_name(path).lower().endswith(PLAIN)


def size_of(path: str) -> int:
    """Bytes on disk; 0 for standard input, whose size is unknown."""
    return 0 if path == STDIN else os.path.getsize(path)


def files_of(inputs: Sequence[str]) -> list[str]:
    """Return the inputs, each pattern (`dir/*.jsonl`) replaced by its files in the order of their names, and each
    folder by the files below it that end in FOLDER_ENDINGS, ordered by path.

    Hidden files and folders, tokenizers (folders with a tokenizer.json) and links to folders are skipped. The
    log names files that are ignored. Raises DataError for a folder that cannot be read or has no such file,
    and for a pattern without files.
    """
    named = [name for given in inputs for name in _matches(given)]
    files: list[str] = []
    for given in named:
        files += _files_below(given) if os.path.isdir(given) else [given]
    return files


def check_files(paths: Sequence[str], keys: Sequence[str] = ("text",)) -> None:
    """Raises DataError unless all inputs exist and have a text for each key. Nothing is read."""
    for path in paths:
        if path != STDIN and not os.path.isfile(path):
            what = (
                "this is no regular file. A pipe is read as stdin: --input - < PIPE"
                if os.path.exists(path)
                else "there is no such file"
            )
            raise DataError(f"--input {path}: {what}.")
        if len(keys) > 1 and is_plain_text(path):
            raise DataError(
                f"--json-keys {' '.join(keys)}: {path} is plain text, which has no keys and one "
                "text for each document. Name one key, or leave out the files of plain text."
            )
    if paths.count(STDIN) > 1:
        raise DataError(
            "--input - -: standard input can be read only once. Name it once."
        )


def slices_of_shard(
    paths: Sequence[str],
    keys: Sequence[str],
    index: int,
    count: int,
    cut: TextCut = WHOLE_FILES,
) -> list[FileSlice]:
    """Shard `index` of `count`: the files, laid end to end, are divided into ranges of equally many bytes.

    A line or row belongs to the shard in whose range it begins, and so does a file that is never cut: a
    compressed one, or one whose plain text is one document. Another plain text document belongs to the shard
    in whose range the document before it ends. So the shards one after the other are the files in order.
    Raises DataError for standard input.
    """
    if STDIN in paths and count > 1:
        raise DataError(
            "standard input cannot be cut into shards or partitions: write it to a file first."
        )
    # The files are taken as one row of bytes, of which each shard has a range.
    total = sum(map(size_of, paths))
    low = total * index // count
    high = total * (index + 1) // count
    slices = []
    before = 0
    for path in paths:
        size = size_of(path)
        # The range may begin before the file and end after it.
        start, stop = (min(max(edge - before, 0), size) for edge in (low, high))
        if (
            path == STDIN
            or path.endswith(tuple(COMPRESSED))
            or cut.is_whole
            and is_plain_text(path)
        ):
            slices += (
                [FileSlice(path)]
                if low <= before < high or path == STDIN or count == 1
                else []
            )
        elif path.endswith(TABLES):
            rows = open_table(path, keys).num_rows
            start, stop = (rows * edge // max(size, 1) for edge in (start, stop))
            slices += [FileSlice(path, start, stop)] if start < stop else []
        elif start < stop:
            slices.append(FileSlice(path, start, stop))
        before += size
    return slices


def read_blocks(
    path: str,
    block_bytes: int = BLOCK_BYTES,
    *,
    keys: Sequence[str] = ("text",),
    start: int = 0,
    stop: int | None = None,
    cut: TextCut = WHOLE_FILES,
) -> Iterator[TextBlock]:
    """Blocks of a file or slice.  keys: the columns of a table to read.  cut: where plain text documents end.

    Raises DataError for a file that is missing, damaged, or of another kind than its name indicates.
    """
    if path.endswith(TABLES):
        return read_rows(path, keys, size_of(path), start, stop)
    return _read_bytes(FileSlice(path, start, stop), block_bytes, keys, cut)


def texts_of(block: TextBlock, keys: Sequence[str], sentences: bool = False) -> Texts:
    """Return the texts of each key, and the bad lines.  sentences: a text may be a list of sentences."""
    is_plain = is_plain_text(block.path)
    return (
        texts_of_documents(block)
        if is_plain
        else texts_of_records(block, keys, sentences)
    )


def _matches(given: str) -> list[str]:
    """Return the files that match a pattern, which a shell has not replaced if it was quoted; other names are kept."""
    if os.path.lexists(given) or not glob.has_magic(given):
        return [given]
    found = sorted(glob.glob(given, recursive=True))
    if not found:
        raise DataError(f"--input {given}: no file has a name of this pattern.")
    return found


def _files_below(folder: str) -> list[str]:
    found = list(_walk(folder))
    taken = sorted(
        (path for path in found if _is_text_name(path)),
        key=lambda path: path.split(os.sep),
    )
    ignored = sorted(set(found) - set(taken))
    examples = (
        f"{', '.join(ignored[:EXAMPLES])}{' …' if len(ignored) > EXAMPLES else ''}"
    )
    if not taken:
        raise DataError(
            f"--input {folder}: this folder has no text{f', but {examples}' if ignored else ''}. "
            f"Of a folder, files whose names end in {' '.join(FOLDER_ENDINGS)} are read, the "
            f"first three also compressed ({' '.join(COMPRESSED)}). Name other files one by one."
        )
    kinds = Counter(os.path.splitext(path)[1].lower() for path in taken)
    logger.info(
        "%s: %s%s",
        folder,
        ", ".join(f"{count:,} {end}" for end, count in kinds.most_common()),
        f"; {len(ignored):,} other files are left out: {examples}" if ignored else "",
    )
    return taken


def _walk(folder: str) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise DataError(
            f"--input {folder}: {error.filename} cannot be read: {error.strerror}."
        )

    for place, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        # A folder with a tokenizer.json has vocab.txt and merges.txt, which are no text to train on.
        if "tokenizer.json" in files and place != folder:
            folders.clear()
            continue
        yield from (
            os.path.join(place, name) for name in files if not name.startswith(".")
        )


def _is_text_name(name: str) -> bool:
    return (
        is_plain_text(name)
        or _uncompressed_name(name).endswith(".jsonl")
        or name.endswith(TABLES)
    )


def _uncompressed_name(path: str) -> str:
    stem, end = os.path.splitext(path)
    return stem if end in COMPRESSED else path


def _read_bytes(
    piece: FileSlice, block_bytes: int, keys: Sequence[str], cut: TextCut
) -> Iterator[TextBlock]:
    """Blocks of a file that is no table. Errors become DataErrors."""
    path = piece.path
    line = 0
    damaged = lambda e: DataError(f"{path} is damaged after line {line}: {e}.")
    # Blocks are of lines, or of documents of plain text.
    try:
        with (
            os.fdopen(os.dup(sys.stdin.fileno()), "rb")
            if path == STDIN
            else open(path, "rb", BLOCK_BYTES)
        ) as raw:
            file = COMPRESSED.get(os.path.splitext(path)[1], lambda raw: raw)(raw)
            at = _seek_line(file, piece.start)
            if not is_plain_text(path):
                blocks = _lines(file, raw, piece, block_bytes)
            else:
                if not at:
                    check_is_text(
                        path, file.peek(BLOCK_BYTES).partition(b"\n")[0], keys
                    )
                documents = cut_documents(file, path, at, piece.stop, cut)
                blocks = blocks_of(documents, path, block_bytes, piece.start, raw.tell)
            for block in blocks:
                line = block.last
                yield block
    # All other errors are those of a damaged or unreadable file.
    except ConfigError:  # also a ValueError
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, ValueError) as e:
        raise damaged(e) from None
    except OSError as e:
        # bz2 raises OSError for data that are not bz2.
        if path.endswith(".bz2") and not e.strerror:
            raise damaged(e) from None
        raise DataError(f"cannot read {path}: {e.strerror or e}.") from None


def _lines(
    file: io.BufferedIOBase, raw: BinaryIO, piece: FileSlice, block_bytes: int
) -> Iterator[TextBlock]:
    number = 1
    while lines := _some_lines(file, block_bytes, piece, number):
        if number == 1 and not piece.start:
            lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
            if ARRAY.match(lines[0]):
                raise DataError(
                    f"{piece.path} is a JSON array, and JSON lines have one object in each line. "
                    f"Convert it: jq -c '.[]' {piece.path} > lines.jsonl"
                )
        numbers = range(number, number + len(lines))
        yield TextBlock(
            piece.path, numbers, lines, raw.tell() if raw.seekable() else 0, piece.start
        )
        number = numbers.stop


def _seek_line(file: io.BufferedIOBase, at: int) -> int:
    """Seek to the first line that begins at byte `at` or after it; returns where it begins."""
    if not at:  # a compressed file cannot seek
        return 0
    file.seek(at - 1)  # if the byte before ends a line, the next line begins at `at`
    return at - 1 + len(file.readline())


def _some_lines(
    file: io.BufferedIOBase, block_bytes: int, piece: FileSlice, first: int
) -> list[bytes]:
    """Lines of `block_bytes` together, or up to the end of the slice. first: number of the first one."""
    left = (
        block_bytes
        if piece.stop is None
        else min(block_bytes, piece.stop - file.tell())
    )
    lines: list[bytes] = []
    while left > 0 and (line := file.readline(LONGEST_BYTES + 1)):
        if len(line) > LONGEST_BYTES:
            raise DataError(
                f"{piece.path}: line {first + len(lines)} is longer than {LONGEST_BYTES >> 20} "
                "MiB, and a document is tokenized in memory as a whole. Divide that document."
            )
        lines.append(line)
        left -= len(line)
    return lines


def _open_zst(raw: BinaryIO) -> io.BufferedReader:
    """Raises ConfigError without zstandard. Reading damaged data raises EOFError or ValueError."""
    zstandard = import_extra("a .zst file", "zstandard", "data")
    return io.BufferedReader(_ZstFrames(raw, zstandard), ZST_BYTES)


class _ZstFrames(io.RawIOBase):
    """All frames of a .zst file. zstandard's own reader does not report a truncated last frame."""

    def __init__(self, raw: BinaryIO, zstandard):
        self._raw = raw
        self._zstandard = zstandard
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(ZST_BYTES)
            if not self._input:
                if self._frame is not None:
                    raise EOFError(
                        "the file was cut off: its last compressed frame is not complete"
                    )
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


OpenFile = io.BufferedReader | gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile
COMPRESSED: dict[str, Callable[[BinaryIO], OpenFile]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _open_zst,
}
