"""Log-probabilities of the answers under the reference: the model with the weights of the run's first step.

They are computed once, before the first step, by the program that evaluates, and stored beside the corpus: eight bytes
a pair. So the reference takes no memory and no time in a step, needs no second model, and is the same at every layout
and with every kind of state. With new adapters, which begin at zero, it is the model without them.

    first start      computed for the pairs that the run reaches, without those that another run that began with the
                     same weights has stored
    later starts     read; these weights are no longer in memory. Where the run goes on to pairs without scores, the
                     model of the first step is built again (`FirstModel`)
"""

import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...checkpoint.save_folder import run_id_of
from ...config import RunConfig
from ...data.kind import Collator
from ...data.loading.blend import BlendedDataset, count_draws
from ...data.loading.cache import CacheEntry, DamagedEntry, default_cache, locked
from ...data.tokenizers import Tokenizer
from ...errors import CheckpointError
from ...host.content_hash import content_hash
from ...models.identity import model_identity
from ...mpu.agree import on_one_rank
from ...progress.ramps import Progress
from ...training.build import Replica
from ...training.loaders import Loaders
from ...training.objective import Prepare
from ...training.start import Start
from .answer_pairs import PairDataset
from .first_model import ALIKE, ALIKE_IN_ANOTHER_FORMAT, FirstModel, origin_of

logger = logging.getLogger(__name__)
TITLE = "PreferenceReference"
FORMAT = "dtype"  # of the weights at the first step
ORIGIN = "preference_origin"
FORMATS = ("float32", "bfloat16", "float16")
NAMES = ("scores",)  # of the arrays of an entry


def open_reference(config: RunConfig, tokenizer: Tokenizer) -> Prepare:
    """Return what fills the references when the weights of the run are loaded."""
    return partial(fill_references, tokenizer)


def fill_references(
    tokenizer: Tokenizer,
    replica: Replica,
    loaders: Loaders,
    start: Start,
    description: dict,
    progress: Progress,
) -> dict[str, Any]:
    """Fill `reference` of all pairs. Returns what run.json has to remember of it. Collective over the world.

    start, description, progress: of the run, whose weights are loaded. Raises CheckpointError where a run continues
    and its scores are not found.
    """
    _warn_of_dropout(replica)
    is_new = progress.step == 0
    weights: dict[str, Any] | None = start.run.get(TITLE)
    origin: dict[str, Any] | None
    if is_new:
        added = replica.config.added_weights
        bits = None if added is None else added.frozen_bits
        dtype = replica.config.optimizer.params_dtype
        weights = _first_weights(start, description, bits) | {FORMAT: dtype}
        origin = origin_of(replica.config, start)
    else:
        origin = start.run.get(ORIGIN)
    # Scores of the same weights differ more in another number format than that of the first step.
    own = replica.config.optimizer.params_dtype
    is_own = weights is not None and weights.get(FORMAT, own) == own
    alike = ALIKE if is_own else ALIKE_IN_ANOTHER_FORMAT
    model = FirstModel(replica, tokenizer, origin, is_new, alike)
    # The pairs of all parts of the data.
    for loader in (loaders.train, loaders.valid, loaders.test):
        if loader is None:
            continue
        for dataset, num_samples in draws_of(loader.dataset):
            reached = dataset.reached(num_samples)
            dataset.reference = _stored_or_scored(
                model, dataset, reached, loader.collate, weights
            )
    model.release()
    return {TITLE: weights, ORIGIN: origin}


def _warn_of_dropout(replica: Replica) -> None:
    """Log the dropout of a model whose reference has none."""
    model = replica.config.model
    added = replica.config.added_weights
    of_added = 0.0 if added is None else added.dropout
    largest = max(model.hidden_dropout, model.attention_dropout, of_added)
    if largest and replica.mesh.rank == 0:
        logger.warning(
            "--dpo trains with dropout (up to %g), which the reference does not have: a model that equals the "
            "reference then has other rewards than 0. --hidden-dropout 0 --attention-dropout 0 --lora-dropout 0 is "
            "usual",
            largest,
        )


def draws_of(dataset: object) -> Iterator[tuple[PairDataset, int]]:
    """Yield the pairs of each corpus of a blend, and how many of their samples the run takes."""
    if isinstance(dataset, PairDataset):
        yield dataset, len(dataset)
    elif isinstance(dataset, BlendedDataset):
        counts = count_draws(dataset.dataset_index, len(dataset.datasets))
        for part, count in zip(dataset.datasets, counts):
            yield part, int(count)


def _first_weights(
    start: Start, description: dict, base_bits: int | None
) -> dict[str, Any]:
    """Return the identity of the weights with which a run begins: checkpoints, or the run itself if a name is not
    enough.

    base_bits: of frozen weights; encoded ones differ from those of their checkpoint
    """
    loaded = None if start.step is None else [run_id_of(start.run), start.step]
    base = description.get("base", {})
    below = [base["run_id"], base["step"]] if "step" in base else None
    known = {"loaded": loaded, "base": below, "base_bits": base_bits}
    # Initial weights, and those of other programs, have no name that identifies them.
    is_named = (
        loaded is not None and (below or not base) or (below and not start.foreign)
    )
    return known if is_named else known | {"run": description["run_id"]}


def _stored_or_scored(
    model: FirstModel,
    dataset: PairDataset,
    numbers: np.ndarray,
    collate: Collator,
    weights: dict[str, Any] | None,
) -> np.ndarray:
    """Return the scores of a dataset, NaN but for the pairs with these numbers and others that are stored.
    Collective over the world."""
    # What is stored already, by this run or another one.
    replica = model.replica
    world = replica.mesh.group("world")
    look = lambda: _read(_entries(replica, dataset, weights, model.is_new))
    entry, scores = on_one_rank(world, look)
    if scores is None and not model.is_new and len(numbers):
        error: Any = CheckpointError(_not_stored(entry, dataset))
        error.on_all_ranks = True
        raise error
    if scores is None:
        scores = np.full_like(dataset.reference, np.nan)
    is_missing = np.isnan(scores[numbers]).any(axis=1)
    missing = numbers[is_missing]
    if not len(missing):
        return scores
    # The rest is computed with the weights of the first step.
    begin = time.monotonic()
    known = np.flatnonzero(~np.isnan(scores).any(axis=1))
    scores[missing] = model.score(dataset, missing, collate, known, scores)
    if replica.mesh.rank == 0:
        seconds = time.monotonic() - begin
        logger.info(
            "%s: %d pairs scored by the reference in %.1f s, of %d that the run reaches and %d in all",
            dataset.corpus.prefix,
            len(missing),
            seconds,
            len(numbers),
            len(scores),
        )
        # An entry has scores of one number format.
        if model.alike == ALIKE:
            _write(entry, scores)
    return scores


def _entries(
    replica: Replica,
    dataset: PairDataset,
    weights: dict[str, Any] | None,
    is_new: bool,
) -> list[CacheEntry]:
    """Return where the scores are stored: one entry, or those that a run may have begun with. Reads the corpus in
    full.

    A run may continue in another number format, and its reference stays that of its first step.
    """
    data = replica.config.data
    own = replica.config.optimizer.params_dtype
    known = dict(weights or {})
    formats = [known.pop(FORMAT, own)]
    if not is_new and FORMAT not in (weights or {}):
        # A run of an earlier version, which did not record it.
        formats += [name for name in FORMATS if name != own]
    folder = Path(data.data_cache_path or default_cache(dataset.corpus.prefix))
    key = {
        "class": TITLE,
        **dataset.key,
        "weights": known if weights else weights,
        "model": model_identity(replica.config.model),
    }
    keys = [key | {FORMAT: name} for name in formats]
    content = _content(dataset)
    found = [CacheEntry(folder, TITLE, one | content, NAMES) for one in keys]
    if not is_new:
        # Earlier versions did not record the contents of the corpus.
        found += [CacheEntry(folder, TITLE, one, NAMES) for one in keys]
    return found


def _content(dataset: PairDataset) -> dict[str, Any]:
    """Return what the files of the corpus hold now."""
    paths = (dataset.corpus.bin_path, dataset.masks.path)
    return {"content": content_hash(np.memmap(path, np.uint8, "r") for path in paths)}


def _not_stored(entry: CacheEntry, dataset: PairDataset) -> str:
    """Return the error of a run that continues, and has no scores."""
    return (
        f"{entry.directory} has no log-probabilities of the reference for {dataset.corpus.prefix}. They were computed "
        "with the weights of the first step, which later checkpoints do not have. Copy that folder from where the run "
        "began, or name it with --data-cache-path. Scores of a corpus whose tokens or masks have changed since do not "
        "count: restore its files; or begin another run from a checkpoint, with --finetune."
    )


def _read(entries: Sequence[CacheEntry]) -> tuple[CacheEntry, np.ndarray | None]:
    """Return the first entry that is there, and its scores; without any, the first and None."""
    for entry in entries:
        try:
            found = entry.load(verify_large=True)
        except DamagedEntry as error:
            logger.warning("stored scores of the reference cannot be used: %s", error)
            continue
        if found is not None:
            return entry, np.array(found["scores"])
    return entries[0], None


def _write(entry: CacheEntry, scores: np.ndarray) -> None:
    """Store scores beside those that other runs have stored meanwhile."""
    try:
        entry.directory.mkdir(parents=True, exist_ok=True)
        with locked(entry.directory, TITLE):
            _, stored = _read([entry])
            if stored is not None:
                scores = np.where(np.isnan(scores), stored, scores)
            entry.store({"scores": scores}, is_alone=False)
    except OSError as error:
        logger.warning(
            "cannot store the scores of the reference in %s (%s), without which this run cannot be continued. Name a "
            "writable folder with --data-cache-path",
            entry.directory,
            error.strerror or error,
        )
