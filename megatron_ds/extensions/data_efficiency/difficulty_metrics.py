"""Difficulty metrics, functions from samples to one integer for each sample; and their index files.

The files have the layout of DeepSpeed's DataAnalyzer and data sampler. A *list file* is a .bin/.idx pair like
a corpus (`indexed.py`), whose sequences are *rows* of integers. Three type codes differ: 6, 7 and 8 are
uint16, uint32 and uint64 here, and two float types and uint16 in a corpus.

    {metric}_sample_to_metric                      row i: the value of sample i
    {metric}_index_to_metric                       row v: the v-th smallest value that occurs
    {metric}_index_to_sample                       row v: the samples that have it, in order
    {metric}_index_to_sample_percentile_merged     the same samples, a hundredth of the values in each row
    {metric}_metric_value                          one row: a sum over all samples, such as token counts

So all rows of `index_to_sample` together are the samples sorted by difficulty.

Names and values of the metrics are those of Megatron-DeepSpeed's `analyze_data.py`. GPT samples are
{"tokens": [b, s + 1]}, padded with −1; BERT samples are {"text": [b, s], "padding_mask": [b, s], …}.

    seqlen                number of tokens without padding
    total_vocab_freq      of the whole dataset: the count of each token
    vocab_rarity          the sum of −log p(token), with p from total_vocab_freq: low for common tokens
    seqlen_vocab_rarity   by length, and by rarity among equal lengths
    name=module:function  a user's function

Li et al. 2022 (arXiv:2212.03597), section 3.1.
"""

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ...data.text.indexed import (
    HEADER,
    MAGIC,
    VERSION,
    corpus_paths,
    replacing,
    write_index,
)
from ...errors import ConfigError, DataError
from ...host.regular_file import read_regular
from ...registry import did_you_mean
from .difficulty import import_function

CODES = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.uint16,
    7: np.uint32,
    8: np.uint64,
}
CODE_OF = {np.dtype(t): code for code, t in CODES.items()}
UNSIGNED = (np.uint8, np.uint16, np.uint32, np.uint64)
SIGNED = (np.int8, np.int16, np.int32, np.int64)
MOST_PERCENTILES = 100
FULL_DISK = (
    "Free some space, or choose another --output, and run the same command again: finished shards "
    "are kept."
)
Values = Mapping[str, np.ndarray]
FREQUENCY = "total_vocab_freq"
NEED_FREQUENCY = ("vocab_rarity", "seqlen_vocab_rarity")


def fitting_dtype(low: int, high: int) -> np.dtype:
    """Return the narrowest type for `low` to `high`; unsigned unless a number is negative, as in DeepSpeed."""
    for kind in UNSIGNED if low >= 0 else SIGNED:
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return np.dtype(kind)
    raise DataError(f"values from {low} to {high} do not fit 64 bits.")


class ListFile:
    """Rows of integers, mapped into memory; `flat` has all rows in order. Raises DataError."""

    def __init__(self, prefix: str | os.PathLike):
        self.bin_path, self.idx_path = corpus_paths(prefix)
        # Read the index and the size of the values.
        try:
            index = np.frombuffer(read_regular(self.idx_path, DataError), np.uint8)
            size = self.bin_path.stat().st_size
        except FileNotFoundError as error:
            raise DataError(
                f"{error.filename} does not exist. Index files are .bin/.idx pairs, as "
                "megatron-ds analyze writes them; give their common name without its "
                "ending."
            ) from None
        except OSError as error:
            raise DataError(
                f"cannot read {error.filename}: {error.strerror}."
            ) from None
        # The lengths of the rows must account for all values.
        dtype, rows = self._header(index)
        self.lengths = index[HEADER.size : HEADER.size + 4 * rows].view("<i4")
        total = int(self.lengths.sum(dtype=np.int64))
        if (self.lengths < 0).any() or size != total * dtype.itemsize:
            raise self._damaged(
                f"{self.bin_path} has {size} bytes, where its {rows} rows of {total} numbers "
                f"take {total * dtype.itemsize}"
            )
        # An empty file cannot be mapped.
        self.flat = (
            np.asarray(np.memmap(self.bin_path, dtype, "r"))
            if size
            else np.empty(0, dtype)
        )
        self.bounds = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        return self.flat[self.bounds[row] : self.bounds[row + 1]]

    def _header(self, index: np.ndarray) -> tuple[np.dtype, int]:
        if len(index) < HEADER.size:
            raise self._damaged(
                f"it has {len(index)} bytes, fewer than its header of {HEADER.size}"
            )
        magic, version, code, rows, documents = HEADER.unpack(
            index[: HEADER.size].tobytes()
        )
        if magic != MAGIC or version != VERSION or code not in CODES:
            raise self._damaged(
                f"it begins with {magic!r}, version {version}, type {code}: not an index of "
                "this format"
            )
        size = HEADER.size + 12 * rows + 8 * documents
        if len(index) != size:
            raise self._damaged(
                f"it has {len(index)} bytes, where {rows} rows take {size}"
            )
        return np.dtype(CODES[code]).newbyteorder("<"), rows

    def _damaged(self, what: str) -> DataError:
        return DataError(
            f"{self.idx_path} is damaged: {what}. Make it again with megatron-ds analyze."
        )


def write_list_file(
    prefix: str | os.PathLike, flat: np.ndarray, lengths: Sequence[int] | np.ndarray
) -> None:
    """Write rows of these lengths. An old pair is removed first, and the index is written last."""
    lengths = np.asarray(lengths, np.int64)
    assert lengths.sum() == len(flat), f"{len(flat)} numbers in rows of {lengths.sum()}"
    if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
        raise DataError(
            f"{prefix}: {lengths.max()} samples have the same value, and the format counts up to "
            "2^31 - 1 in a row. Use a metric with more different values."
        )
    bin_path, idx_path = corpus_paths(prefix)
    idx_path.unlink(missing_ok=True)
    with replacing(bin_path, FULL_DISK) as file:
        file.write(flat.astype(flat.dtype.newbyteorder("<"), copy=False).data)
    with replacing(idx_path, FULL_DISK) as file:
        write_index(
            file,
            CODE_OF[flat.dtype],
            flat.dtype.itemsize,
            [(lengths, np.array([0, len(lengths)]))],
        )


def write_metric(prefix: Path, values: np.ndarray) -> None:
    """The four files of a metric, with an integer for each sample [n].  prefix: `folder/{metric}`."""
    value_type = fitting_dtype(int(values.min()), int(values.max()))
    order = np.argsort(values, kind="stable").astype(fitting_dtype(0, len(values) - 1))
    distinct, counts = np.unique(values, return_counts=True)
    step = max(1, len(distinct) // MOST_PERCENTILES)
    write_list_file(
        f"{prefix}_sample_to_metric",
        values.astype(value_type),
        np.ones(len(values), np.int64),
    )
    write_list_file(
        f"{prefix}_index_to_metric",
        distinct.astype(value_type),
        np.ones(len(distinct), np.int64),
    )
    write_list_file(f"{prefix}_index_to_sample", order, counts)
    write_list_file(
        f"{prefix}_index_to_sample_percentile_merged",
        order,
        np.add.reduceat(counts, range(0, len(counts), step)),
    )


def write_total(prefix: Path, totals: np.ndarray) -> None:
    """The file of a metric that is a sum over all samples.  totals: [k], not negative."""
    dtype = fitting_dtype(int(totals.min()), int(totals.max()))
    write_list_file(f"{prefix}_metric_value", totals.astype(dtype), [len(totals)])


@dataclass(frozen=True)
class MetricSpec:
    """A metric of a command line, and the vocabulary size and sequence length of the dataset.

    source: import path of a user's function, "" for a built-in metric.
    """

    name: str
    source: str = ""
    vocab_size: int = 0
    seq_length: int = 0

    def function(self, save: Path) -> Callable[[Values], np.ndarray]:
        """Samples → values of the metric.  save: folder of the analysis, for `rarities`."""
        if self.source:
            return import_function(self.source, f"metric {self.name}: the function")
        weights = rarities(save) if self.needs_frequency else None
        return partial(KNOWN[self.name], self, weights)

    def definition(self, save: Path) -> list:
        """All that the values depend on besides the samples, as JSON values."""
        made_of = [_digest(frequency_path(save))] if self.name in NEED_FREQUENCY else []
        vocab_size = (
            self.vocab_size if self.name in (*TOTALS, *NEED_FREQUENCY) else None
        )
        return [self.name, self.source, vocab_size, *made_of]

    @property
    def is_total(self) -> bool:
        """Whether the metric is one table for the whole dataset, not a number for each sample."""
        return not self.source and self.name in TOTALS

    @property
    def needs_frequency(self) -> bool:
        """Whether it is computed from total_vocab_freq."""
        return not self.source and self.name in NEED_FREQUENCY


def parse_metric(text: str, vocab_size: int, seq_length: int) -> MetricSpec:
    """`vocab_rarity`, or `name=module:function`. Raises ConfigError."""
    name, equals, source = text.partition("=")
    if not equals and name not in KNOWN:
        raise ConfigError(
            f"--metrics {text}{did_you_mean(name, [*KNOWN]) or ': unknown.'} Known: "
            f"{', '.join(KNOWN)}; or one of your own, name=module:function."
        )
    if equals:
        if not name or not source or name in KNOWN:
            raise ConfigError(
                f"--metrics {text}: give a function as name=module:function, with a name that "
                f"is not one of {', '.join(KNOWN)}."
            )
        if not name.replace("_", "").isalnum():
            raise ConfigError(
                f"--metrics {text}: {name!r} names a folder and files; use letters, digits and "
                "underscores."
            )
        import_function(source, f"--metrics {text}: the function")
    return MetricSpec(name, source, vocab_size, seq_length)


def real_tokens(samples: Values) -> tuple[np.ndarray, np.ndarray]:
    """(ids [b, n], with 0 for padding; bool [b, n], False for padding)."""
    if "tokens" in samples:
        real = samples["tokens"] >= 0
        return np.where(real, samples["tokens"], 0), real
    real = samples["padding_mask"].astype(bool)
    return np.where(real, samples["text"], 0), real


def frequency_path(save: Path) -> Path:
    """Return the list file of total_vocab_freq."""
    return save / FREQUENCY / f"{FREQUENCY}_metric_value"


def _seqlen(spec: MetricSpec, weights: None, samples: Values) -> np.ndarray:
    return real_tokens(samples)[1].sum(1)


def _total_vocab_freq(spec: MetricSpec, weights: None, samples: Values) -> np.ndarray:
    ids, real = real_tokens(samples)
    if ids.size and ids.max() >= spec.vocab_size:
        raise DataError(
            f"token id {ids.max()} is outside the vocabulary of {spec.vocab_size}"
        )
    return np.bincount(ids[real], minlength=spec.vocab_size)


def _vocab_rarity(spec: MetricSpec, weights: np.ndarray, samples: Values) -> np.ndarray:
    ids, real = real_tokens(samples)
    return np.where(real, weights[ids], 0.0).sum(1).astype(np.int64)


def _seqlen_vocab_rarity(
    spec: MetricSpec, weights: np.ndarray, samples: Values
) -> np.ndarray:
    most = spec.seq_length * float(weights.max())
    # One token more outweighs any rarity.
    factor = 10 ** (math.ceil(math.log(most, 10)) + 1) if most > 0 else 10
    return _seqlen(spec, None, samples) * factor + _vocab_rarity(spec, weights, samples)


def rarities(save: Path) -> np.ndarray:
    """−log of each token's share, float64 [vocabulary]; a token that never occurs is counted once."""
    counts = ListFile(frequency_path(save)).flat.astype(np.float64)
    counts[counts == 0] = 1
    return -np.log(counts / counts.sum())


def _digest(path: Path) -> str | None:
    """MD5 of the table of frequencies; None if there is none yet."""
    try:
        return hashlib.md5(
            ListFile(path).flat.tobytes(), usedforsecurity=False
        ).hexdigest()
    except DataError:
        return None


# name → function of the spec, the rarities if it needs them, and samples
METRICS: Mapping[str, Callable[..., np.ndarray]] = {
    "seqlen": _seqlen,
    "vocab_rarity": _vocab_rarity,
    "seqlen_vocab_rarity": _seqlen_vocab_rarity,
}
TOTALS = {FREQUENCY: _total_vocab_freq}
KNOWN: Mapping[str, Callable[..., np.ndarray]] = {**METRICS, **TOTALS}
