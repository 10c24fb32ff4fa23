"""`LoggedInterval`: the steps since the last log line, and the record of that line."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..planning.flops import layers_of_run, model_flops, utilization
from ..progress.ramps import Progress
from .build import Replica
from .moments import StepEnd
from .observe.memory import peak_memory_gib
from .observe.records import TrainRecord
from .step import StepOutcome
from .step_size import StepSize


@dataclass(frozen=True)
class _Done:
    """A step of the next line."""

    outcome: StepOutcome
    end: StepEnd


class LoggedInterval:
    """Averages the steps of a line. total: steps of the whole run"""

    def __init__(self, replica: Replica, total: int):
        self._config = config = replica.config
        self._layers = layers_of_run(config)
        self._kept = config.kept_tokens
        self._mesh = replica.mesh
        self._peak = replica.peak_flops
        self._total = total
        self._steps: list[_Done] = []

    def flops(self, trained: StepSize) -> float:
        """Return the FLOPs of the model in a step, over all ranks."""
        return model_flops(
            self._layers,
            trained.samples,
            trained.length,
            self._config.padded_vocab_size,
            trained.kept,
        )

    def add(self, outcome: StepOutcome, end: StepEnd) -> None:
        """Count a step."""
        self._steps.append(_Done(outcome, end))

    def clear(self) -> None:
        """Begin the next line."""
        self._steps.clear()

    def record(
        self,
        progress: Progress,
        fields: Mapping[str, Any],
        tags: Mapping[str, float],
    ) -> TrainRecord:
        """Return the record of the steps. fields, tags: of observers"""
        outcomes = [done.outcome for done in self._steps]
        last = outcomes[-1]
        end = self._steps[-1].end
        trained = end.trained
        # Times and losses are means over the steps since the last line; other numbers are the last.
        seconds = self._mean(lambda end: end.seconds)
        ranks = self._mesh.grid.world_size
        flops = self._mean(lambda end: end.flops) / seconds / ranks
        own: dict[str, Any] = dict(
            step=progress.step,
            steps=self._total,
            samples=progress.samples,
            tokens=progress.tokens,
            step_seconds=seconds,
            learning_rate=last.learning_rate,
            decoupled_learning_rate=last.decoupled_learning_rate,
            weight_decay=last.weight_decay,
            global_batch_size=end.size,
            loss=statistics.fmean(o.loss for o in outcomes),
            loss_scale=last.loss_scale,
            grad_norm=last.grad_norm,
            num_zeros=last.num_zeros,
            skipped_steps=progress.skipped_steps,
            nan_steps=progress.nan_steps,
            seq_length=trained.length,
            tokens_per_second=self._mean(lambda end: end.tokens) / seconds,
            tflops_per_rank=flops / 1e12,
            mfu=utilization(flops, self._peak),
            eta_seconds=(self._total - progress.step) * seconds,
            memory_gib=peak_memory_gib(self._mesh.device),
            data_seconds=self._mean(lambda end: end.data_seconds),
            kept_tokens=trained.kept,
            kept_title="" if self._kept is None else self._kept.title,
            layer_tokens=progress.layer_tokens,
            actual_seq_length=trained.layer_tokens // self._config.model.num_layers,
            metrics={
                name: statistics.fmean(
                    o.named[name] for o in outcomes if name in o.named
                )
                for name in last.named
            },
        )
        return TrainRecord(**{**own, **fields, "tags": tags})

    def _mean(self, value: Callable[[StepEnd], float]) -> float:
        return statistics.fmean(value(done.end) for done in self._steps)
