"""`GPTDataset`: a corpus cut into samples of s + 1 tokens, in Megatron's order; and mock samples.

`dataset[i]` is `{"tokens": int64 [s + 1]}`, a pure function of (corpus, documents, seq_length, num_samples,
seed, i).
"""

from pathlib import Path

import numpy as np

from ..loading.cache import cached_arrays, default_cache
from ..text.indexed import IndexedDataset
from .index_maps import INT32, IndexMaps, build_index_maps

MAPS = ("document_index", "sample_index", "shuffle_index")


class GPTDataset:
    """Samples of a corpus in the order of its index maps."""

    def __init__(self, corpus: IndexedDataset, maps: IndexMaps, seq_length: int):
        self.corpus, self.maps, self.seq_length = corpus, maps, seq_length

    def __len__(self) -> int:
        return len(self.maps.shuffle_index)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        cut = int(self.maps.shuffle_index[i])
        (first, start), (last, end) = self.maps.sample_index[cut:cut + 2].tolist()
        documents = self.maps.document_index[first:last + 1].tolist()
        tokens = np.empty(self.seq_length + 1, np.int64)
        if first == last:
            tokens[:] = self.corpus.get(documents[0], start, end + 1 - start)
            return {"tokens": tokens}
        parts = [self.corpus.get(documents[0], start), *map(self.corpus.get, documents[1:-1]),
                 self.corpus.get(documents[-1], 0, end + 1)]
        np.concatenate(parts, out=tokens)
        return {"tokens": tokens}


def open_gpt_dataset(corpus: IndexedDataset, documents: range, *, title: str, seq_length: int,
                     num_samples: int | None, seed: int, cache: str | Path | None = None) -> GPTDataset:
    """The dataset of a range of documents. Its index maps are read from the cache, or built and stored there.

    title: names the part in the cache ("GPTDataset-train").  cache: None for `cache/GPTDataset_indices` next
    to the corpus.
    """
    directory = Path(cache) if cache else default_cache(corpus.prefix)
    key = {
        "class": "GPTDataset", "dataset_path": str(corpus.bin_path.resolve())[:-4],
        "corpus": corpus.fingerprint(), "documents": [documents.start, documents.stop],
        "num_samples": num_samples,
        "sequence_length": seq_length, "random_seed": seed,
    }

    def build() -> dict[str, np.ndarray]:
        corpus.check()                                   # only the process that builds reads every row anyway
        numbers = np.arange(documents.start, documents.stop,
                            dtype=np.int32 if documents.stop <= INT32 else np.int64)
        return vars(build_index_maps(corpus.lengths, numbers, seq_length, num_samples, seed))

    return GPTDataset(corpus, IndexMaps(**cached_arrays(directory, title, key, MAPS, build)), seq_length)


class MockDataset:
    """Samples to try a layout or measure speed without a corpus. Predictable, so that the loss falls.

    Sample i counts upwards in steps of 1 to 4 from a random id, and restarts after an end of document. A pure
    function of (seed, i). Ids are in [0, vocab_size).
    """

    def __init__(self, num_samples: int, *, seq_length: int, vocab_size: int, eod: int, seed: int):
        self.num_samples, self.seq_length, self.vocab_size = num_samples, seq_length, vocab_size
        self.eod, self.seed = eod, seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng((self.seed, i))
        end = int(random.integers(1, self.seq_length + 1))
        starts, steps = random.integers(0, self.vocab_size, 2), random.integers(1, 5, 2)
        places = np.arange(self.seq_length + 1, dtype=np.int64)
        tokens = np.where(places < end, starts[0] + steps[0] * places, starts[1] + steps[1] * (places - end))
        tokens %= self.vocab_size
        tokens[end] = self.eod
        return {"tokens": tokens}
