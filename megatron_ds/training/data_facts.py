"""What ranks compare after they opened their data: corpora, masks, tokenizer, indexes of an order of samples.

Each machine may have its own copy of a corpus, at a path of its own. So ranks compare contents, not paths
(`file_copies`): all bytes of small files, and blocks of large ones.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..data.loading.blend import parse_blend
from ..data.loading.sources import PARTS, DataPath, read_sources
from ..data.text.indexed import IndexedDataset, corpus_paths
from ..data.text.mask_file import mask_path
from ..data.tokenizers import Tokenizer
from ..mpu.agree import gather_from_all_ranks, on_all_ranks
from ..mpu.agreement import require_agreement
from ..mpu.group import Group
from ..planning.run_model import data_kind
from .file_copies import are_read_in_full, copies_of, hashes_of_blocks
from .loaders import Loaders
from .sample_hash import hash_of_sample

logger = logging.getLogger(__name__)
# name → (value, where it is from), of `mpu.agreement`
Facts = dict[str, tuple[Any, str]]
PROBLEM = "the ranks of this job have different data"
LOOKED_AT = 64  # samples of each part
ADVICE = "They would train on samples of both. Copy the same files to all machines."


def require_same_data(
    config: RunConfig,
    identity: Mapping[str, Any],
    tokenizer: Tokenizer,
    loaders: Loaders,
    world: Group,
) -> list[str] | None:
    """Raise the same ConfigError on all ranks when their data differ. Collective over the world. Reads files.

    identity: what the run records of its data and its tokenizer, of `describe_run`
    Returns None if all was compared; else, for each rank, what identifies its copy of files that were too large.
    """
    if world.size == 1:
        return None
    files = on_all_ranks(world, lambda: data_files(config))
    copies = copies_of(files, world)
    are_copies = len(set(copies)) > 1
    blocks = _hashes_of_copies(files, copies, world) if are_copies else {}

    def facts() -> Facts:
        found = data_facts(config, identity)
        # A file beside the vocabulary names this token.
        found["the id of the end of a document"] = (tokenizer.eod, "the tokenizer")
        found |= _samples(loaders)
        return found | blocks

    require_agreement(world, facts, PROBLEM, ADVICE)
    return copies if are_copies and not are_read_in_full(files) else None


def _samples(loaders: Loaders) -> Facts:
    """Return a hash of some samples of each part: of their order, which index maps of each host may decide."""
    facts: Facts = {}
    for part, loader in vars(loaders).items():
        if loader is None:
            continue
        count = len(loader.dataset)
        spaced = {i * count // LOOKED_AT for i in range(LOOKED_AT)}
        places = [place for place in sorted(spaced) if place < count]
        hashes = [hash_of_sample(loader.dataset[place]) for place in places]
        # One value for all of them.
        joined = "".join(hashes)
        text = joined.encode()
        digest = hashlib.sha256(text)
        whole = digest.hexdigest()[:16]
        name = f"{len(hashes)} samples of the {part} data, evenly spaced"
        value = f"hash {whole}"
        facts[name] = (value, "")
    return facts


def _hashes_of_copies(files: dict[str, Path], copies: list[str], world: Group) -> Facts:
    """Hashes of the copy of this rank, which the first rank with that copy computes. Collective over the world."""
    if world.rank == 0:
        logger.info(
            "ranks have %d different copies of the data: their contents are compared",
            len(set(copies)),
        )
    first = copies.index(copies[world.rank])
    read = lambda: hashes_of_blocks(files) if first == world.rank else {}
    return gather_from_all_ranks(world, read)[first]


def data_files(config: RunConfig) -> dict[str, Path]:
    """Return what a file is → its path, of all files that samples and their order are read from."""
    kind = data_kind(config)
    files: dict[str, Path] = {}
    for part, number, prefix in _prefixes(config):
        corpus = f"corpus {number} ({part})"
        tokens, index = corpus_paths(prefix)
        files[f"the index of {corpus}"] = index
        files[f"the tokens of {corpus}"] = tokens
        if kind.has_masks(config):
            files[f"the loss masks of {corpus}"] = mask_path(prefix)
    for what, prefix in _order_prefixes(config):
        for path in filter(Path.exists, corpus_paths(prefix)):
            files[f"{what}, {path.suffix}"] = path
    return files


def data_facts(config: RunConfig, identity: Mapping[str, Any]) -> Facts:
    """name → (value, source) of what describes the data of this rank. Reads the headers of files."""
    # The tokenizer.
    fingerprint = identity["tokenizer"]["fingerprint"]
    size = config.model.vocab_size
    facts: Facts = {}
    facts["the vocabulary size"] = (size, "the tokenizer")
    facts["the tokenizer"] = (fingerprint, "")
    # The weights and names of each blend, then the size of each corpus.
    for name, part in _parts(config):
        facts[f"the blend ({name})"] = (_blend(part.values), part.flag)
    for which, number, prefix in _prefixes(config):
        name = f"corpus {number} ({which})"
        corpus = IndexedDataset(prefix)
        documents = f"{corpus.num_documents} documents"
        held = f"{documents}, {corpus.num_tokens} tokens"
        facts[name] = (held, str(prefix))
    # Which indexes an order of the samples has, and what else the run records of its data.
    for what, prefix in _order_prefixes(config):
        paths = corpus_paths(prefix)
        present = filter(Path.exists, paths)
        suffixes = [path.suffix for path in present]
        facts[what] = (suffixes, str(prefix))
    for key, value in identity["data"].items():
        name = f"the identity of the data, {key}"
        facts[name] = (value, "")
    return facts


def _order_prefixes(config: RunConfig) -> Sequence[tuple[str, str]]:
    """Return (description, prefix) of the indexes that the order of the samples is made from."""
    order = config.sample_order
    if order is None:
        return ()
    return order.prefixes


def _parts(config: RunConfig) -> Iterator[tuple[str, DataPath]]:
    """Yield the name and the data path of all data, or of each part of them; none of mock data."""
    if config.data.mock_data:
        return
    sources = read_sources(config.data)
    parts = {"data": sources.whole, **dict(zip(PARTS, sources.parts))}
    for name, part in parts.items():
        if part is not None and part.values:
            yield name, part


def _prefixes(config: RunConfig) -> Iterator[tuple[str, int, str]]:
    """Yield the part, the number in its blend and the prefix of each corpus."""
    for name, part in _parts(config):
        prefixes = parse_blend(part.values, "the data path").prefixes
        for number, prefix in enumerate(prefixes, 1):
            yield name, number, prefix


def _blend(values: tuple[str, ...]) -> list:
    """Weights and names without folders, which may differ between machines."""
    blend = parse_blend(values, "the data path")
    names = [piece.name for piece in blend.slices]
    weights = list(blend.weights or ())
    return [names, weights]
