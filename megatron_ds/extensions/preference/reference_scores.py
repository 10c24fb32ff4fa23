"""Log-probabilities of the answers under the reference: the model with the weights of the run's first step.

They are computed once, before the first step, by the program that evaluates, and stored beside the corpus: eight bytes
a pair. So the reference takes no memory and no time in a step, needs no second model, and is the same at every layout
and with every kind of state. With new adapters, which begin at zero, it is the model without them.

    first start      computed for the pairs that the run reaches, without those that another run that began with the
                     same weights has stored
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
from ...data.loading.blend import BlendedDataset, count_draws
from ...data.loading.cache import CacheEntry, DamagedEntry, default_cache, locked
from ...data.loading.loader import Loader
from ...data.tokenizers import Tokenizer
from ...errors import CheckpointError
from ...host import places
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
FORMAT = "dtype"  # of the weights at the first step
FORMATS = ("float32", "bfloat16", "float16")


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
        bits = engine.config.adapters.base_bits
        weights = _first_weights(start, description, bits)
        weights[FORMAT] = engine.config.optimizer.params_dtype
    for loader in (loaders.train, loaders.valid, loaders.test):
        if loader is None:
            continue
        for dataset, num_samples in draws_of(loader.dataset):
            reached = dataset.reached(num_samples)
            dataset.reference = _stored_or_scored(
                engine, dataset, reached, loader.collate, weights, is_new
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


def draws_of(dataset: object) -> Iterator[tuple[PairDataset, int]]:
    """The pairs of each corpus of a blend, and how many of their samples the run takes."""
    if isinstance(dataset, PairDataset):
        yield dataset, len(dataset)
    elif isinstance(dataset, BlendedDataset):
        counts = count_draws(dataset.dataset_index, len(dataset.datasets))
        for part, count in zip(dataset.datasets, counts):
            yield part, int(count)


def score_pairs(
    engine: Replica, dataset: PairDataset, numbers: np.ndarray, collate: Collator
) -> np.ndarray:
    """The log-probabilities of pairs under the weights of `engine`, fp32 [numbers, 2], on all ranks.

    numbers: their places in `dataset.pairs`, one or more. Collective over the world.
    """
    mesh = engine.mesh
    train = engine.config.train
    # Global batches as in training, for which programs and memory are planned; the last one is filled up.
    size = train.global_batch_size
    count = len(numbers)
    padded = -(-count // size) * size
    loader = Loader(
        _Chosen(dataset, numbers, padded),
        collate,
        micro_batch_size=train.micro_batch_size,
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


class _Chosen:
    """The pairs with these numbers, and the last one repeatedly up to `size` samples."""

    def __init__(self, dataset: PairDataset, numbers: np.ndarray, size: int):
        self.dataset = dataset
        self.numbers = numbers
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        place = min(i, len(self.numbers) - 1)
        return self.dataset.pair(int(self.numbers[place]))


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
    numbers: np.ndarray,
    collate: Collator,
    weights: dict[str, Any] | None,
    is_new: bool,
) -> np.ndarray:
    """The scores of a dataset, NaN but for the pairs with these numbers and others that are stored. Collective over
    the world."""
    # What is stored already, by this run or another one.
    world = engine.mesh.group("world")
    entries = _entries(engine, dataset, weights, is_new)
    scores = on_one_rank(world, lambda: _read(entries))
    if scores is None:
        scores = np.full_like(dataset.reference, np.nan)
    missing = numbers[np.isnan(scores[numbers]).any(axis=1)]
    if not len(missing):
        return scores
    if not is_new:
        raise CheckpointError(
            _not_stored(engine, dataset, entries[0], numbers, missing)
        )
    # The rest is computed with the weights that are loaded.
    begin = time.monotonic()
    scores[missing] = score_pairs(engine, dataset, missing, collate)
    if engine.mesh.rank == 0:
        seconds = time.monotonic() - begin
        logger.info(
            "%s: %d pairs scored by the reference in %.1f s, of %d that the run reaches and %d in all",
            dataset.corpus.prefix,
            len(missing),
            seconds,
            len(numbers),
            len(scores),
        )
        _write(entries[0], scores)
    return scores


def _entries(
    engine: Replica,
    dataset: PairDataset,
    weights: dict[str, Any] | None,
    is_new: bool,
) -> list[CacheEntry]:
    """Where the scores are stored: one entry, or those that a run may have begun with.

    A run may continue in another number format, and its reference stays that of its first step.
    """
    data = engine.config.data
    own = engine.config.optimizer.params_dtype
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
        "model": model_identity(engine.config.model),
    }
    return [
        CacheEntry(folder, TITLE, key | {FORMAT: name}, ("scores",)) for name in formats
    ]


def _not_stored(
    engine: Replica,
    dataset: PairDataset,
    entry: CacheEntry,
    numbers: np.ndarray,
    missing: np.ndarray,
) -> str:
    """The error of a run that continues, and reaches pairs without scores."""
    prefix = dataset.corpus.prefix
    first_weights = "They are computed with the weights of the first step, which later checkpoints do not have."
    if len(missing) < len(numbers):
        steps = engine.config.train.train_iters
        return (
            f"this run reaches {len(numbers):,} pairs of {prefix}, and {entry.directory} has no log-probabilities of "
            f"the reference for {len(missing):,} of them. {first_weights} They were scored for the pairs that the "
            f"first start reached. Give --train-iters (now {steps}), --eval-iters and --eval-interval of that start; "
            "or begin another run from this checkpoint, with --finetune, whose reference is then the present model."
        )
    return (
        f"{entry.directory} has no log-probabilities of the reference for {prefix}. {first_weights} Copy that folder "
        "from where the run began, or name it with --data-cache-path; or begin another run from a checkpoint, with "
        "--finetune."
    )


def _read(entries: Sequence[CacheEntry]) -> np.ndarray | None:
    """The stored scores of the first entry that is there."""
    for entry in entries:
        try:
            found = entry.load(verify_large=True)
        except DamagedEntry as error:
            logger.warning("stored scores of the reference cannot be used: %s", error)
            continue
        if found is not None:
            return np.array(found["scores"])
    return None


def _write(entry: CacheEntry, scores: np.ndarray) -> None:
    """Store scores beside those that other runs have stored meanwhile."""
    try:
        entry.directory.mkdir(parents=True, exist_ok=True)
        with locked(entry.directory, TITLE):
            stored = _read([entry])
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
