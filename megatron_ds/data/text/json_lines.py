"""Text corpora as JSON lines: the texts of each line, and the reason why a line cannot be used.

    {"text": "The whole document, with escaped line breaks.", "source": "other keys are ignored"}
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

Text = str | list[str]                                      # a document, or its sentences


@dataclass(frozen=True)
class LineBlock:
    """Consecutive lines of a file.

    first_line   counted from 1 at byte `start`, where the reader began; lines before it are counted for
                 messages only
    position     the reader's position in the file, in bytes on disk
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
    """A line or table row that holds no usable document."""

    path: str
    line: int
    reason: str
    start: int = 0
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.path}, {self.unit} {self.line + lines_before(self.path, self.start)}: {self.reason}"


Texts = tuple[list[list[Text]], list[BadLine]]           # the texts of each key, and the lines that have none


@lru_cache(maxsize=64)
def lines_before(path: str, start: int) -> int:
    """Number of lines that begin before byte `start` of an uncompressed file."""
    if not start:
        return 0
    count, left = 1, start - 1                           # the line of byte start - 1, and all lines before it
    with open(path, "rb") as file:
        while left > 0 and (piece := file.read(min(left, 1 << 20))):
            count += piece.count(b"\n")
            left -= len(piece)
    return count


def texts_of_lines(block: LineBlock, keys: Sequence[str], sentences: bool = False) -> Texts:
    """The texts of each key. Blank lines are ignored.  sentences: a text may also be a list of sentences."""
    numbered = enumerate(block.lines, block.first_line)
    lines = ((number, line) for number, line in numbered if line and not line.isspace())
    return collect_texts(lines, len(keys), lambda line: _texts(line, keys, sentences),
                         lambda number, reason: BadLine(block.path, number, reason, block.start))


def collect_texts(items: Iterable[tuple[int, object]], num_keys: int, read: Callable[..., list[Text]],
                  bad_line: Callable[[int, str], BadLine]) -> Texts:
    """`read(item)` gives a text for each key, or raises ValueError with the reason why the item is bad."""
    texts: list[list[Text]] = [[] for _ in range(num_keys)]
    bad = []
    for number, item in items:
        try:
            found = read(item)
        except ValueError as e:
            bad.append(bad_line(number, str(e)))
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
        raise ValueError("not readable JSON: nested too deep") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object with the key {keys[0]!r}")
    if missing := [key for key in keys if key not in record]:
        raise ValueError(f"no key {missing[0]!r}; it has {', '.join(map(repr, record)) or 'none'}")
    return [checked_text(record[key], key, sentences) for key in keys]


def checked_text(value: object, key: str, sentences: bool) -> Text:
    """The text of a key, or its sentences. Raises ValueError unless UTF-8 can encode it."""
    if sentences and isinstance(value, list):
        return [_checked(sentence, f"an entry of {key!r}") for sentence in value]
    return _checked(value, repr(key))


def _checked(value: object, what: str) -> str:
    if isinstance(value, bytes):                            # HDF5 stores texts as bytes
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as e:
            raise ValueError(f"{what} is not UTF-8 at byte {e.start}") from None
    if not isinstance(value, str):
        raise ValueError(f"{what} is {type(value).__name__}, not text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as e:                   # "\\ud83d" alone is legal JSON, but not a character
            raise ValueError(f"{what} holds half a surrogate pair at character {e.start}") from None
    return value
