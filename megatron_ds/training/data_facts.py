"""What ranks compare after they opened their data: corpora, tokenizer, curriculum indexes.

Each machine may have its own copy of a corpus, at a path of its own. So ranks compare contents, not paths:
the lengths of all sequences (`IndexedDataset.fingerprint`), and evenly spaced blocks of the tokens.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..data.loading.blend import PARTS, parse_blend, read_sources
from ..data.text.indexed import IndexedDataset, corpus_paths

# A file is hashed by evenly spaced blocks.
BLOCKS = 16
BLOCK_BYTES = 4096

# name → (value, where it is from), of `mpu.agreement`
Facts = dict[str, tuple[Any, str]]


def data_facts(config: RunConfig, identity: Mapping[str, Any]) -> Facts:
    """name → (value, source) of all data of this rank. Reads files.

    identity: what the run records of its data and its tokenizer, of `describe_run`
    """
    # The tokenizer.
    fingerprint = identity["tokenizer"]["fingerprint"]
    facts: Facts = {
        "the vocabulary size": (config.model.vocab_size, "the tokenizer"),
        "the tokenizer": (fingerprint, ""),
    }
    # The corpora of all data, or of each part of them.
    sources = read_sources(config.data)
    parts = {"data": sources.whole, **dict(zip(PARTS, sources.parts))}
    for name, part in parts.items():
        if part is None or not part.values:
            continue
        # Names and weights, then the content of each corpus.
        blend = _blend(part.values)
        facts[f"the blend ({name})"] = (blend, part.flag)
        facts.update(_corpora(name, part.values))
    # The order of the samples, and what else the run records of its data.
    facts.update(_indexes(config))
    facts.update(_identity(identity["data"]))
    return facts


def _identity(values: Mapping[str, Any]) -> Facts:
    """A fact for each value that describes the data."""
    facts: Facts = {}
    for name, value in values.items():
        facts[f"the identity of the data, {name}"] = (value, "")
    return facts


def _blend(values: tuple[str, ...]) -> list:
    """Weights and names without folders, which may differ between machines."""
    blend = parse_blend(values, "the data path")
    names = [piece.name for piece in blend.slices]
    weights = list(blend.weights or ())
    return [names, weights]


def _corpora(
    part: str, values: tuple[str, ...]
) -> Iterator[tuple[str, tuple[Any, str]]]:
    """A fact for each corpus of a part of the data."""
    prefixes = parse_blend(values, "the data path").prefixes
    for number, prefix in enumerate(prefixes, 1):
        corpus = IndexedDataset(prefix)
        size = f"{corpus.num_documents} documents, {corpus.num_tokens} tokens"
        # Lengths of sequences and blocks of tokens: the same for copies at other paths.
        blocks = content_hash(corpus.bin_path)
        content = f"{corpus.fingerprint()} {blocks}"
        digest = hashlib.sha256(content.encode())
        value = f"{size}, hash {digest.hexdigest()[:12]}"
        yield f"corpus {number} ({part})", (value, str(prefix))


def _indexes(config: RunConfig) -> Iterator[tuple[str, tuple[Any, str]]]:
    """The index files of the order of the samples."""
    for what, prefix in config.curriculum.index_prefixes():
        present = filter(Path.exists, corpus_paths(prefix))
        hashes = [content_hash(path) for path in present]
        yield what, (hashes, str(prefix))


def content_hash(path: Path) -> str:
    """A hash of the size of a file and of evenly spaced blocks of it; at most 64 KiB are read."""
    # Files of different sizes differ in their hashes.
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    last = max(0, size - BLOCK_BYTES)  # start of the last block
    # Blocks of a short file overlap; each is read once.
    starts = {last * i // (BLOCKS - 1) for i in range(BLOCKS)}
    with path.open("rb") as file:
        for start in sorted(starts):
            file.seek(start)
            block = file.read(BLOCK_BYTES)
            digest.update(block)
    return digest.hexdigest()[:16]
