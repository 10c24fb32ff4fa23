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

Facts = dict[str, tuple[Any, str]]


def data_facts(config: RunConfig, identity: Mapping[str, Any]) -> Facts:
    """name → (value, source) of all data of this rank. identity: of `describe_run`. Reads files."""
    facts: Facts = {
        "the vocabulary size": (config.model.vocab_size, "the tokenizer"),
        "the tokenizer": (identity["tokenizer"]["fingerprint"], ""),
    }
    sources = read_sources(config.data)
    parts = {"data": sources.whole, **dict(zip(PARTS, sources.parts))}
    for name, part in parts.items():
        if part is not None and part.values:
            facts[f"the blend ({name})"] = (_blend(part.values), part.flag)
            facts |= dict(_corpora(name, part.values))
    return facts | dict(_indexes(config)) | _identity(identity["data"])


def _identity(values: Mapping[str, Any]) -> Facts:
    facts: Facts = {}
    for name, value in values.items():
        facts[f"the identity of the data, {name}"] = (value, "")
    return facts


def _blend(values: tuple[str, ...]) -> list:
    """Weights and names without folders."""
    blend = parse_blend(values, "the data path")
    return [[piece.name for piece in blend.slices], list(blend.weights or ())]


def _corpora(
    part: str, values: tuple[str, ...]
) -> Iterator[tuple[str, tuple[Any, str]]]:
    for at, prefix in enumerate(parse_blend(values, "the data path").prefixes):
        corpus = IndexedDataset(prefix)
        size = f"{corpus.num_documents} documents, {corpus.num_tokens} tokens"
        # Lengths of sequences and blocks of tokens: the same for copies at other paths.
        content = f"{corpus.fingerprint()} {content_hash(corpus.bin_path)}"
        digest = hashlib.sha256(content.encode()).hexdigest()
        yield (
            f"corpus {at + 1} ({part})",
            (f"{size}, hash {digest[:12]}", str(prefix)),
        )


def _indexes(config: RunConfig) -> Iterator[tuple[str, tuple[Any, str]]]:
    """The index files of the order of the samples."""
    for what, prefix in config.curriculum.index_prefixes():
        paths = corpus_paths(prefix)
        hashes = [content_hash(path) for path in paths if path.exists()]
        yield what, (hashes, str(prefix))


def content_hash(path: Path) -> str:
    """A hash of the size of a file and of evenly spaced blocks of it; at most 64 KiB are read."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    last = max(0, size - BLOCK_BYTES)
    # Blocks of a short file overlap; each is read once.
    starts = {last * i // (BLOCKS - 1) for i in range(BLOCKS)}
    with path.open("rb") as file:
        for start in sorted(starts):
            file.seek(start)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]
