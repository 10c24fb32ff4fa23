"""`GPTDataset`: a corpus cut into samples of s + 1 tokens, in Megatron's order.

`dataset[i]` is `{"tokens": int64 [s + 1]}`, a pure function of (corpus, documents, seq_length, num_samples, seed, i).
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..loading.cache import cached_arrays
from ..text.indexed import IndexedDataset
from .index_maps import INT32, IndexMaps, build_index_maps

MAPS = ("document_index", "sample_index", "shuffle_index")
FINGERPRINT_BLOCKS, FINGERPRINT_BLOCK = 256, 1 << 14        # at most 256 blocks of 16384 lengths are looked at


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


def open_gpt_dataset(corpus: IndexedDataset, documents: range, *, title: str, seq_length: int, num_samples: int | None,
                     seed: int, cache: str | Path | None = None) -> GPTDataset:
    """The dataset of a range of documents, its index maps taken from the cache or built into it.

    title: names the part in the cache ("GPTDataset-train").  cache: None for `cache/GPTDataset_indices` beside the corpus.
    """
    directory = Path(cache) if cache else default_cache(corpus.prefix)
    key = {
        "class": "GPTDataset", "dataset_path": str(corpus.bin_path.resolve())[:-4], "corpus": corpus_fingerprint(corpus),
        "documents": [documents.start, documents.stop], "num_samples": num_samples, "sequence_length": seq_length,
        "random_seed": seed,
    }

    def build() -> dict[str, np.ndarray]:
        corpus.check()                                      # by the one process that builds: every row is read anyway
        numbers = np.arange(documents.start, documents.stop, dtype=np.int32 if documents.stop <= INT32 else np.int64)
        maps = build_index_maps(corpus.lengths, numbers, seq_length, num_samples, seed)
        return {name: getattr(maps, name) for name in MAPS}

    return GPTDataset(corpus, IndexMaps(**cached_arrays(directory, title, key, MAPS, build)), seq_length)


def default_cache(prefix: str) -> Path:
    """Where Megatron keeps index maps by default: beside the corpus."""
    return Path(prefix).parent / "cache" / "GPTDataset_indices"


def corpus_fingerprint(corpus: IndexedDataset) -> str:
    """Tells a corpus from another one that was later written under the same name.

    Numbers of sequences and tokens, and the lengths of the sequences: all of them, or blocks all over a long corpus.
    """
    digest = hashlib.md5(f"{len(corpus)} {corpus.num_tokens} {corpus.dtype}".encode(), usedforsecurity=False)
    for start in _block_starts(len(corpus)):
        digest.update(corpus.lengths[start:start + FINGERPRINT_BLOCK].tobytes())
    return digest.hexdigest()


def _block_starts(count: int) -> Sequence[int]:
    if count <= FINGERPRINT_BLOCKS * FINGERPRINT_BLOCK:
        return range(0, count, FINGERPRINT_BLOCK)
    return np.linspace(0, count - FINGERPRINT_BLOCK, FINGERPRINT_BLOCKS).astype(np.int64).tolist()
