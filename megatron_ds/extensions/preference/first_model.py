"""`FirstModel`: the model at the first step of a run, which is the reference, and the scores that it gives to pairs.

At the first start it is the model of the run. Later its weights are read again from where the run began: from
--pretrained-checkpoint, from --load with --finetune, or, without either, from the seed.
"""

import gc
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ...batch.batch import Batch
from ...checkpoint.place import absolute
from ...checkpoint.save_folder import run_id_of
from ...config import RunConfig, Source
from ...data.kind import Collator
from ...data.loading.loader import Loader
from ...data.tokenizers import Tokenizer
from ...errors import CheckpointError, ConfigError
from ...host import places
from ...host.device_copies import on_device
from ...mpu.agree import on_one_rank
from ...mpu.collectives import all_reduce_
from ...mpu.host_reads import to_host
from ...training.build import Replica
from ...training.start import Start
from ...training.start_folder import find_weights
from ..evaluation.checkpoint_model import built_and_loaded
from .answer_pairs import ANSWERS, PairDataset
from .pair_loss import AnswerScores, Logits, answer_scores, sizes_of

FIRST = Source("derived", "the first step of this run")
PROBES = 8  # stored pairs that are scored again
# Relative difference of scores of the same weights, in the number format of the first step and in another one.
ALIKE = 1e-3
ALIKE_IN_ANOTHER_FORMAT = 0.02


def origin_of(config: RunConfig, start: Start) -> dict[str, Any]:
    """Return where the weights of the first step were read, for run.json.

    load: the folder, None for initial weights.  run_id, step: of its checkpoint, None where another program wrote it
    """
    checkpoint = config.checkpoint
    is_loaded = start.step is not None or start.foreign is not None
    folder = checkpoint.load if is_loaded else None
    return {
        "load": None if folder is None else absolute(folder),
        "format": checkpoint.load_format,
        "run_id": run_id_of(start.run),
        "step": start.step,
    }


class FirstModel:
    """The reference of a run.

    replica  the model of the run
    origin  what `origin_of` gave at the first start; None for a run of an earlier version
    is_new  this is the first start
    alike   the largest relative difference of two scores of the same weights
    """

    def __init__(
        self,
        replica: Replica,
        tokenizer: Tokenizer,
        origin: dict[str, Any] | None,
        is_new: bool,
        alike: float = ALIKE,
    ):
        self.alike = alike
        self.replica = replica
        self.tokenizer = tokenizer
        self.origin = origin
        self.is_new = is_new

    def score(
        self,
        dataset: PairDataset,
        numbers: np.ndarray,
        collate: Collator,
        known: np.ndarray,
        scores: np.ndarray,
    ) -> np.ndarray:
        """Return the log-probabilities of pairs, fp32 [numbers, 2], on all ranks.

        numbers: their places in `dataset.pairs`, one or more.  known: of pairs whose scores are stored in `scores`;
        where the model is read again, it must give some of them the same. Collective over the world. Raises
        CheckpointError where the weights of the first step are gone.
        """
        if self.is_new:
            return score_pairs(self.replica, dataset, numbers, collate)
        # Some stored pairs in front show whether these are the same weights.
        probes = known[:PROBES]
        chosen = np.concatenate([probes, numbers])
        found = score_pairs(self._again, dataset, chosen, collate)
        again = found[: len(probes)]
        if not np.allclose(again, scores[probes], rtol=self.alike, atol=self.alike):
            raise self._lost(f"{self._folder} has other weights now", len(numbers))
        return found[len(probes) :]

    @property
    def _folder(self) -> str:
        return self._recorded["load"] or "the initial model"

    @property
    def _recorded(self) -> dict[str, Any]:
        """What `origin_of` gave. Raises CheckpointError for a run that has not recorded it."""
        if self.origin is None:
            raise self._lost("the run does not record where it began", None)
        return self.origin

    @cached_property
    def _again(self) -> Replica:
        """The model of the first step, built again with weights alone. Collective over the world."""
        origin = self._recorded
        values = {
            "checkpoint.load": origin["load"],
            "checkpoint.load_format": origin["format"],
            "checkpoint.finetune": origin["load"] is not None,
        }
        config = self.replica.config.with_values(values, FIRST)
        mesh = self.replica.mesh
        try:
            start = on_one_rank(mesh.group("world"), lambda: self._start(config))
            return built_and_loaded(config, self.tokenizer, start, mesh).replica
        except (CheckpointError, ConfigError) as error:
            raise self._lost(str(error), None) from None

    def _start(self, config: RunConfig) -> Start:
        """Return the checkpoint that the run began with. Raises CheckpointError for another one."""
        origin = self._recorded
        if origin["load"] is None:
            return Start(None, {}, "")
        start = find_weights(config.checkpoint)
        found = (run_id_of(start.run), start.step)
        wanted = (origin["run_id"], origin["step"])
        if found != wanted:
            raise CheckpointError(
                f"{origin['load']} is at step {start.step} of run {found[0]} now, and the run began at step "
                f"{wanted[1]} of run {wanted[0]}"
            )
        return start

    def release(self) -> None:
        """Free the model of the first step, if it was built again."""
        if self.__dict__.pop("_again", None) is not None:
            # Its objects refer to one another.
            gc.collect()
            if self.replica.mesh.device.type == "cuda":
                torch.cuda.empty_cache()

    def _lost(self, reason: str, count: int | None) -> CheckpointError:
        """Return the error of a run that continues to pairs without scores, on all ranks."""
        steps = self.replica.config.train.train_iters
        pairs = "pairs" if count is None else f"{count:,} pairs"
        error: Any = CheckpointError(
            f"this run reaches {pairs} that its first start did not, and the reference cannot score them: {reason}. "
            f"Restore what the run began with; or give --train-iters (now {steps}), --eval-iters and --eval-interval "
            "of the first start; or begin another run from this checkpoint, with --finetune."
        )
        error.on_all_ranks = True
        return error


def score_pairs(
    replica: Replica, dataset: PairDataset, numbers: np.ndarray, collate: Collator
) -> np.ndarray:
    """Return the log-probabilities of pairs under the weights of `replica`, fp32 [numbers, 2], on all ranks.

    numbers: their places in `dataset.pairs`, one or more. Collective over the world.
    """
    mesh = replica.mesh
    train = replica.config.train
    # Global batches as in training, for which programs and memory are planned; the last one is filled up.
    size = train.global_batch_size
    assert size is not None, "a checked configuration has it"
    count = len(numbers)
    padded = -(-count // size) * size
    loader = Loader(
        _Chosen(dataset, numbers, padded),
        collate,
        micro_batch_size=train.micro_batch_size,
    )
    sizes = sizes_of(replica.config, mesh)
    scores = lambda logits, batch: answer_scores(logits, batch, **sizes)
    # One rank of those with the same numbers reports them.
    reports = not (mesh.coordinate("tp") or mesh.coordinate("cp"))
    found = torch.zeros(padded, ANSWERS, device=mesh.device)
    for first in range(0, padded, size):
        with places.phase(places.EVALUATING):
            batch = replica.batches.evaluation(loader, first, size)
            outputs = _forward(replica, batch.split(train.micro_batch_size), scores)
        if outputs and reports:
            rows = on_device(torch.tensor(batch.sample_ids), mesh.device)
            found.index_copy_(0, rows, torch.cat([o.log_probs for o in outputs]))
    all_reduce_(found, mesh.group("world"))
    return to_host(found[:count], mesh.group("world")).numpy()


def _forward(
    replica: Replica,
    microbatches: Sequence[Batch],
    loss: Callable[[Logits, Batch], AnswerScores],
) -> list[AnswerScores]:
    """Return the scores of each micro-batch on the ranks of the last stage; [] elsewhere."""
    last = [stage for stage in replica.stages.values() if stage.is_last]
    if not last:
        return replica.executor.forward(microbatches)
    with last[0].computing(loss):
        return replica.executor.forward(microbatches)


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
