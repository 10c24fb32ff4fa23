"""Text in tables: Parquet files, and HDF5 files with one array of texts for each key, read in blocks of rows.

pyarrow and h5py, of the extra `data`, are imported when the first such file is opened.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...errors import ConfigError, DataError
from .json_lines import BadLine, Texts, checked_text, collect_texts

ROWS = 1024                                                 # of a block, whose texts are in memory together


@dataclass(frozen=True)
class TableBlock:
    """Consecutive rows.

    first_row   counted from 0
    columns     key → as many values as there are rows
    position    the bytes of the file that correspond to the rows read so far
    """

    path: str
    first_row: int
    columns: dict[str, list]
    position: int

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.columns.values())))


def missing_package(extra: str, package: str, what: str, error: ImportError) -> ConfigError:
    """The error for a package of an extra that is not installed."""
    return ConfigError(f"{what} needs {package} ({error}). Install it with: pip install "
                       f"'megatron_ds[{extra}]'")


def num_rows(path: str, keys: Sequence[str]) -> int:
    """Rows of a table file. Raises DataError for a damaged file or a missing key."""
    return _open(path, keys).num_rows


def read_rows(path: str, keys: Sequence[str], size: int, start: int = 0,
              stop: int | None = None) -> Iterator[TableBlock]:
    """Rows start … stop − 1.  size: bytes of the file.  Raises DataError, as `num_rows`."""
    table = _open(path, keys)
    stop, first = table.num_rows if stop is None else stop, start
    for columns in table.read(start, stop):
        count = len(columns[keys[0]])
        yield TableBlock(path, first, columns, size * (first + count) // max(1, table.num_rows))
        first += count


def texts_of_rows(block: TableBlock, keys: Sequence[str], sentences: bool = False) -> Texts:
    """As `texts_of_lines`. A row with a null in one of the columns is bad."""
    rows = enumerate(zip(*(block.columns[key] for key in keys)), block.first_row)
    read = lambda row: [checked_text(value, key, sentences) for key, value in zip(keys, row)]
    return collect_texts(rows, len(keys), read, lambda i, reason: BadLine(block.path, i, reason, unit="row"))


def _open(path: str, keys: Sequence[str]) -> "_Parquet | _HDF5":
    return (_Parquet if path.endswith(".parquet") else _HDF5)(path, keys)


class _Parquet:
    def __init__(self, path: str, keys: Sequence[str]):
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as e:
            raise missing_package("data", "pyarrow", path, e) from None
        self._path, self._keys = path, list(keys)
        self._errors = (pyarrow.ArrowException, OSError)
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except self._errors as e:
            raise _damaged(path, "Parquet", e) from None
        _check_keys(path, keys, self._file.schema_arrow.names)
        self.num_rows = self._file.metadata.num_rows

    def read(self, start: int, stop: int) -> Iterator[dict[str, list]]:
        first = 0
        for group in range(self._file.metadata.num_row_groups):
            rows = self._file.metadata.row_group(group).num_rows
            if first < stop and start < first + rows:
                yield from self._read_group(group, max(0, start - first), min(rows, stop - first))
            first += rows

    def _read_group(self, group: int, start: int, stop: int) -> Iterator[dict[str, list]]:
        at = 0
        try:
            for batch in self._file.iter_batches(ROWS, row_groups=[group], columns=self._keys):
                low, high = max(start - at, 0), min(stop - at, batch.num_rows)
                if low < high:
                    part = batch.slice(low, high - low)
                    yield {key: part.column(key).to_pylist() for key in self._keys}
                at += batch.num_rows
        except self._errors as e:
            raise _damaged(self._path, "Parquet", e) from None


class _HDF5:
    def __init__(self, path: str, keys: Sequence[str]):
        try:
            import h5py
        except ImportError as e:
            raise missing_package("data", "h5py", path, e) from None
        try:
            self._file = h5py.File(path, "r")
        except OSError as e:
            raise _damaged(path, "HDF5", e) from None
        self._path, self._keys = path, list(keys)
        arrays = [name for name, value in self._file.items() if isinstance(value, h5py.Dataset)]
        _check_keys(path, keys, arrays)
        counts = {key: self._file[key].shape for key in keys}
        if len(set(counts.values())) > 1 or any(len(shape) != 1 for shape in counts.values()):
            raise DataError(f"{path}: the arrays have shapes {counts}; texts need arrays of one dimension "
                            "and of equal length.")
        self.num_rows = counts[keys[0]][0]

    def read(self, start: int, stop: int) -> Iterator[dict[str, list]]:
        try:
            for first in range(start, stop, ROWS):
                yield {key: self._file[key][first:min(first + ROWS, stop)].tolist() for key in self._keys}
        except OSError as e:
            raise _damaged(self._path, "HDF5", e) from None


def _check_keys(path: str, keys: Sequence[str], found: Sequence[str]) -> None:
    if missing := [key for key in keys if key not in found]:
        raise DataError(f"{path} has no column {', '.join(map(repr, missing))}; it has "
                        f"{', '.join(map(repr, found)) or 'none'}. Name existing columns with --json-keys.")


def _damaged(path: str, kind: str, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read as {kind}: {str(error).splitlines()[0]}. Copy it again, or "
                     "rename it if it is a file of another kind.")
