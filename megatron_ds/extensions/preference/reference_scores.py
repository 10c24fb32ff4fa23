"""Log-probabilities of the answers under the reference: the model with the weights of the run's first step.

They are computed once, before the first step, by the program that evaluates, and stored beside the corpus: eight bytes
a pair. So the reference takes no memory and no time in a step, needs no second model, and is the same at every layout
and with every kind of state. With new adapters, which begin at zero, it is the model without them.

    first start      computed, unless another run that began with the same weights has stored them
    later starts     read; these weights are no longer in memory
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...batch.batch import Batch
from ...checkpoint.save_folder import run_id_of
from ...config import RunConfig
from ...data.kind import Collator
from ...data.loading.blend import BlendedDataset
from ...data.loading.cache import CacheEntry, DamagedEntry, default_cache
from ...data.loading.loader import Loader
from ...data.tokenizers import Tokenizer
from ...errors import CheckpointError
from ...host import places
from ...host.content_hash import content_hash
from ...models.model_identity import model_identity
from ...mpu.agree import on_one_rank
from ...mpu.collectives import all_reduce_
from ...mpu.host_reads import to_host
from ...progress.ramps import Progress
from ...training.build import Replica
from ...training.objective import Prepare
from ...training.run_checkpoint import Start
from ...training.trainer import Loaders
from .answer_pairs import ANSWERS, PairDataset
from .pair_loss import AnswerScores, Logits, answer_scores, sizes_of

logger = logging.getLogger(__name__)
TITLE = "PreferenceReference"
NAMES = ("scores",)  # of the arrays of an entry


def open_reference(config: RunConfig, tokenizer: Tokenizer) -> Prepare:
    """What fills the references when the weights of the run are loaded."""
    return fill_references


def fill_references(
    engine: Replica,
    loaders: Loaders,
    start: Start,
    description: dict,
    progress: Progress,
) -> dict[str, Any]:
    """Fill `reference` of all pairs. Returns what run.json has to remember of it. Collective over the world.

    start, description, progress: of the run, whose weights are loaded. Raises CheckpointError where a run continues
    and its scores are not found.
    """
    _warn_of_dropout(engine)
    is_new = progress.step == 0
    weights = start.run.get(TITLE)
    if is_new:
        weights = _first_weights(start, description, engine.config.adapters.base_bits)
    for loader in (loaders.train, loaders.valid, loaders.test):
        if loader is None:
            continue
        for dataset in pairs_in(loader.dataset):
            dataset.reference = _stored_or_scored(
                engine, dataset, loader.collate, weights, is_new
            )
    return {TITLE: weights}


def _warn_of_dropout(engine: Replica) -> None:
    """Log the dropout of a model whose reference has none."""
    model = engine.config.model
    of_adapters = engine.config.adapters.dropout
    largest = max(model.hidden_dropout, model.attention_dropout, of_adapters)
    if largest and engine.mesh.rank == 0:
        logger.warning(
            "--dpo trains with dropout (up to %g), which the reference does not have: a model that equals the "
            "reference then has other rewards than 0. --hidden-dropout 0 --attention-dropout 0 --lora-dropout 0 is "
            "usual",
            largest,
        )


def pairs_in(dataset: object) -> Iterator[PairDataset]:
    """The pairs of each corpus of a blend."""
    if isinstance(dataset, PairDataset):
        yield dataset
    elif isinstance(dataset, BlendedDataset):
        for part in dataset.datasets:
            yield from pairs_in(part)


def score_pairs(engine: Replica, dataset: PairDataset, collate: Collator) -> np.ndarray:
    """The log-probabilities of all pairs under the weights of `engine`, fp32 [pairs, 2], on all ranks.

    Collective over the world.
    """
    mesh = engine.mesh
    train = engine.config.train
    # Global batches as in training, for which programs and memory are planned; the last one is filled up.
    size = train.global_batch_size
    count = len(dataset.pairs)
    padded = -(-count // size) * size
    loader = Loader(
        _InOrder(dataset, padded), collate, micro_batch_size=train.micro_batch_size
    )
    sizes = sizes_of(engine.config, mesh)
    scores = lambda logits, batch: answer_scores(logits, batch, **sizes)
    # One rank of those with the same numbers reports them.
    reports = not (mesh.coordinate("tp") or mesh.coordinate("cp"))
    found = torch.zeros(padded, ANSWERS, device=mesh.device)
    for first in range(0, padded, size):
        with places.phase(places.EVALUATING):
            batch = engine.batches.evaluation(loader, first, size)
            outputs = _forward(engine, batch.split(train.micro_batch_size), scores)
        if outputs and reports:
            found[list(batch.sample_ids)] = torch.cat([o.log_probs for o in outputs])
    all_reduce_(found, mesh.group("world"))
    return to_host(found[:count], mesh.group("world")).numpy()


def _forward(
    engine: Replica,
    microbatches: Sequence[Batch],
    loss: Callable[[Logits, Batch], AnswerScores],
) -> list[AnswerScores]:
    """The scores of each micro-batch on the ranks of the last stage; [] elsewhere."""
    last = [stage for stage in engine.stages.values() if stage.is_last]
    if not last:
        return engine.executor.forward(microbatches)
    with last[0].computing(loss):
        return engine.executor.forward(microbatches)


class _InOrder:
    """All pairs in the order of the corpus, and the last one repeatedly up to `size` samples."""

    def __init__(self, dataset: PairDataset, size: int):
        self.dataset = dataset
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return self.dataset.pair(min(i, len(self.dataset.pairs) - 1))


def _first_weights(
    start: Start, description: dict, base_bits: int | None
) -> dict[str, Any]:
    """The identity of the weights with which a run begins: checkpoints, or the run itself if a name is not enough.

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
    engine: Replica,
    dataset: PairDataset,
    collate: Collator,
    weights: dict[str, Any] | None,
    is_new: bool,
) -> np.ndarray:
    """The scores of a dataset. Collective over the world."""
    # All that they depend on.
    world = engine.mesh.group("world")
    data = engine.config.data
    dtype = engine.config.optimizer.params_dtype
    prefix = dataset.corpus.prefix
    folder = Path(data.data_cache_path or default_cache(prefix))
    key = {
        "class": TITLE,
        **dataset.key,
        "weights": weights,
        "model": model_identity(engine.config.model),
        "dtype": dtype,
    }
    # Stored, or else computed with the weights that are loaded.
    stored = on_one_rank(world, lambda: _stored(folder, key, dataset, is_new))
    if stored is not None:
        return stored
    if not is_new:
        raise CheckpointError(
            f"{folder} has no log-probabilities of the reference for {prefix}. They were computed with the weights of "
            "the first step, which later checkpoints do not have. Copy that folder from where the run began, or name "
            "it with --data-cache-path; or begin another run from a checkpoint, with --finetune."
        )
    begin = time.monotonic()
    scores = score_pairs(engine, dataset, collate)
    if engine.mesh.rank == 0:
        seconds = time.monotonic() - begin
        logger.info(
            "%s: %d pairs scored by the reference in %.1f s",
            prefix,
            len(scores),
            seconds,
        )
        _write(_entry(folder, key, dataset), scores)
    return scores


def _stored(
    folder: Path, key: dict[str, Any], dataset: PairDataset, is_new: bool
) -> np.ndarray | None:
    """The scores of a dataset in a folder."""
    found = _read(_entry(folder, key, dataset))
    if found is None and not is_new:
        # Earlier versions did not record the contents of the corpus.
        found = _read(CacheEntry(folder, TITLE, key, NAMES))
    return found


def _entry(folder: Path, key: dict[str, Any], dataset: PairDataset) -> CacheEntry:
    """The entry of a key and of what the files of the corpus hold now. Reads them in full."""
    paths = (dataset.corpus.bin_path, dataset.masks.path)
    content = content_hash(np.memmap(path, np.uint8, "r") for path in paths)
    return CacheEntry(folder, TITLE, key | {"content": content}, NAMES)


def _read(entry: CacheEntry) -> np.ndarray | None:
    try:
        found = entry.load(verify_large=True)
    except DamagedEntry as error:
        logger.warning("stored scores of the reference cannot be used: %s", error)
        return None
    return None if found is None else np.array(found["scores"])


def _write(entry: CacheEntry, scores: np.ndarray) -> None:
    try:
        entry.directory.mkdir(parents=True, exist_ok=True)
        entry.store({"scores": scores}, is_alone=False)
    except OSError as error:
        logger.warning(
            "cannot store the scores of the reference in %s (%s), without which this run cannot be continued. Name a "
            "writable folder with --data-cache-path",
            entry.directory,
            error.strerror or error,
        )
