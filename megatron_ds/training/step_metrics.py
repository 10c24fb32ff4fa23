"""`StepMetrics`: losses, ledger entries and stop requests of all ranks after a step, in one small all-reduce.

    [ loss sum, micro-batches, tokens, votes | sum, count | sum, count | … ]   float64; a pair per ledger name

A rank knows only the names that its own stages add. Names are therefore exchanged once, at the first step,
and agreed in the order of the ranks. A rank whose layers add a new name later votes for another exchange in
the same all-reduce, so no step waits for a message of its own.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch

from ..data.ledger import Entry
from ..errors import ConfigError
from ..models import Loss
from ..mpu.collectives import all_gather_object, all_reduce_
from ..mpu.grid import ranks_in_short
from ..mpu.mesh import Mesh
from .records import EvalRecord, TrainRecord

NEW_NAMES = 2.0**32             # one vote for an exchange of names, above any number of votes for a stop
RESERVED = {"lm loss", "perplexity", *(f.name for kind in (TrainRecord, EvalRecord) for f in fields(kind))}


@dataclass(frozen=True)
class StepReport:
    """Means of a step over micro-batches and data-parallel ranks, the same on every rank.

    tokens   counted in the loss
    stop     whether a rank asked to end the run
    terms    loss terms that layers added, by name, without their weight
    metrics  metrics that layers recorded, by name
    """

    loss: float
    tokens: float
    stop: bool
    terms: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def named(self) -> Mapping[str, float]:
        """Loss terms and metrics."""
        return {**self.terms, **self.metrics}

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all loss terms are; metrics do not reach the gradients."""
        return all(map(math.isfinite, (self.loss, *self.terms.values())))


class StepMetrics:
    """Reduces the metrics of the steps of one run, or of the batches of one evaluation.

    per_token  the loss is averaged over all tokens of the step instead of over micro-batches
    names      ledger names of all ranks → whether it is a loss term; None before the first step
    """

    def __init__(self, mesh: Mesh, per_token: bool):
        self.mesh, self.per_token = mesh, per_token
        self.names: dict[str, bool] | None = None

    def reduce(self, losses: Sequence[Loss], entries: Sequence[Entry], stop: bool = False) -> StepReport:
        """The means over the global batch, for the log. Collective over the world.

        losses: of the local micro-batches; empty on ranks without the last stage. entries: of the local
        stages. Sums are in float64, so that the reported loss does not depend, beyond its last bit, on how
        samples are distributed over ranks. Raises ConfigError, on all ranks, for a name that the log uses
        itself.
        """
        mine = {(entry.name, entry.weight is not None) for entry in entries}
        if self.names is None:
            self._exchange(mine)
        row = self._row(losses, entries)
        row[3] = stop + NEW_NAMES * (not mine <= self.names.items())
        total, count, tokens, votes, *pairs = self._summed(row)
        if votes >= NEW_NAMES:
            self._exchange(mine)
            pairs = self._summed(self._row(losses, entries))[4:]
        means = {name: pairs[2 * i] / max(pairs[2 * i + 1], 1) for i, name in enumerate(self.names)}
        terms = {name: mean for name, mean in means.items() if self.names[name]}
        metrics = {name: mean for name, mean in means.items() if not self.names[name]}
        return StepReport(total / max(count, 1), tokens, votes % NEW_NAMES > 0, terms, metrics)

    def _exchange(self, mine: set[tuple[str, bool]]) -> None:
        """Agree on the names of all ranks, at the first step and for new names. Collective over the world."""
        agreed = dict(self.names or {})
        for names in all_gather_object(mine, self.mesh.group("world")):
            for name, is_term in sorted(names):
                if agreed.setdefault(name, is_term) != is_term:
                    raise ConfigError(f"ledger name {name!r} is both a loss term and a metric: the report "
                                      "has one mean for each name. Use two names.")
        if taken := sorted(name for name in agreed if name in RESERVED or name.replace(" ", "_") in RESERVED):
            raise ConfigError(f"ledger names {', '.join(map(repr, taken))} are fields of the log already, "
                              "and one would hide the other. Use other names.")
        self.names = agreed

    def _row(self, losses: Sequence[Loss], entries: Sequence[Entry]) -> torch.Tensor:
        """This rank's sums, on the CPU. The first tensor-parallel rank reports for all of them."""
        row = torch.zeros(4 + 2 * len(self.names), dtype=torch.float64)
        if self.mesh.coordinate("tp") != 0:
            return row
        # One transfer from the device for all numbers of the step.
        numbers = iter(_to_host([*(x for loss in losses for x in (loss.total, loss.tokens)),
                                 *(x for entry in entries for x in (entry.value, entry.count))]))
        if losses:
            pairs = [[next(numbers), next(numbers)] for _ in losses]
            totals, tokens = torch.tensor(pairs, dtype=torch.float64).unbind(1)
            row[0] = (totals if self.per_token else totals / tokens.clamp(min=1)).sum()
            row[1] = tokens.sum() if self.per_token else len(losses)
            row[2] = tokens.sum()
        sums = [0.0] * (len(row) - 4)
        place = {name: 2 * i for i, name in enumerate(self.names)}
        for entry in entries:
            value, count = next(numbers), next(numbers)
            if (at := place.get(entry.name)) is not None:  # None: a new name, exchanged after this row
                sums[at] += value
                sums[at + 1] += count
        row[4:] = torch.tensor(sums, dtype=torch.float64)
        return row

    def _summed(self, row: torch.Tensor) -> list[float]:
        row = row.to(self.mesh.device)
        all_reduce_(row, self.mesh.group("world"))
        return row.tolist()


def _to_host(scalars: Sequence[float | torch.Tensor]) -> list[float]:
    """The values, in few operations: one stack of all tensors of a dtype, and one wait for the device."""
    places: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(scalars):
        if isinstance(x, torch.Tensor):
            places.setdefault(x.dtype, []).append(i)
    values = [0.0 if isinstance(x, torch.Tensor) else float(x) for x in scalars]
    if places:
        stacks = [torch.stack([scalars[i] for i in at]).double() for at in places.values()]
        for i, value in zip(itertools.chain(*places.values()), torch.cat(stacks).tolist()):
            values[i] = value
    return values


def stop_reason(requests: Sequence[tuple[str | None, float | None]]) -> str:
    """Why the run stops: "rank 3 received SIGTERM", "time limit of 30 min reached".

    requests: of each rank, the signal that it received and the time limit in minutes, where it has passed
    """
    received: dict[str, list[int]] = {}
    for rank, (name, _) in enumerate(requests):
        if name:
            received.setdefault(name, []).append(rank)
    reasons = [f"{_of_all(ranks, len(requests))}received {name}" for name, ranks in received.items()]
    limits = sorted({minutes for _, minutes in requests if minutes is not None})
    return ", ".join([*reasons, *(f"time limit of {minutes:g} min reached" for minutes in limits)])


def _of_all(ranks: Sequence[int], world: int) -> str:
    if len(ranks) == world:
        return f"all {world} ranks " if world > 1 else ""
    return f"rank{'s' * (len(ranks) > 1)} {ranks_in_short(ranks)} "
