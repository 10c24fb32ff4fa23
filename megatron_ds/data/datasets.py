"""From the data flags to the datasets of a run: mock data, one corpus, a blend, or a path for each part.

No communication: every process opens the same files; index maps are built by the first of a node that comes
(`cache.py`), so an error is the same error on every rank.
"""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from ..config.data import DEFAULT_SPLIT
from ..errors import DataError
from .blend import (
    Blend,
    BlendedDataset,
    build_blend_index,
    build_exhaustive_index,
    parse_blend,
    samples_to_provide,
)
from .cache import cached_arrays
from .gpt_data import GPT_DATA
from .gpt_dataset import corpus_fingerprint, default_cache
from .indexed import IndexedDataset
from .kind import DataKind
from .split import PARTS, cut, parse_split

logger = logging.getLogger(__name__)
LOOKED_AT = 8               # samples of each part whose ids are compared with the vocabulary at once


class Dataset(Protocol):
    """`dataset[i]` is a dictionary of arrays, `{"tokens": int64 [s + 1]}` for a GPT; a pure function of i."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> dict[str, np.ndarray]: ...


class Datasets(NamedTuple):
    """None where nothing was asked for, or where the split gives the part no share."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


def build_datasets(config, samples: Sequence[int], tokenizer, kind: DataKind = GPT_DATA) -> Datasets:
    """The datasets of a run, each of at least the wanted number of samples.

    config: a RunConfig.  samples: (training, validation, test) wanted.  kind: of what the model reads.
    Raises DataError for missing or damaged files and for a part without documents, ConfigError for impossible flags.
    """
    data = config.data
    if data.mock_data:
        return Datasets(*(kind.mock(n, config, tokenizer, config.train.seed + 1000 * i) if n else None
                          for i, n in enumerate(samples)))
    builder = _Builder(config, tokenizer, kind)
    if data.has_split_paths:
        paths = [(f"--{part}-data-path", getattr(data, f"{part}_data_path")) for part in PARTS]
        shares = [tuple(float(other == part) for other in PARTS) for part in PARTS]
    else:
        paths = [("--data-path", data.data_path)] * len(PARTS)
        shares = [parse_split(data.splits)] * len(PARTS)
    return Datasets(*(
        builder.part(part, n, flag, parse_blend(words, flag) if words else None, share)
        for part, n, (flag, words), share in zip(PARTS, samples, paths, shares)))


def identify(words: Sequence[str]) -> list[str]:
    """The words of a data path, with each corpus by its name and a hash of its lengths: the same wherever it lies."""
    blend = parse_blend(words, "the data path") if words else Blend((), None)
    names = [f"{Path(prefix).name} ({corpus_fingerprint(IndexedDataset(prefix))[:8]})" for prefix in blend.prefixes]
    return names if blend.weights is None else [word for pair in zip(map(str, blend.weights), names) for word in pair]


class _Builder:
    """Opens each corpus once, and builds the parts from them. split: words for messages."""

    def __init__(self, config, tokenizer, kind: DataKind):
        data = config.data
        self.config, self.tokenizer, self.kind = config, tokenizer, kind
        self.cache, self.repeats = data.data_cache_path, data.dataloader_type == "cyclic"
        self.split = f"--split {data.splits}{' (default)' * (data.splits == DEFAULT_SPLIT)}"
        self._corpora: dict[str, IndexedDataset] = {}

    def part(self, part: str, wanted: int, flag: str, blend: Blend | None, shares: Sequence[float]) -> Dataset | None:
        if not wanted:
            return None
        if blend is None or not shares[PARTS.index(part)]:
            if part == "train":
                raise DataError("there are no training data: name a corpus with --data-path and give the first part of "
                                "--split a share, or name one with --train-data-path.")
            logger.info("no %s data: nothing is named for it, or --split gives it no share", part)
            return None
        opened = [partial(self._open, flag, prefix, part, shares) for prefix in blend.prefixes]
        if len(opened) == 1:
            return opened[0](wanted)
        if blend.weights is None:
            return self._unweighted(part, wanted, [one(None) for one in opened], blend.prefixes[0])
        return self._weighted(part, wanted, opened, blend)

    def _weighted(self, part: str, wanted: int, opened: Sequence[partial], blend: Blend) -> BlendedDataset:
        shares = blend.shares
        which, sample = self._index(part, blend.prefixes[0], {"shares": shares, "size": wanted},
                                    partial(build_blend_index, shares, wanted))
        datasets = [one(samples_to_provide(wanted, share)) for one, share in zip(opened, shares)]
        return BlendedDataset(datasets, which, sample)

    def _unweighted(self, part: str, wanted: int, datasets: Sequence[Dataset], first_prefix: str) -> BlendedDataset:
        """Every sample at most once; in proportion to the sizes."""
        sizes = [len(d) for d in datasets]
        total = sum(sizes)
        if wanted > total and not self.repeats:
            raise DataError(f"the {part} part of the {len(sizes)} corpora has {total} samples, and {wanted} are wanted. "
                            "Corpora without weights are read once: put a weight before each of them to repeat them, ask "
                            "for fewer samples, or use --dataloader-type cyclic.")
        if wanted < total:
            build = partial(build_blend_index, (np.array(sizes) / total).tolist(), wanted)
        else:
            build = partial(build_exhaustive_index, sizes)
        return BlendedDataset(datasets, *self._index(part, first_prefix, {"sizes": sizes, "size": min(wanted, total)}, build))

    def _index(self, part: str, first_prefix: str, key: dict, build) -> tuple[np.ndarray, np.ndarray]:
        names = ("dataset_index", "dataset_sample_index")
        directory = Path(self.cache) if self.cache else default_cache(first_prefix)
        arrays = cached_arrays(directory, f"BlendedDataset-{part}", {"class": "BlendedDataset", **key}, names,
                               lambda: dict(zip(names, build())))
        return arrays[names[0]], arrays[names[1]]

    def _open(self, flag: str, prefix: str, part: str, shares: Sequence[float], num_samples: int | None) -> Dataset:
        try:
            corpus = self._corpora.get(prefix) or self._corpora.setdefault(prefix, IndexedDataset(prefix))
            dataset = self.kind.open(corpus, self._documents(corpus, part, shares), title=f"{self.kind.title}-{part}",
                                     num_samples=num_samples, config=self.config, tokenizer=self.tokenizer)
            self._check_vocabulary(dataset)
        except DataError as error:
            raise DataError(f"{flag} {prefix}: {error}") from None
        return dataset

    def _documents(self, corpus: IndexedDataset, part: str, shares: Sequence[float]) -> range:
        bounds = self.kind.documents(corpus)
        ranges = cut(len(bounds) - 1, shares)
        documents = ranges[PARTS.index(part)]
        if not corpus.num_tokens:
            raise DataError("the corpus is empty. Make it again from some text with tools/preprocess_data.py.")
        if not corpus.lengths[bounds[documents.start]:bounds[documents.stop]].any():
            parts = ", ".join(f"{name} {len(r)}" for name, r in zip(PARTS, ranges))
            raise DataError(f"the {part} part is empty: {self.split} divides the {len(bounds) - 1} documents into {parts}. "
                            "Choose a --split that gives each part some text (90,10,0 has no test part), take a larger "
                            "corpus, or do without evaluation by --eval-iters 0.")
        return documents

    def _check_vocabulary(self, dataset: Dataset) -> None:
        """A corpus of another tokenizer betrays itself in a few samples: better now than at some step, on some rank."""
        highest = max((int(dataset[i][self.kind.tokens].max()) for i in range(min(len(dataset), LOOKED_AT))), default=-1)
        kind, size = type(self.tokenizer).__name__, self.tokenizer.vocab_size
        if highest >= size:
            raise DataError(f"it holds token id {highest}, but {kind} as given has a vocabulary of {size}: the corpus was "
                            "made with another tokenizer. Give the tokenizer flags that tools/preprocess_data.py had, or "
                            "preprocess the text again.")
