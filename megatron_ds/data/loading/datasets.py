"""From the data flags to the datasets of a run: mock data, one corpus, a blend, or a path for each part.

Without communication: every process opens the same files, and the first process builds the index maps
(`cache.py`), so all ranks raise the same error.
"""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...config import RunConfig, Source
from ...errors import DataError
from ..kind import DataKind, Dataset
from ..samples.gpt_data import GPT_DATA
from ..text.indexed import IndexedDataset
from ..tokenizers import Tokenizer
from .blend import (
    PARTS,
    Blend,
    BlendedDataset,
    Draw,
    build_blend_index,
    build_exhaustive_index,
    count_draws,
    cut,
    draws_text,
    parse_blend,
    parse_split,
    read_sources,
    samples_to_provide,
)
from .cache import cached_arrays, default_cache

logger = logging.getLogger(__name__)
SETS = {"train": "training", "valid": "validation", "test": "test"}
CHECKED_SAMPLES = 8         # of each part, whose ids are compared with the vocabulary at the start


class Datasets(NamedTuple):
    """A part is None if the run needs no samples of it, or if the split assigns it no documents."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


def build_datasets(config: RunConfig, samples: Sequence[int], tokenizer: Tokenizer,
                   kind: DataKind = GPT_DATA, *, one_epoch: bool = False) -> Datasets:
    """The datasets of a run, each of at least the wanted number of samples.

    samples: (training, validation, test) wanted.
    one_epoch: the training data are one epoch for any number of samples, for a curriculum, which numbers
    them. Raises DataError for missing or damaged files and for a part without text, except that the default
    split may leave validation or test without text; ConfigError for impossible flags.
    """
    data = config.data
    if data.mock_data:
        return Datasets(*(kind.mock(n, config, tokenizer, config.train.seed + 1000 * i) if n else None
                          for i, n in enumerate(samples)))
    builder, sources = _Builder(config, tokenizer, kind, one_epoch), read_sources(data)
    if sources.whole:
        named, shares = [sources.whole] * len(PARTS), [parse_split(data.splits)] * len(PARTS)
    else:
        named, shares = sources.parts, [tuple(float(other == part) for other in PARTS) for part in PARTS]
    return Datasets(*(
        builder.part(part, n, flag, parse_blend(words, flag) if words else None, share)
        for part, n, (flag, words), share in zip(PARTS, samples, named, shares)))


def fit_default_split(config: RunConfig, samples: Sequence[int], kind: DataKind = GPT_DATA) -> RunConfig:
    """The config with a split for a small corpus, if the default split leaves wanted validation without text.

    Then the last document of the largest corpus is for validation and the others for training. A --split that
    the user gave is kept, and so is the default of a curriculum, whose index numbers samples under it. The
    split in the config is part of the identity of a checkpoint. Reads the corpora.  samples: (training,
    validation, test) wanted.
    """
    data = config.data
    is_fixed = data.split is not None or bool(config.curriculum.curriculum_metrics)
    if is_fixed or not samples[1] or not data.is_divided_by_split:
        return config
    flag, words = read_sources(data).whole
    prefixes, builder = parse_blend(words, flag).prefixes, _Builder(config, None, kind, one_epoch=False)
    most = max(builder.num_documents(flag, prefix) for prefix in prefixes)
    split = f"{most - 1},1,0"
    if builder.has_text("valid", flag, prefixes, parse_split(data.splits)) or most < 2 or not all(
            builder.has_text(part, flag, prefixes, parse_split(split)) for part in ("train", "valid")):
        return config
    logger.info("the default --split %s leaves no text for validation: --split %s is used, which keeps 1 of "
                "%d documents for it and has no test set. Give --split to choose "
                "otherwise", data.splits, split, most)
    return config.with_values({"data.split": split}, Source("derived", f"for {most} documents"))


def identify(values: Sequence[str]) -> list[str]:
    """The values of a data path, each corpus as its name and a hash of its lengths, without its folder."""
    blend = parse_blend(values, "the data path") if values else Blend((), None)
    names = [f"{Path(prefix).name} ({IndexedDataset(prefix).fingerprint()[:8]})" for prefix in blend.prefixes]
    pairs = zip(map(str, blend.weights or ()), names)
    return names if blend.weights is None else [value for pair in pairs for value in pair]


class _Builder:
    """Opens each corpus once, and builds the parts.

    one_epoch: training reads each sample once.  is_divided: the parts are ranges of the same corpora.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer | None, kind: DataKind, one_epoch: bool):
        data = config.data
        self.config, self.tokenizer, self.kind, self.one_epoch = config, tokenizer, kind, one_epoch
        self.cache, self.repeats, self.by_epochs = (
            data.data_cache_path, data.dataloader_type == "cyclic", data.blend_weights == "epochs")
        self.is_divided = data.is_divided_by_split
        self.split = f"--split {data.splits}{' (default)' * (data.split is None)}"
        self.is_default = self.is_divided and data.split is None
        self._corpora: dict[str, IndexedDataset] = {}

    def part(self, part: str, wanted: int, flag: str, blend: Blend | None,
             shares: Sequence[float]) -> Dataset | None:
        """The dataset of one of PARTS, or None.  shares: of all parts."""
        if not wanted:
            return None
        if blend is None or not shares[PARTS.index(part)]:
            if part == "train":
                raise DataError("there are no training data: name a corpus with --data-path and give a "
                                "--split whose first number is above 0, or name one with --train-data-path.")
            logger.info("no %s set: no data are given for it, or --split assigns it 0 %%", SETS[part])
            return None
        if self.is_default and part != "train" and not self.has_text(part, flag, blend.prefixes, shares):
            logger.info("no %s set: %s leaves it no text, as the corpus is small. Give --split, such as "
                        "80,10,10, to have one",
                        SETS[part], self.split)
            return None
        blend = self._with_text(part, flag, blend, shares)
        opened = [partial(self._open, flag, prefix, part, shares) for prefix in blend.prefixes]
        epoch = self.one_epoch and part == "train"
        # In Megatron one corpus with a weight is a blend, except where each part has a path of its own.
        if len(opened) == 1 and (blend.weights is None or epoch or not self.is_divided):
            dataset = opened[0](None if epoch else wanted)
        elif blend.weights is None:
            dataset = self._unweighted(part, None if epoch else wanted, [one(None) for one in opened],
                                       blend.prefixes[0])
        elif epoch:
            raise DataError(f"{flag}: a curriculum numbers the samples of one epoch, and a blend with "
                            "weights has no epoch. Name the corpora without weights.")
        else:
            dataset = self._weighted(part, wanted, opened, blend)
        if self.kind.fills and not epoch and logger.isEnabledFor(logging.INFO):
            draws = self._draws(part, wanted, dataset, blend, shares)
            logger.info("%s", draws_text(part, draws, self.config.model.seq_length))
        return dataset

    def _with_text(self, part: str, flag: str, blend: Blend, shares: Sequence[float]) -> Blend:
        """The blend of those corpora that have text in this part, with their weights in proportion.

        Missing training data, and a part without any text, raise an error later, when they are opened.
        """
        if blend.left_out:
            logger.info("%s: not used, as the weight is 0: %s", flag, ", ".join(blend.left_out))
        if len(blend.prefixes) > 1 and part != "train":
            empty = [p for p in blend.prefixes if not self._lengths(flag, p, part, shares).any()]
            if 0 < len(empty) < len(blend.prefixes):
                logger.info("the %s part has no text of %s: it uses the other %d of %d corpora, with their "
                            "weights in "
                            "proportion", part, ", ".join(empty), len(blend.prefixes) - len(empty),
                            len(blend.prefixes))
                blend = blend.without(empty)
        if self.by_epochs and blend.weights is not None:
            tokens = [self._num_tokens(flag, p, part, shares) for p in blend.prefixes]
            blend = blend.times(tokens) if any(tokens) else blend
        return blend

    def num_documents(self, flag: str, prefix: str) -> int:
        """Documents of a corpus."""
        return len(self.kind.documents(self._corpus(flag, prefix))) - 1

    def has_text(self, part: str, flag: str, prefixes: Sequence[str], shares: Sequence[float]) -> bool:
        """Whether the part has a token in any of the corpora."""
        return any(self._lengths(flag, prefix, part, shares).any() for prefix in prefixes)

    def _draws(self, part: str, wanted: int, dataset: Dataset, blend: Blend,
               shares: Sequence[float]) -> list[Draw]:
        is_blend = isinstance(dataset, BlendedDataset)
        counts = count_draws(dataset.dataset_index, len(blend.prefixes)) if is_blend else [wanted]
        asked = [None] * len(counts) if blend.weights is None else blend.shares
        return [Draw(Path(prefix).name, share, int(count), self._num_tokens("", prefix, part, shares))
                for prefix, share, count in zip(blend.prefixes, asked, counts)]

    def _num_tokens(self, flag: str, prefix: str, part: str, shares: Sequence[float]) -> int:
        return int(self._lengths(flag, prefix, part, shares).sum(dtype=np.int64))

    def _lengths(self, flag: str, prefix: str, part: str, shares: Sequence[float]) -> np.ndarray:
        """Tokens of each sequence of the part."""
        corpus = self._corpus(flag, prefix)
        bounds = self.kind.documents(corpus)
        documents = cut(len(bounds) - 1, shares)[PARTS.index(part)]
        return corpus.lengths[bounds[documents.start]:bounds[documents.stop]]

    def _corpus(self, flag: str, prefix: str) -> IndexedDataset:
        try:
            return self._corpora.get(prefix) or self._corpora.setdefault(prefix, IndexedDataset(prefix))
        except DataError as error:
            raise DataError(f"{flag} {prefix}: {error}") from None

    def _weighted(self, part: str, wanted: int, opened: Sequence[partial], blend: Blend) -> BlendedDataset:
        shares = blend.order_shares
        which, sample = self._index(part, blend.prefixes[0], {"shares": shares, "size": wanted},
                                    partial(build_blend_index, shares, wanted))
        datasets = [one(samples_to_provide(wanted, share)) for one, share in zip(opened, blend.shares)]
        return BlendedDataset(datasets, which, sample)

    def _unweighted(self, part: str, wanted: int | None, datasets: Sequence[Dataset],
                    first_prefix: str) -> BlendedDataset:
        """Each sample at most once, in proportion to the sizes."""
        sizes = [len(d) for d in datasets]
        total = sum(sizes)
        wanted = total if wanted is None else wanted
        if wanted > total and not self.repeats:
            raise DataError(f"the {part} part of the {len(sizes)} corpora has {total} samples, and the run "
                            f"needs {wanted}. Corpora without weights are read once: put a weight before "
                            "each to repeat them, ask for fewer samples, or use --dataloader-type cyclic.")
        if wanted < total:
            build = partial(build_blend_index, (np.array(sizes) / total).tolist(), wanted)
        else:
            build = partial(build_exhaustive_index, sizes)
        return BlendedDataset(datasets, *self._index(part, first_prefix,
                                                     {"sizes": sizes, "size": min(wanted, total)}, build))

    def _index(self, part: str, first_prefix: str, key: dict, build) -> tuple[np.ndarray, np.ndarray]:
        names = ("dataset_index", "dataset_sample_index")
        directory = Path(self.cache) if self.cache else default_cache(first_prefix)
        arrays = cached_arrays(directory, f"BlendedDataset-{part}", {"class": "BlendedDataset", **key}, names,
                               lambda: dict(zip(names, build())))
        return arrays[names[0]], arrays[names[1]]

    def _open(self, flag: str, prefix: str, part: str, shares: Sequence[float],
              num_samples: int | None) -> Dataset:
        corpus = self._corpus(flag, prefix)
        try:
            dataset = self.kind.open(corpus, self._documents(corpus, part, shares),
                                     title=f"{self.kind.title}-{part}",
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
            raise DataError("the corpus is empty. Make it again from some text with "
                            "tools/preprocess_data.py.")
        if not corpus.lengths[bounds[documents.start]:bounds[documents.stop]].any():
            parts = ", ".join(f"{name} {len(r)}" for name, r in zip(PARTS, ranges))
            raise DataError(f"the {part} part is empty: {self.split} divides the {len(bounds) - 1} documents "
                            f"into {parts}. Choose a --split that leaves each part some text (90,10,0 has no "
                            "test part), use a larger corpus, or turn evaluation off with --eval-iters 0.")
        return documents

    def _check_vocabulary(self, dataset: Dataset) -> None:
        """Check the first samples, so that a wrong tokenizer is an error before training starts."""
        highest = max((int(dataset[i][self.kind.tokens].max())
                       for i in range(min(len(dataset), CHECKED_SAMPLES))), default=-1)
        kind, size = type(self.tokenizer).__name__, self.tokenizer.vocab_size
        if highest >= size:
            raise DataError(f"it holds token id {highest}, but {kind} as given has a vocabulary of {size}: "
                            "the corpus was made with another tokenizer. Give the tokenizer flags that "
                            "tools/preprocess_data.py had, or preprocess the text again.")
