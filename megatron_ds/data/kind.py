"""`DataKind`: what a kind of model reads. Everything between a corpus and a batch that is not the same for all models."""

from collections.abc import Callable
from dataclasses import dataclass

from .batch import Batch
from .gpt.collate import Collator


@dataclass(frozen=True)
class DataKind:
    """title and tokens are names; the others functions, pure but for files.

    title      begins the names of its index maps in the cache
    tokens     key of the token ids in a sample
    documents  IndexedDataset -> the bounds of its documents, in sequences: document d is bounds[d] … bounds[d + 1] − 1.
               Documents are what is shared out to training, validation and test
    mock       (number of samples, config, tokenizer, seed) -> a dataset of made-up samples
    open       (corpus, range of documents, *, title, num_samples, config, tokenizer) -> a dataset; num_samples None for
               each sample once
    collator   (config, tokenizer) -> what makes a batch of samples (`collate.py`)
    blank      (samples, positions, device) -> a `Batch` that weighs what real ones do, for plans and timings
    fills      each sample takes s tokens of its corpus, so that epochs can be counted
    identity   config -> what decides its samples, beside corpus, sequence length and seed; plain values
    """

    title: str
    tokens: str
    documents: Callable
    mock: Callable
    open: Callable
    collator: Callable[..., Collator]
    blank: Callable[..., Batch]
    fills: bool = False
    identity: Callable[[object], dict] = lambda config: {}
