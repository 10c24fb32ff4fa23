"""`DataKind`: everything between a corpus and a batch that depends on the kind of model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..batch.batch import Batch

if TYPE_CHECKING:
    from ..config import RunConfig

Sample = Mapping[str, np.ndarray]
# (samples, their indices in the dataset, their positions in the stream, training) → Batch
Collator = Callable[[Sequence[Sample], Sequence[int], tuple[int, ...], bool], Batch]
PAD = -1  # fills up short samples of a dataset; a batch has none


class Dataset(Protocol):
    """`dataset[i]` is a dictionary of arrays, `{"tokens": int64 [s + 1]}` for a GPT; a pure function of i."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True)
class DataKind:
    """Two names, and functions that are pure except for files.

    title      begins the names of its index maps in the cache
    tokens     key of the token ids in a sample
    documents  IndexedDataset → first sequence of each document, and the number of sequences; documents are
               divided between training, validation and test
    mock       (number of samples, config, tokenizer, seed) → a dataset of mock samples
    open       (corpus, range of documents, *, title, num_samples, config, tokenizer) → a dataset; num_samples
               None for each sample once
    collator   (config, tokenizer) → a `Collator`
    blank      (samples, positions, device) → a `Batch` as large as real ones, for plans and timings
    fills      each sample takes s tokens of its corpus, so that epochs can be counted
    same_order (corpus, range of documents, config, n, m) → whether datasets of n and m samples begin with the same
               ones; False where that is not known
    has_masks  config → whether samples are read from the masks of corpora, too
    identity   config → what its samples depend on, besides corpus, sequence length and seed; plain values
    """

    title: str
    tokens: str
    documents: Callable
    mock: Callable[..., Dataset]
    open: Callable[..., Dataset]
    collator: Callable[..., Collator]
    blank: Callable[..., Batch]
    fills: bool = False
    same_order: Callable[..., bool] = lambda *ignored: False
    has_masks: Callable[["RunConfig"], bool] = lambda config: False
    identity: Callable[["RunConfig"], dict] = lambda config: {}
