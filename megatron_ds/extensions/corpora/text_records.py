"""Records with a text for each key: JSON lines, and rows of tables; and why a record cannot be used.

    {"text": "The whole document, with escaped line breaks.", "source": "other keys are ignored"}

Tables are Parquet files, and HDF5 files with one array of texts for each key, read in blocks of rows. pyarrow
and h5py, of the extra `data`, are imported when the first such file is opened.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...errors import DataError
from ...host.packages import import_extra

Text = str | list[str]  # a document, or its sentences
ROWS = 1024  # of a block, whose texts are in memory together


@dataclass(frozen=True)
class TextBlock:
    """Consecutive lines of a file, documents of plain text, or rows of a table.

    numbers   of the lines or rows; of a document, its first line. A range where possible: it is sent to a
              worker
    contents  of each: bytes, a value for each key, or a whole row
    position  the reader's position in the file, in bytes on disk
    start     the byte where the reader began. Lines count from 1 there, and those before it are counted for
              messages only; rows count from 0
    """

    path: str
    numbers: Sequence[int]
    contents: Sequence[bytes | tuple | dict]
    position: int
    start: int = 0
    unit: str = "line"

    @property
    def last(self) -> int:
        """Number of the last row, or of the last line that is not blank."""
        end = self.contents[-1]
        lines = end.rstrip(b"\r\n").count(b"\n") if isinstance(end, bytes) else 0
        return self.numbers[-1] + lines


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


# The texts of each key, and the lines that have none.
Texts = tuple[list[list[Text]], list[BadLine]]


@lru_cache(maxsize=64)
def lines_before(path: str, start: int) -> int:
    """Number of lines that begin before byte `start` of an uncompressed file."""
    if not start:
        return 0
    # the line of byte start - 1, and all lines before it
    count = 1
    left = start - 1
    with open(path, "rb") as file:
        while left > 0 and (piece := file.read(min(left, 1 << 20))):
            count += piece.count(b"\n")
            left -= len(piece)
    return count


def place_of(block: TextBlock) -> str:
    """File and lines or rows of a block, for messages."""
    before = lines_before(block.path, block.start)
    return f"{block.path}, in {block.unit}s {block.numbers[0] + before} to {block.last + before}"


def texts_of(block: TextBlock, keys: Sequence[str], sentences: bool = False) -> Texts:
    """Return the texts of each key of JSON lines or rows, and the bad ones. Blank lines are ignored.

    sentences: a text may be a list of sentences.
    """
    texts: list[list[Text]] = [[] for _ in keys]
    bad = []
    for number, contents in zip(block.numbers, block.contents):
        if isinstance(contents, bytes) and (not contents or contents.isspace()):
            continue
        try:
            # A line is JSON; a row has its values already.
            values: Iterable[object] = contents
            if isinstance(contents, bytes):
                values = _values(contents, keys)
            found = [
                _checked_text(value, key, sentences) for key, value in zip(keys, values)
            ]
        except ValueError as e:
            bad.append(BadLine(block.path, number, str(e), block.start, block.unit))
            continue
        for column, text in zip(texts, found):
            column.append(text)
    return texts, bad


def record_in(line: bytes) -> object:
    """Return the JSON value of a line. Raises ValueError with the reason why the line is bad."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise ValueError(f"not UTF-8 at byte {e.start}") from None
    except json.JSONDecodeError as e:
        raise ValueError(f"not JSON: {e.msg} at column {e.colno}") from None
    except RecursionError:
        raise ValueError("not readable JSON: nested too deep") from None


def _values(line: bytes, keys: Sequence[str]) -> list[object]:
    """Raises ValueError with the reason why a line is bad."""
    record = record_in(line)
    if not isinstance(record, dict):
        raise ValueError(
            f"a JSON {type(record).__name__}, not an object with the key {keys[0]!r}"
        )
    if missing := [key for key in keys if key not in record]:
        raise ValueError(
            f"no key {missing[0]!r}; it has {', '.join(map(repr, record)) or 'none'}"
        )
    return [record[key] for key in keys]


def _checked_text(value: object, key: str, sentences: bool) -> Text:
    """Return the text of a key, or its sentences. Raises ValueError unless UTF-8 can encode it."""
    if sentences and isinstance(value, list):
        return [_checked(sentence, f"an entry of {key!r}") for sentence in value]
    return _checked(value, repr(key))


def _checked(value: object, what: str) -> str:
    if isinstance(value, bytes):  # HDF5 stores texts as bytes
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as e:
            raise ValueError(f"{what} is not UTF-8 at byte {e.start}") from None
    if not isinstance(value, str):
        raise ValueError(f"{what} is {type(value).__name__}, not text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except (
            UnicodeEncodeError
        ) as e:  # "\\ud83d" alone is legal JSON, but not a character
            raise ValueError(
                f"{what} holds half a surrogate pair at character {e.start}"
            ) from None
    return value


def read_rows(
    path: str, keys: Sequence[str], size: int, start: int = 0, stop: int | None = None
) -> Iterator[TextBlock]:
    """Rows start … stop − 1.  size: bytes of the file.  Raises DataError, as `open_table`."""
    table = open_table(path, keys)
    stop = table.num_rows if stop is None else stop
    for rows in table.read(start, stop):
        # Progress counts bytes of the file, as for text.
        end = start + len(rows)
        position = size * end // max(1, table.num_rows)
        yield TextBlock(path, range(start, end), rows, position, unit="row")
        start = end


def open_table(path: str, keys: Sequence[str]) -> "_Parquet | _HDF5":
    """Raises DataError for a damaged file or a missing key."""
    if path.endswith(".parquet"):
        return _Parquet(path, keys)
    return _HDF5(path, keys)


class _Parquet:
    """The columns of a Parquet file as rows of texts."""

    def __init__(self, path: str, keys: Sequence[str]):
        pyarrow = import_extra(path, "pyarrow", "data")
        import_extra(path, "pyarrow.parquet", "data")
        self._path = path
        self._keys = list(keys) or None
        self._errors = (pyarrow.ArrowException, OSError)
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except self._errors as e:
            raise _damaged(path, "Parquet", e) from None
        _check_keys(path, keys, self._file.schema_arrow.names)
        self.num_rows = self._file.metadata.num_rows

    def read(self, start: int, stop: int) -> Iterator[list[tuple] | list[dict]]:
        """Rows start … stop − 1 in parts: a value for each key; without keys, the whole rows."""
        at = 0
        # Groups outside of the range are not read: a worker has its own part of a large file.
        for group in range(self._file.metadata.num_row_groups):
            rows = self._file.metadata.row_group(group).num_rows
            if at >= stop or start >= at + rows:
                at += rows
                continue
            try:
                for batch in self._file.iter_batches(
                    ROWS, row_groups=[group], columns=self._keys
                ):
                    low = max(start - at, 0)
                    high = min(stop - at, batch.num_rows)
                    if low < high:
                        yield self._rows(batch.slice(low, high - low))
                    at += batch.num_rows
            except self._errors as e:
                raise _damaged(self._path, "Parquet", e) from None

    def _rows(self, part) -> list[tuple] | list[dict]:
        if self._keys is None:
            return part.to_pylist()
        # Parquet stores columns, and a record needs rows.
        columns = [part.column(key).to_pylist() for key in self._keys]
        return list(zip(*columns))


class _HDF5:
    """The arrays of an HDF5 file as rows of texts."""

    def __init__(self, path: str, keys: Sequence[str]):
        h5py = import_extra(path, "h5py", "data")
        try:
            self._file = h5py.File(path, "r")
        except OSError as e:
            raise _damaged(path, "HDF5", e) from None
        self._path = path
        self._keys = list(keys)
        # A file may have groups and attributes, too.
        arrays = [
            name
            for name, value in self._file.items()
            if isinstance(value, h5py.Dataset)
        ]
        _check_keys(path, keys, arrays)
        shapes = {key: self._file[key].shape for key in keys}
        lengths = set(shapes.values())
        # A text for each key and row.
        if len(lengths) > 1 or any(len(shape) != 1 for shape in lengths):
            raise DataError(
                f"{path}: the arrays have shapes {shapes}; texts need arrays of one dimension "
                "and of equal length."
            )
        self.num_rows = shapes[keys[0]][0]

    def read(self, start: int, stop: int) -> Iterator[list[tuple]]:
        """Rows start … stop − 1, a value for each key, in parts of at most ROWS rows."""
        try:
            for first in range(start, stop, ROWS):
                # One read of the file for each column.
                part = slice(first, min(first + ROWS, stop))
                columns = [self._file[key][part].tolist() for key in self._keys]
                yield list(zip(*columns))
        except OSError as e:
            raise _damaged(self._path, "HDF5", e) from None


def _check_keys(path: str, keys: Sequence[str], found: Sequence[str]) -> None:
    if missing := [key for key in keys if key not in found]:
        raise DataError(
            f"{path} has no column {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, found)) or 'none'}. Name existing columns with --json-keys."
        )


def _damaged(path: str, kind: str, error: Exception) -> DataError:
    return DataError(
        f"{path} cannot be read as {kind}: {str(error).splitlines()[0]}. Copy it again, or "
        "rename it if it is a file of another kind."
    )
