"""Index files of a metric, in the layout of DeepSpeed's DataAnalyzer and data sampler.

A *list file* is a .bin/.idx pair like a corpus (`indexed.py`) whose sequences are *rows* of integers. Three
type codes differ: 6, 7 and 8 are uint16, uint32 and uint64 here, and two float types and uint16 in a corpus.

    {metric}_sample_to_metric                      row i: the value of sample i
    {metric}_index_to_metric                       row v: the v-th smallest value that occurs
    {metric}_index_to_sample                       row v: the samples that have it, in order
    {metric}_index_to_sample_percentile_merged     the same samples, a hundredth of the values in each row
    {metric}_metric_value                          one row: a sum over all samples, such as token counts

So all rows of `index_to_sample` together are the samples sorted by difficulty.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...errors import DataError
from ..text.indexed import HEADER, MAGIC, VERSION, corpus_paths

CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.uint16, 7: np.uint32,
         8: np.uint64}
CODE_OF = {np.dtype(t): code for code, t in CODES.items()}
UNSIGNED, SIGNED = (np.uint8, np.uint16, np.uint32, np.uint64), (np.int8, np.int16, np.int32, np.int64)
MOST_PERCENTILES = 100


def fitting_dtype(low: int, high: int) -> np.dtype:
    """The narrowest type for `low` to `high`; unsigned unless a number is negative, as in DeepSpeed."""
    for kind in UNSIGNED if low >= 0 else SIGNED:
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return np.dtype(kind)
    raise DataError(f"values from {low} to {high} do not fit 64 bits.")


class ListFile:
    """Rows of integers, mapped into memory; `flat` has all rows in order. Raises DataError."""

    def __init__(self, prefix: str | os.PathLike):
        self.bin_path, self.idx_path = corpus_paths(prefix)
        try:
            index = np.fromfile(self.idx_path, np.uint8)
            size = self.bin_path.stat().st_size
        except FileNotFoundError as error:
            raise DataError(f"{error.filename} does not exist. Index files are .bin/.idx pairs, as "
                            "tools/analyze_data.py writes them; give their common name without its "
                            "ending.") from None
        except OSError as error:
            raise DataError(f"cannot read {error.filename}: {error.strerror}.") from None
        dtype, rows = self._header(index)
        self.lengths = index[HEADER.size:HEADER.size + 4 * rows].view("<i4")
        total = int(self.lengths.sum(dtype=np.int64))
        if (self.lengths < 0).any() or size != total * dtype.itemsize:
            raise self._damaged(f"{self.bin_path} has {size} bytes, where its {rows} rows of {total} numbers "
                                f"take {total * dtype.itemsize}")
        self.flat = np.asarray(np.memmap(self.bin_path, dtype, "r")) if size else np.empty(0, dtype)
        self.bounds = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        return self.flat[self.bounds[row]:self.bounds[row + 1]]

    def _header(self, index: np.ndarray) -> tuple[np.dtype, int]:
        if len(index) < HEADER.size:
            raise self._damaged(f"it has {len(index)} bytes, fewer than its header of {HEADER.size}")
        magic, version, code, rows, documents = HEADER.unpack(index[:HEADER.size].tobytes())
        if magic != MAGIC or version != VERSION or code not in CODES:
            raise self._damaged(f"it begins with {magic!r}, version {version}, type {code}: not an index of "
                                "this format")
        size = HEADER.size + 12 * rows + 8 * documents
        if len(index) != size:
            raise self._damaged(f"it has {len(index)} bytes, where {rows} rows take {size}")
        return np.dtype(CODES[code]).newbyteorder("<"), rows

    def _damaged(self, what: str) -> DataError:
        return DataError(f"{self.idx_path} is damaged: {what}. Make it again with tools/analyze_data.py.")


def write_list_file(prefix: str | os.PathLike, flat: np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
    """Write rows of these lengths to temporary files, remove an old pair, rename, the index last."""
    lengths = np.asarray(lengths, np.int64)
    assert lengths.sum() == len(flat), f"{len(flat)} numbers in rows of {lengths.sum()}"
    if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
        raise DataError(f"{prefix}: {lengths.max()} samples have the same value, and the format counts up to "
                        "2^31 - 1 in a row. Use a metric with more different values.")
    bin_path, idx_path = corpus_paths(prefix)
    offsets = (np.cumsum(lengths) - lengths) * flat.dtype.itemsize
    header = HEADER.pack(MAGIC, VERSION, CODE_OF[flat.dtype], len(lengths), 2)
    idx_path.unlink(missing_ok=True)
    _write(bin_path, flat.astype(flat.dtype.newbyteorder("<"), copy=False))
    _write(idx_path, header, lengths.astype("<i4"), offsets.astype("<i8"), np.array([0, len(lengths)], "<i8"))


def write_metric(prefix: Path, values: np.ndarray) -> None:
    """The four files of a metric, with an integer for each sample [n].  prefix: `folder/{metric}`."""
    value_type = fitting_dtype(int(values.min()), int(values.max()))
    order = np.argsort(values, kind="stable").astype(fitting_dtype(0, len(values) - 1))
    distinct, counts = np.unique(values, return_counts=True)
    step = max(1, len(distinct) // MOST_PERCENTILES)
    write_list_file(f"{prefix}_sample_to_metric", values.astype(value_type), np.ones(len(values), np.int64))
    write_list_file(f"{prefix}_index_to_metric", distinct.astype(value_type),
                    np.ones(len(distinct), np.int64))
    write_list_file(f"{prefix}_index_to_sample", order, counts)
    write_list_file(f"{prefix}_index_to_sample_percentile_merged", order,
                    np.add.reduceat(counts, range(0, len(counts), step)))


def write_total(prefix: Path, totals: np.ndarray) -> None:
    """The file of a metric that is a sum over all samples.  totals: [k], not negative."""
    dtype = fitting_dtype(int(totals.min()), int(totals.max()))
    write_list_file(f"{prefix}_metric_value", totals.astype(dtype), [len(totals)])


def _write(path: Path, *parts) -> None:
    beside = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise DataError(f"cannot write {path}: {error.strerror}. Free some space, or choose another "
                        "--output, and run the same command again: finished shards are kept.") from None
