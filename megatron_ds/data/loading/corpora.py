"""The parts of the data of a run from its corpora."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...config import RunConfig, Source
from ...errors import DataError
from ..kind import DataKind, Dataset
from ..text.indexed import IndexedDataset
from ..tokenizers import Tokenizer
from .blend import (
    Blend,
    BlendedDataset,
    CorpusSlice,
    Draw,
    build_blend_index,
    build_exhaustive_index,
    count_draws,
    cut,
    draws_text,
    parse_blend,
    samples_to_provide,
)
from .cache import cached_arrays, default_cache
from .continued import ContinuedDataset, pieces_of
from .sources import PARTS, DataPath, parse_split, read_sources

logger = logging.getLogger(__name__)
SETS = {"train": "training", "valid": "validation", "test": "test"}
# Samples of each part whose ids are compared with the vocabulary at the start.
CHECKED_SAMPLES = 8
# Between the seeds of two pieces of a continued run: a prime, so that usual seeds do not meet.
PIECE_SEEDS = 7919


def open_parts(
    config: RunConfig,
    samples: Sequence[int],
    tokenizer: Tokenizer,
    kind: DataKind,
    one_epoch: bool,
    planned: Sequence[int],
) -> list[Dataset | None]:
    """Return the training, validation and test data of a run, as `build_datasets` describes them."""
    data = config.data
    builder = CorpusBuilder(config, tokenizer, kind, one_epoch)
    # Either --split divides one blend, or each part has its own.
    sources = read_sources(data)
    named: Sequence[DataPath]
    if sources.whole:
        named = [sources.whole] * len(PARTS)
        shares = [parse_split(data.splits)] * len(PARTS)
    else:
        named = sources.parts
        shares = [tuple(float(other == part) for other in PARTS) for part in PARTS]
    found = []
    for name, n, (flag, words), share in zip(PARTS, samples, named, shares):
        blend = parse_blend(words, flag) if words else None
        part = Part(name, flag, share)
        if name == "train" and planned and n and blend is not None:
            found.append(builder.continued(part, planned, blend))
        else:
            found.append(builder.dataset(part, n, blend))
    return found


def fitted_split(config: RunConfig, kind: DataKind) -> RunConfig:
    """Return the config with the split of `fit_default_split`, for a run that wants validation data."""
    data = config.data
    whole = read_sources(data).whole
    assert whole is not None, "the data are divided by --split"
    flag, words = whole
    slices = parse_blend(words, flag).slices
    # The last document of the largest corpus is enough for validation.
    builder = CorpusBuilder(config, None, kind, one_epoch=False)
    most = max(len(builder.documents(flag, piece)) for piece in slices)
    split = f"{most - 1},1,0"

    def has_text(name: str, split: str) -> bool:
        return builder.has_text(Part(name, flag, parse_split(split)), slices)

    # The new split must help, and leave text in both parts.
    if (
        has_text("valid", data.splits)
        or most < 2
        or not (has_text("train", split) and has_text("valid", split))
    ):
        return config
    logger.info(
        "the default --split %s leaves no text for validation: --split %s is used, which keeps 1 of "
        "%d documents for it and has no test set. Give --split to choose "
        "otherwise",
        data.splits,
        split,
        most,
    )
    return config.with_values(
        {"data.split": split}, Source("derived", f"for {most} documents")
    )


def names_of(values: Sequence[str]) -> list[str]:
    """Return the values of a data path as `identify` does."""
    blend = parse_blend(values, "the data path")
    names = [
        f"{Path(piece.prefix).name} ({IndexedDataset(piece.prefix).fingerprint()[:8]}){piece.range_text}"
        for piece in blend.slices
    ]
    pairs = zip(map(str, blend.weights or ()), names)
    return (
        names if blend.weights is None else [value for pair in pairs for value in pair]
    )


class Part(NamedTuple):
    """A part of the data.  flag: of its data path, for messages.  shares: the documents of each of PARTS."""

    name: str
    flag: str
    shares: Sequence[float]


class CorpusBuilder:
    """Opens each corpus once, and builds the parts.

    one_epoch: training reads each sample once.  is_divided: the parts are ranges of the same corpora.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Tokenizer | None,
        kind: DataKind,
        one_epoch: bool,
    ):
        data = config.data
        self.config = config
        self.tokenizer = tokenizer
        self.kind = kind
        self.one_epoch = one_epoch
        self.is_divided = data.is_divided_by_split
        self.split = (
            f"--split {data.splits}{' (default)' if data.split is None else ''}"
        )
        self.is_default = self.is_divided and data.split is None
        self._corpora: dict[str, IndexedDataset] = {}

    def dataset(self, part: Part, wanted: int, blend: Blend | None) -> Dataset | None:
        """Return the dataset of a part, or None."""
        if not wanted:
            return None
        is_training = part.name == "train"
        if blend is None or not part.shares[PARTS.index(part.name)]:
            if is_training:
                raise DataError(
                    "there are no training data: name a corpus with --data-path and give a "
                    "--split whose first number is above 0, or name one with --train-data-path."
                )
            logger.info(
                "no %s set: no data are given for it, or --split assigns it 0 %%",
                SETS[part.name],
            )
            return None
        if (
            self.is_default
            and not is_training
            and not self.has_text(part, blend.slices)
        ):
            logger.info(
                "no %s set: %s leaves it no text, as the corpus is small. Give --split, such as "
                "80,10,10, to have one",
                SETS[part.name],
                self.split,
            )
            return None
        blend = self._with_text(part, blend)
        opened = [partial(self._open, part, piece) for piece in blend.slices]
        epoch = self.one_epoch and is_training
        # In Megatron one corpus with a weight is a blend, except where each part has a path of its own.
        if len(opened) == 1 and (blend.weights is None or epoch or not self.is_divided):
            dataset = opened[0](None if epoch else wanted)
        elif blend.weights is None:
            dataset = self._unweighted(
                part,
                None if epoch else wanted,
                [one(None) for one in opened],
                blend.prefixes[0],
            )
        elif epoch:
            raise DataError(
                f"{part.flag}: the order of the samples is of one epoch, and a blend with weights has no epoch. "
                "Name the corpora without weights."
            )
        else:
            dataset = self._weighted(part, wanted, opened, blend)
        if self.kind.fills and not epoch and logger.isEnabledFor(logging.INFO):
            draws = self._draws(part, wanted, dataset, blend)
            logger.info(
                "%s", draws_text(part.name, draws, self.config.model.seq_length)
            )
        return dataset

    def continued(
        self, part: Part, planned: Sequence[int], blend: Blend
    ) -> Dataset | None:
        """Return the training samples in the order in which the starts of the run planned them."""
        wanted = planned[-1]
        if len(planned) > 1 and self.config.data.dataloader_type == "cyclic":
            return self._cyclic(part, planned, blend)
        pieces = pieces_of(planned, partial(self._begin_alike, part, blend))
        if len(pieces) == 1:
            return self.dataset(part, wanted, blend)
        logger.info(
            "the run needs %d training samples, and its checkpoint was of a run of %d: these keep their order, and "
            "the other %d have one of their own. A run of %d from its beginning has another order",
            wanted,
            planned[-2],
            wanted - planned[-2],
            wanted,
        )
        datasets = []
        for number, size in enumerate(pieces):
            seed = (self.config.train.seed + number * PIECE_SEEDS) % 2**32
            source = Source("derived", f"piece {number} of the training samples")
            config = self.config.with_values({"train.seed": seed}, source)
            builder = CorpusBuilder(config, self.tokenizer, self.kind, self.one_epoch)
            datasets.append(builder._training(part, size, blend))
        return ContinuedDataset(datasets, pieces)

    def _training(self, part: Part, wanted: int, blend: Blend) -> Dataset:
        dataset = self.dataset(part, wanted, blend)
        assert dataset is not None, "a run without training data is an error"
        return dataset

    def _cyclic(self, part: Part, planned: Sequence[int], blend: Blend) -> Dataset:
        """Return the samples of a cyclic order, which changes with the number of all samples; a change is logged."""
        dataset = self._training(part, planned[-1], blend)
        before = len(self._training(part, planned[-2], blend))
        if len(dataset) != before:
            logger.warning(
                "the order of the training samples changes here: --dataloader-type cyclic shuffles %d samples, and "
                "%d in the run of the checkpoint, so that some come again before others come at all. Keep the "
                "length of that run to keep the order",
                len(dataset),
                before,
            )
        return dataset

    def _begin_alike(self, part: Part, blend: Blend, one: int, other: int) -> bool:
        """Return whether datasets of `one` and of `other` samples begin with the same samples."""
        is_whole = blend.weights is None and len(blend.slices) > 1
        if self.one_epoch or is_whole:
            return True
        # The number of samples of each corpus.
        counts = [(one, other)]
        if blend.weights is not None and (len(blend.slices) > 1 or self.is_divided):
            counts = [
                (samples_to_provide(one, share), samples_to_provide(other, share))
                for share in self._weighed(part, blend).shares
            ]
        return all(
            self.kind.same_order(
                self.corpus(part.flag, piece.prefix),
                self._documents(part, piece),
                self.config,
                *both,
            )
            for piece, both in zip(blend.slices, counts)
        )

    def corpus(self, flag: str, prefix: str) -> IndexedDataset:
        """Return a corpus, opened when it is first asked for."""
        try:
            return self._corpora.get(prefix) or self._corpora.setdefault(
                prefix, IndexedDataset(prefix)
            )
        except DataError as error:
            raise DataError(f"{flag} {prefix}: {error}") from None

    def documents(self, flag: str, piece: CorpusSlice) -> range:
        """Return the documents of a slice."""
        return piece.documents(
            len(self.kind.documents(self.corpus(flag, piece.prefix))) - 1
        )

    def has_text(self, part: Part, slices: Sequence[CorpusSlice]) -> bool:
        """Return whether the part has a token in any of the slices."""
        return any(self._lengths(part, piece).any() for piece in slices)

    def _with_text(self, part: Part, blend: Blend) -> Blend:
        """Return the blend of the corpora that have text in this part, with their weights in proportion.

        Missing training data, and a part without any text, raise an error later, when they are opened.
        """
        if blend.left_out:
            logger.info(
                "%s: %s of weight 0 is left out", part.flag, ", ".join(blend.left_out)
            )
        count = len(blend.slices)
        if count > 1 and part.name != "train":
            empty = [
                piece for piece in blend.slices if not self.has_text(part, [piece])
            ]
            if 0 < len(empty) < count:
                names = ", ".join(piece.prefix + piece.range_text for piece in empty)
                logger.info(
                    "the %s part has no text of %s: it uses the other %d of %d corpora, with their "
                    "weights in proportion",
                    part.name,
                    names,
                    count - len(empty),
                    count,
                )
                blend = blend.without(empty)
        return self._weighed(part, blend)

    def _weighed(self, part: Part, blend: Blend) -> Blend:
        """Return the blend with weights in samples."""
        if self.config.data.blend_weights != "epochs" or blend.weights is None:
            return blend
        tokens = [self._num_tokens(part, piece) for piece in blend.slices]
        return blend.times(tokens) if any(tokens) else blend

    def _draws(
        self, part: Part, wanted: int, dataset: Dataset, blend: Blend
    ) -> list[Draw]:
        counts = [wanted]
        if isinstance(dataset, BlendedDataset):
            counts = count_draws(dataset.dataset_index, len(blend.prefixes)).tolist()
        asked = [None] * len(counts) if blend.weights is None else blend.shares
        return [
            Draw(piece.name, share, count, self._num_tokens(part, piece))
            for piece, share, count in zip(blend.slices, asked, counts)
        ]

    def _num_tokens(self, part: Part, piece: CorpusSlice) -> int:
        return int(self._lengths(part, piece).sum(dtype=np.int64))

    def _lengths(self, part: Part, piece: CorpusSlice) -> np.ndarray:
        """Return the tokens of each sequence of the part."""
        corpus = self.corpus(part.flag, piece.prefix)
        bounds = self.kind.documents(corpus)
        documents = self._documents(part, piece)
        return corpus.lengths[bounds[documents.start] : bounds[documents.stop]]

    def _documents(self, part: Part, piece: CorpusSlice) -> range:
        """Return the documents of a slice that --split assigns to the part."""
        chosen = self.documents(part.flag, piece)
        cut_here = cut(len(chosen), part.shares)[PARTS.index(part.name)]
        return chosen[cut_here.start : cut_here.stop]

    def _weighted(
        self, part: Part, wanted: int, opened: Sequence[partial], blend: Blend
    ) -> BlendedDataset:
        shares = blend.order_shares
        index = self._index(
            part,
            blend.prefixes[0],
            {"shares": shares, "size": wanted},
            partial(build_blend_index, shares, wanted),
        )
        datasets = [
            one(samples_to_provide(wanted, share))
            for one, share in zip(opened, blend.shares)
        ]
        return BlendedDataset(datasets, *index)

    def _unweighted(
        self,
        part: Part,
        wanted: int | None,
        datasets: Sequence[Dataset],
        first_prefix: str,
    ) -> BlendedDataset:
        """Blend the corpora in proportion to their sizes, each sample at most once."""
        sizes = [len(d) for d in datasets]
        total = sum(sizes)
        wanted = total if wanted is None else wanted
        if wanted > total and self.config.data.dataloader_type != "cyclic":
            raise DataError(
                f"the {part.name} part of the {len(sizes)} corpora has {total} samples, and "
                f"the run needs {wanted}. Corpora without weights are read once: put a weight "
                "before each to repeat them, ask for fewer samples, or use --dataloader-type "
                "cyclic."
            )
        if wanted < total:
            build = partial(
                build_blend_index, (np.array(sizes) / total).tolist(), wanted
            )
        else:
            build = partial(build_exhaustive_index, sizes)
        key = {"sizes": sizes, "size": min(wanted, total)}
        return BlendedDataset(datasets, *self._index(part, first_prefix, key, build))

    def _index(
        self, part: Part, first_prefix: str, key: dict, build: partial
    ) -> list[np.ndarray]:
        names = ("dataset_index", "dataset_sample_index")
        directory = Path(
            self.config.data.data_cache_path or default_cache(first_prefix)
        )
        arrays = cached_arrays(
            directory,
            f"BlendedDataset-{part.name}",
            {"class": "BlendedDataset", **key},
            names,
            lambda: dict(zip(names, build())),
        )
        return [arrays[name] for name in names]

    def _open(self, part: Part, piece: CorpusSlice, num_samples: int | None) -> Dataset:
        corpus = self.corpus(part.flag, piece.prefix)
        try:
            self._check_text(corpus, part, piece)
            dataset = self.kind.open(
                corpus,
                self._documents(part, piece),
                title=f"{self.kind.title}-{part.name}",
                num_samples=num_samples,
                config=self.config,
                tokenizer=self.tokenizer,
            )
            self._check_vocabulary(dataset)
        except DataError as error:
            raise DataError(f"{part.flag} {piece.prefix}: {error}") from None
        return dataset

    def _check_text(
        self, corpus: IndexedDataset, part: Part, piece: CorpusSlice
    ) -> None:
        """Raises DataError if the part has no text."""
        if not corpus.num_tokens:
            raise DataError(
                "the corpus is empty. Make it again from some text with "
                "megatron-ds preprocess."
            )
        if self.has_text(part, [piece]):
            return
        count = len(self.documents(part.flag, piece))
        if piece.range_text and not self.is_divided:
            raise DataError(
                f"the range{piece.range_text} is {count} of its "
                f"{len(self.kind.documents(corpus)) - 1} documents, which have no text. Choose a "
                "wider range."
            )
        parts = ", ".join(
            f"{name} {len(r)}" for name, r in zip(PARTS, cut(count, part.shares))
        )
        raise DataError(
            f"the {part.name} part is empty: {self.split} divides the {count} documents into "
            f"{parts}. Choose a --split that leaves each part some text (90,10,0 has no test "
            "part), use a larger corpus, or turn evaluation off with --eval-iters 0."
        )

    def _check_vocabulary(self, dataset: Dataset) -> None:
        """Check the first samples, so that a wrong tokenizer is an error before training starts."""
        assert self.tokenizer is not None, (
            "it is only missing where documents are counted"
        )
        highest = max(
            (
                int(dataset[i][self.kind.tokens].max())
                for i in range(min(len(dataset), CHECKED_SAMPLES))
            ),
            default=-1,
        )
        kind = type(self.tokenizer).__name__
        size = self.tokenizer.vocab_size
        if highest >= size:
            raise DataError(
                f"it holds token id {highest}, but {kind} as given has a vocabulary of {size}: "
                "the corpus was made with another tokenizer. Give the tokenizer flags that "
                "megatron-ds preprocess had, or preprocess the text again."
            )
