"""Plain text: documents of a file, in blocks.

    file            the whole file is one document
    paragraph       blank lines separate documents
    line            each line is a document
    a separator     lines that are equal to this text separate documents

Documents of white space only are left out. The newlines at the end of a document are removed, CR LF becomes
LF, and a byte-order mark at the start of the file is dropped.

A file can be read in slices (`text_files.slices_of_shard`). Call a line that ends a document an *end*. The
slice from byte `start` to byte `stop` holds the documents between the first end at or after `start` and the
first end at or after `stop`, so consecutive slices hold each document once, wherever the file is cut.
"""

import codecs
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ...errors import DataError
from .text_records import BadLine, Text, TextBlock, Texts

WHERE = ("file", "paragraph", "line")
LONGEST_BYTES = 1 << 27  # of a document: the library takes 150 bytes of memory for each
OTHER_MARKS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


@dataclass(frozen=True)
class TextCut:
    """Where the documents of a text file end: at one of WHERE or, if given, at lines equal to `separator`."""

    where: str = "file"
    separator: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether a file is one document."""
        return self.where == "file" and self.separator is None

    @property
    def keeps_end(self) -> bool:
        """Whether the line that ends a document belongs to it."""
        return self.where == "line" and self.separator is None

    def ends(self, line: bytes) -> bool:
        """Return whether this line ends a document."""
        if self.separator is not None:
            return line.rstrip(b"\r\n") == self.separator.encode()
        return self.where == "line" or self.where == "paragraph" and not line.strip()


def cut_documents(
    file: io.BufferedIOBase, path: str, at: int, stop: int | None, cut: TextCut
) -> Iterator[tuple[int, bytes]]:
    """(first line, text) of each document of a slice.

    at: position of the file, the start of a line; 0 for the first slice.
    Raises DataError for a document longer than LONGEST_BYTES.
    """
    # One byte more than allowed shows that the file is too long.
    if cut.is_whole:
        text = file.read(LONGEST_BYTES + 1).removeprefix(codecs.BOM_UTF8)
        if len(text) > LONGEST_BYTES:
            raise DataError(_too_long(path, 1))
        yield 1, text
        return
    # A slice begins after the first end of a document in it, and goes over its own end to finish the last
    # document. So each document belongs to one slice.
    is_inside = at == 0
    first = 1
    size = 0
    lines = []
    for number, line in enumerate(
        iter(partial(file.readline, LONGEST_BYTES + 1), b""), 1
    ):
        begin = at
        at = at + len(line)
        is_end = cut.ends(line)
        if is_inside and (cut.keeps_end or not is_end):
            lines.append(line.removeprefix(codecs.BOM_UTF8) if begin == 0 else line)
            size += len(line)
            if size > LONGEST_BYTES:
                raise DataError(_too_long(path, first))
        # Other lines belong to the document that is being gathered.
        if not is_end:
            continue
        if is_inside:
            yield first, b"".join(lines)
        if stop is not None and begin >= stop:
            return
        is_inside = True
        first = number + 1
        size = 0
        lines = []
    if lines:
        yield first, b"".join(lines)


def blocks_of(
    documents: Iterable[tuple[int, bytes]],
    path: str,
    block_bytes: int,
    start: int,
    position: Callable[[], int],
) -> Iterator[TextBlock]:
    """Documents that are not blank, in blocks of at least `block_bytes`.  position: that of the reader."""
    numbers: list[int] = []
    contents: list[bytes] = []
    size = 0
    for first, text in documents:
        if text and not text.isspace():
            numbers.append(first)
            contents.append(text)
            size += len(text)
        if size >= block_bytes:
            yield TextBlock(path, tuple(numbers), tuple(contents), position(), start)
            numbers.clear()
            contents.clear()
            size = 0
    if numbers:
        yield TextBlock(path, tuple(numbers), tuple(contents), position(), start)


def check_is_text(path: str, first: bytes, keys: Sequence[str]) -> None:
    """Raises DataError for a file whose first line is UTF-16, or JSON lines with one of the keys."""
    for mark, name in OTHER_MARKS.items():
        if first.startswith(mark):
            raise DataError(
                f"{path} is text in {name}, and only UTF-8 is read. Convert it: "
                f"iconv -f {name} -t UTF-8 {path}"
            )
    if first.lstrip(codecs.BOM_UTF8 + b" ").startswith(b'{"'):
        try:
            record = json.loads(first.decode("utf-8-sig"))
        except (ValueError, RecursionError):
            return
        if found := [key for key in keys if isinstance(record, dict) and key in record]:
            raise DataError(
                f"{path} holds JSON lines: its first line is a JSON object with the key "
                f"{found[0]!r}. Its name makes it plain text, so the JSON itself would become "
                "tokens. Rename it to .jsonl."
            )


def texts_of_documents(block: TextBlock) -> Texts:
    """Return the documents as texts of one key. A document that is not UTF-8 is reported by its bad line."""
    texts: list[Text] = []
    bad = []
    for first, data in zip(block.numbers, block.contents):
        assert isinstance(data, bytes), f"a document of {block.path} is {type(data)}"
        try:
            texts.append(data.decode("utf-8").replace("\r\n", "\n").rstrip("\n"))
        except UnicodeDecodeError as e:
            line_start = data.rfind(b"\n", 0, e.start) + 1
            bad.append(
                BadLine(
                    block.path,
                    first + data.count(b"\n", 0, e.start),
                    f"not UTF-8 at byte {e.start - line_start}",
                    block.start,
                )
            )
    return [texts], bad


def _too_long(path: str, line: int) -> str:
    return (
        f"{path}: the document that begins in line {line} is longer than {LONGEST_BYTES >> 20} MiB, and "
        "a document is tokenized in memory as a whole. Cut the file into documents with --text-documents "
        "paragraph or line, or with --text-separator."
    )
