"""Fill in the middle: a document's middle moves to its end, so that a model learns to write between texts.

    document                 prefix | middle | suffix               cut at two characters, uniformly drawn
    prefix-suffix-middle     [PRE] prefix [SUF] suffix [MID] middle
    suffix-prefix-middle     [PRE] [SUF] suffix [MID] prefix middle

Bavarian et al. 2022 (arXiv:2207.14255), sections 3 and 4.4; names and orders are Megatron's. Random numbers
are keyed by the index of the sample, so it is the same sample on any rank, in any worker, and after a resume.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...config import DataConfig, RunConfig
from ...data.kind import PAD, Dataset
from ...data.loading.datasets import Datasets
from ...data.tokenizers import Tokenizer
from ...errors import ConfigError

LOST = "\ufffd"  # decoded from half a character


@dataclass(frozen=True)
class FillInMiddle:
    """Rearranges each document of a sample with probability `rate`; the tokens [s + 1] keep their number.

    prefix, middle, suffix  ids of the three sentinel tokens
    spm_rate                share of them that becomes suffix-prefix-middle
    split                   a token that separates the fragments of a document, such as the files of a
                            repository; in a chosen document, each fragment is rearranged separately with
                            probability `fragment_rate`
    no_prefix               documents whose text begins with this are not rearranged

    Sentinel tokens make a sample longer: tokens that do not fit are cut off at its end. A fragment with half
    a character, possible at the ends of a sample, is not rearranged.
    """

    tokenizer: Tokenizer
    prefix: int
    middle: int
    suffix: int
    rate: float = 0.5
    spm_rate: float = 0.5
    split: int | None = None
    fragment_rate: float = 0.5
    no_prefix: str | None = None

    def __call__(self, tokens: np.ndarray, random: np.random.Generator) -> np.ndarray:
        parts = []
        for document, end in _cut(tokens[tokens != PAD], self.tokenizer.eod):
            parts += [*self._document(document, random), end]
        row = np.concatenate(parts)[: len(tokens)]
        return np.concatenate((row, np.full(len(tokens) - len(row), PAD, row.dtype)))

    def _document(
        self, tokens: np.ndarray, random: np.random.Generator
    ) -> Iterator[np.ndarray]:
        if not len(tokens) or random.random() >= self.rate:
            yield tokens
            return
        if self.split is None or self.split not in tokens:
            yield self._rearranged(tokens, random)
            return
        for piece, end in _cut(tokens, self.split):
            chosen = len(piece) and random.random() < self.fragment_rate
            yield from (self._rearranged(piece, random) if chosen else piece, end)

    def _rearranged(
        self, tokens: np.ndarray, random: np.random.Generator
    ) -> np.ndarray:
        text = self.tokenizer.decode(tokens.tolist())
        first, second = np.sort(random.integers(0, len(text) + 1, 2)).tolist()
        is_spm = random.random() < self.spm_rate
        if (
            LOST in text
            or self.no_prefix is not None
            and text.startswith(self.no_prefix)
        ):
            return tokens
        prefix, middle, suffix = map(
            self.tokenizer.encode, (text[:first], text[first:second], text[second:])
        )
        if is_spm:
            ids = [self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle]
        else:
            ids = [self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]
        return np.array(ids, tokens.dtype)


class FIMDataset:
    """A dataset with its samples rearranged; a pure function of (seed, i)."""

    def __init__(self, dataset: Dataset, fim: FillInMiddle, seed: int):
        self.dataset = dataset
        self.fim = fim
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {
            "tokens": self.fim(
                self.dataset[i]["tokens"], np.random.default_rng((self.seed, i))
            )
        }


def make_fim(data: DataConfig, tokenizer: Tokenizer) -> FillInMiddle:
    """Make it from the --fim flags. Raises ConfigError for a sentinel that is not one token."""
    marks = {
        name: _id_of(
            tokenizer, f"--fim-{name}-token", getattr(data, f"fim_{name}_token")
        )
        for name in ("prefix", "middle", "suffix")
    }
    separator = data.fim_split_sample
    split = (
        None
        if separator is None
        else _id_of(tokenizer, "--fim-split-sample", separator)
    )
    return FillInMiddle(
        tokenizer,
        **marks,
        rate=data.fim_rate,
        spm_rate=data.fim_spm_rate,
        split=split,
        no_prefix=data.fim_no_prefix,
        fragment_rate=data.fim_rate
        if data.fim_fragment_rate is None
        else data.fim_fragment_rate,
    )


def _cut(tokens: np.ndarray, at: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return (piece, the token after it, if there is one) for the pieces between the tokens `at`."""
    start = 0
    for end in np.flatnonzero(tokens == at).tolist():
        yield tokens[start:end], tokens[end : end + 1]
        start = end + 1
    yield tokens[start:], tokens[:0]


def _id_of(tokenizer: Tokenizer, flag: str, name: str) -> int:
    """Return the id of a token by its text, or the id itself in decimal."""
    ids = [int(name)] if name.isdecimal() else tokenizer.encode(name)
    if len(ids) != 1 or ids[0] >= tokenizer.vocab_size:
        raise ConfigError(
            f"{flag} {name} must be one token. {type(tokenizer).__name__} encodes it as {len(ids)}, and has "
            f"{tokenizer.vocab_size} tokens. Name a special token of the vocabulary, or give its id."
        )
    return ids[0]


def rearranged(datasets: Datasets, config: RunConfig, tokenizer: Tokenizer) -> Datasets:
    """Return the datasets with rearranged samples, each part with random numbers of its own."""
    fim = make_fim(config.data, tokenizer)
    return Datasets(
        *(
            None
            if dataset is None
            else FIMDataset(dataset, fim, config.train.seed + 1000 * part)
            for part, dataset in enumerate(datasets)
        )
    )
