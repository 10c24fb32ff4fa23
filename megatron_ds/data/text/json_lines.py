"""Text corpora as JSON lines: what a line must be, and what is said of one that is not.

    {"text": "The whole document, line breaks escaped.", "source": "anything else is ignored"}
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

Text = str | list[str]                                      # a document, or its sentences


@dataclass(frozen=True)
class Block:
    """Consecutive lines of a file; `position` is where its reader stands, in bytes on disk.

    first_line counts from 1 at byte `start`, where the reader began; lines before it are counted only for a message.
    """

    path: str
    first_line: int
    lines: list[bytes]
    position: int
    start: int = 0

    @property
    def last_line(self) -> int:
        return self.first_line + len(self.lines) - 1


@dataclass(frozen=True)
class BadLine:
    """A line, or a row of a table, that is no document or makes its document unreadable."""

    path: str
    line: int
    reason: str
    start: int = 0
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.path}, {self.unit} {self.line + lines_before(self.path, self.start)}: {self.reason}"


@lru_cache(maxsize=64)
def lines_before(path: str, start: int) -> int:
    """Lines that begin before byte `start` of a plain file."""
    if not start:
        return 0
    count, left = 1, start - 1                              # the line that byte start - 1 belongs to, and those before it
    with open(path, "rb") as file:
        while left > 0 and (piece := file.read(min(left, 1 << 20))):
            count += piece.count(b"\n")
            left -= len(piece)
    return count


def texts_of_lines(block: Block, keys: Sequence[str], sentences: bool = False) -> tuple[list[list[Text]], list[BadLine]]:
    """For each key the texts of the good lines, and the bad lines. A blank line is neither.

    sentences: a text may also be a list of sentences.
    """
    texts: list[list[Text]] = [[] for _ in keys]
    bad = []
    for number, line in enumerate(block.lines, block.first_line):
        if line.isspace() or not line:
            continue
        try:
            found = _texts(line, keys, sentences)
        except ValueError as e:
            bad.append(BadLine(block.path, number, str(e), block.start))
            continue
        for column, text in zip(texts, found):
            column.append(text)
    return texts, bad


def _texts(line: bytes, keys: Sequence[str], sentences: bool) -> list[Text]:
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
    return [_text(record, key, sentences) for key in keys]


def _text(record: dict, key: str, sentences: bool) -> Text:
    if key not in record:
        raise ValueError(f"no key {key!r}; it has {', '.join(map(repr, record)) or 'none'}")
    text = record[key]
    if sentences and isinstance(text, list):
        return [checked_text(sentence, f"an entry of {key!r}") for sentence in text]
    return checked_text(text, repr(key))


def checked_text(text: object, what: str) -> str:
    """Raises ValueError for anything that is not text which can be encoded."""
    if not isinstance(text, str):
        raise ValueError(f"{what} is {type(text).__name__}, not text")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:                     # "\\ud83d" alone is legal JSON, but no character
            raise ValueError(f"{what} holds half a surrogate pair at character {e.start}") from None
    return text
