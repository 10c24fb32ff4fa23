"""Documents laid end to end and cut into samples of s + 1 tokens, in Megatron's order."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...errors import DataError
from ..kind import Dataset
from ..loading.cache import cached_arrays, default_cache
from ..loading.index_maps import INT32, IndexMaps, build_index_maps, epochs_of
from ..text.indexed import IndexedDataset
from ..text.mask_file import LossMasks
from ..tokenizers import Tokenizer

if TYPE_CHECKING:
    from ...config import RunConfig


class GPTDataset:
    """Samples of a corpus in the order of its index maps."""

    def __init__(self, corpus: IndexedDataset, maps: IndexMaps, seq_length: int):
        self.corpus = corpus
        self.maps = maps
        self.seq_length = seq_length

    def __len__(self) -> int:
        return len(self.maps.shuffle_index)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        cut = int(self.maps.shuffle_index[i])
        (first, start), (last, end) = self.maps.sample_index[cut : cut + 2].tolist()
        documents = self.maps.document_index[first : last + 1].tolist()
        tokens = np.empty(self.seq_length + 1, np.int64)
        if first == last:
            tokens[:] = self.corpus.get(documents[0], start, end + 1 - start)
        else:
            parts = [
                self.corpus.get(documents[0], start),
                *map(self.corpus.get, documents[1:-1]),
                self.corpus.get(documents[-1], 0, end + 1),
            ]
            np.concatenate(parts, out=tokens)
        self.corpus.refuse_negative(tokens, f"sample {i}")
        return {"tokens": tokens}


def open_gpt_dataset(
    corpus: IndexedDataset,
    documents: range,
    *,
    title: str,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    cache: str | Path | None = None,
) -> GPTDataset:
    """Return the dataset of a range of documents. Its index maps are read from the cache, or built and stored there.

    title: names the part in the cache ("GPTDataset-train").  cache: None for `cache/GPTDataset_indices` next
    to the corpus.
    """
    # The key has everything that decides the maps, so that other maps have other files.
    directory = Path(cache) if cache else default_cache(corpus.prefix)
    key = {
        "class": "GPTDataset",
        **corpus.key(documents),
        "num_samples": num_samples,
        "sequence_length": seq_length,
        "random_seed": seed,
    }

    def build() -> dict[str, np.ndarray]:
        # Building reads each row anyway, and the other processes rely on this check.
        corpus.check()
        numbers = np.arange(
            documents.start,
            documents.stop,
            dtype=np.int32 if documents.stop <= INT32 else np.int64,
        )
        return build_index_maps(
            corpus.lengths, numbers, seq_length, num_samples, seed
        )._asdict()

    # One process builds, and all map the files into memory.
    arrays = cached_arrays(directory, title, key, IndexMaps._fields, build)
    return GPTDataset(corpus, IndexMaps(**arrays), seq_length)


def open_corpus(
    corpus: IndexedDataset,
    documents: range,
    *,
    title: str,
    num_samples: int | None,
    config: "RunConfig",
    tokenizer: Tokenizer,
) -> Dataset:
    """Return the samples of a range of documents, in the form that the options ask for."""
    data = config.data
    if not data.pack_documents and not data.sft:
        return open_gpt_dataset(
            corpus,
            documents,
            title=title,
            seq_length=config.model.seq_length,
            num_samples=num_samples,
            seed=config.train.seed,
            cache=config.data.data_cache_path,
        )
    # Loaded by runs that pack documents.
    from .packing import open_packed_dataset

    if data.sft:
        _refuse_pairs(corpus)
    return open_packed_dataset(
        corpus,
        documents,
        title=title,
        seq_length=config.model.seq_length,
        num_samples=num_samples,
        seed=config.train.seed,
        cache=config.data.data_cache_path,
        masks=LossMasks(corpus) if data.sft else None,
    )


def same_order(
    corpus: IndexedDataset,
    documents: range,
    config: "RunConfig",
    one: int,
    other: int,
) -> bool:
    """Return whether datasets of two numbers of samples begin with the same samples."""
    # Packs have an order for each epoch, whatever the number of epochs.
    if config.data.pack_documents or config.data.sft:
        return True
    chosen = corpus.lengths[documents.start : documents.stop]
    tokens = int(chosen.sum(dtype=np.int64))
    length = config.model.seq_length
    return epochs_of(tokens, length, one) == epochs_of(tokens, length, other)


def _refuse_pairs(corpus: IndexedDataset) -> None:
    """Raises DataError for a corpus whose documents are several conversations."""
    if corpus.num_documents != len(corpus):
        raise DataError(
            f"{corpus.prefix} has documents of several conversations: pairs of answers, of which a run with --sft "
            "would learn the rejected ones, too. Train with --dpo, or make the corpus with --chat."
        )
