"""Difficulty metrics: functions from samples, arrays [b, …] by name, to one integer for each sample.

Names and values are those of Megatron-DeepSpeed's `analyze_data.py`. GPT samples are {"tokens": [b, s + 1]},
padded with −1; BERT samples are {"text": [b, s], "padding_mask": [b, s], …}.

    seqlen                number of tokens without padding
    total_vocab_freq      of the whole dataset: the count of each token
    vocab_rarity          the sum of −log p(token), with p from total_vocab_freq: low for common tokens
    seqlen_vocab_rarity   by length, and by rarity among equal lengths
    name=module:function  a user's function

Li et al. 2022 (arXiv:2212.03597), section 3.1.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...difficulty import import_function
from ...errors import ConfigError, DataError
from ...registry import did_you_mean
from .metric_index import ListFile

Values = Mapping[str, np.ndarray]
FREQUENCY = "total_vocab_freq"


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
        if self.source:
            return import_function(self.source, f"metric {self.name}: the function")
        return (TOTALS | METRICS)[self.name](self, save)

    def definition(self, save: Path) -> list:
        """All that the values depend on besides the samples, as JSON values."""
        made_of = [_digest(frequency_path(save))] if self.name in NEED_FREQUENCY else []
        vocab_size = self.vocab_size if self.name in (*TOTALS, *NEED_FREQUENCY) else None
        return [self.name, self.source, vocab_size, *made_of]

    @property
    def is_total(self) -> bool:
        """It is one table of the whole dataset, not a number for each sample."""
        return not self.source and self.name in TOTALS

    @property
    def needs_frequency(self) -> bool:
        return not self.source and self.name in NEED_FREQUENCY


def parse_metric(text: str, vocab_size: int, seq_length: int) -> MetricSpec:
    """`vocab_rarity`, or `name=module:function`. Raises ConfigError."""
    name, equals, source = text.partition("=")
    if equals and name and source and name not in {*METRICS, *TOTALS}:
        if not name.replace("_", "").isalnum():
            raise ConfigError(f"--metrics {text}: {name!r} names a folder and files; use letters, digits and "
                              "underscores.")
        import_function(source, f"--metrics {text}: the function")
        return MetricSpec(name, source, vocab_size, seq_length)
    if equals:
        raise ConfigError(f"--metrics {text}: give a function as name=module:function, with a name that is "
                          f"not one of {', '.join({**METRICS, **TOTALS})}.")
    if name not in METRICS and name not in TOTALS:
        raise ConfigError(f"--metrics {text}{did_you_mean(name, [*METRICS, *TOTALS]) or ': unknown.'} Known: "
                          f"{', '.join({**METRICS, **TOTALS})}; or one of your own, name=module:function.")
    return MetricSpec(name, "", vocab_size, seq_length)


def real_tokens(samples: Values) -> tuple[np.ndarray, np.ndarray]:
    """(ids [b, n], with 0 for padding; bool [b, n], False for padding)."""
    if "tokens" in samples:
        real = samples["tokens"] >= 0
        return np.where(real, samples["tokens"], 0), real
    real = samples["padding_mask"].astype(bool)
    return np.where(real, samples["text"], 0), real


def frequency_path(save: Path) -> Path:
    """The list file of total_vocab_freq."""
    return save / FREQUENCY / f"{FREQUENCY}_metric_value"


def _seqlen(spec: MetricSpec, save: Path):
    return lambda samples: real_tokens(samples)[1].sum(1)


def _total_vocab_freq(spec: MetricSpec, save: Path):
    def count(samples: Values) -> np.ndarray:
        ids, real = real_tokens(samples)
        if ids.size and ids.max() >= spec.vocab_size:
            raise DataError(f"token id {ids.max()} is outside the vocabulary of {spec.vocab_size}")
        return np.bincount(ids[real], minlength=spec.vocab_size)
    return count


def _vocab_rarity(spec: MetricSpec, save: Path):
    weights = rarities(save)
    return lambda samples: _sum_of(weights, samples)


def _seqlen_vocab_rarity(spec: MetricSpec, save: Path):
    weights = rarities(save)
    most = spec.seq_length * float(weights.max())
    # One token more outweighs any rarity.
    factor = 10 ** (math.ceil(math.log(most, 10)) + 1) if most > 0 else 10
    return lambda samples: real_tokens(samples)[1].sum(1) * factor + _sum_of(weights, samples)


def rarities(save: Path) -> np.ndarray:
    """−log of each token's share, float64 [vocabulary]; a token that never occurs is counted once."""
    counts = ListFile(frequency_path(save)).flat.astype(np.float64)
    counts[counts == 0] = 1
    return -np.log(counts / counts.sum())


def _sum_of(weights: np.ndarray, samples: Values) -> np.ndarray:
    ids, real = real_tokens(samples)
    return np.where(real, weights[ids], 0.0).sum(1).astype(np.int64)


def _digest(path: Path) -> str | None:
    """MD5 of the table of frequencies; None if there is none yet."""
    try:
        return hashlib.md5(ListFile(path).flat.tobytes(), usedforsecurity=False).hexdigest()
    except DataError:
        return None


# name → function of the spec and the folder of total_vocab_freq, which gives the metric
METRICS = {"seqlen": _seqlen, "vocab_rarity": _vocab_rarity, "seqlen_vocab_rarity": _seqlen_vocab_rarity}
TOTALS = {FREQUENCY: _total_vocab_freq}
NEED_FREQUENCY = ("vocab_rarity", "seqlen_vocab_rarity")
