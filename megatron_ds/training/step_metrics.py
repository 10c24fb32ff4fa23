"""`StepMetrics`: losses, ledger entries and stop requests of all ranks after a step, in one small all-reduce.

The sums are made on the device. `queue` begins the all-reduce, and the host reads the sums when it needs
them, together with the norm of the gradient: the one time in a step that it waits for the device.

    [ loss sum, micro-batches, tokens, votes | sum, count | sum, count | … ]   float64; a pair per ledger name

Where each rank has a number of its own to report, such as its time, a column for each rank follows.

A rank knows only the names that its own stages add. Names are therefore exchanged once, at the first step,
and agreed in the order of the ranks. A rank whose layers add a new name later votes for another exchange in
the same all-reduce, so no step waits for a message of its own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch

from ..batch.ledger import Entry
from ..errors import ConfigError
from ..host.device_copies import column, on_device
from ..models import Loss
from ..mpu.collectives import all_gather_object, all_reduce_
from ..mpu.grid import ranks_in_short
from ..mpu.host_reads import read_numbers
from ..mpu.mesh import Mesh
from .observe.records import EvalRecord, TrainRecord

# Votes of ranks are counted in one number: for a stop, for a checkpoint under way, for an exchange of names.
# Each is above any number of the ones before.
READY = 2.0**16
NEW_NAMES = 2.0**32
RESERVED = {
    "lm loss",
    "perplexity",
    *(f.name for kind in (TrainRecord, EvalRecord) for f in fields(kind)),
}


@dataclass(frozen=True)
class StepReport:
    """Means of a step over micro-batches and data-parallel ranks, the same on every rank.

    tokens   counted in the loss
    stop     whether a rank asked to end the run
    ready    ranks that have done their part of the checkpoint under way
    terms    loss terms that layers added, by name, without their weight
    metrics  metrics that layers recorded, by name
    of_ranks  the numbers of all ranks, in their order; empty unless `share` was given one
    """

    loss: float
    tokens: float
    stop: bool
    terms: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    ready: int = 0
    of_ranks: Sequence[float] = ()

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
        self.mesh = mesh
        self.per_token = per_token
        self.names: dict[str, bool] | None = None
        self._own: float | None = None

    @property
    def _agreed(self) -> dict[str, bool]:
        assert self.names is not None, "they are exchanged before the first sums"
        return self.names

    def share(self, own: float | None) -> None:
        """The next report has this number of all ranks. All ranks give one, or none does."""
        self._own = own

    def reduce(
        self, losses: Sequence[Loss], entries: Sequence[Entry], stop: bool = False
    ) -> StepReport:
        """Return the means over the global batch, for the log. Collective over the world.

        losses: of the local micro-batches; empty on ranks without the last stage. entries: of the local
        stages. Sums are in float64, so that the reported loss does not depend, beyond its last bit, on how
        samples are distributed over ranks. Raises ConfigError, on all ranks, for a name that the log uses
        itself.
        """
        return self.report(
            self._read(self.queue(losses, entries, stop)), losses, entries
        )

    def queue(
        self,
        losses: Sequence[Loss],
        entries: Sequence[Entry],
        stop: bool = False,
        is_ready: bool = False,
    ) -> torch.Tensor:
        """Return the sums over all ranks, float64, on the device; `report` takes them. The arguments are those of
        `reduce`. Collective over the world; the host does not wait, except at the first step.
        """
        mine = _names(entries)
        if self.names is None:
            self._exchange(mine)
        votes = stop + READY * is_ready
        if not mine <= self._agreed.items():
            votes += NEW_NAMES
        own = self._own
        self._own = None
        return self._summed(losses, entries, votes, own)

    def report(
        self, numbers: Sequence[float], losses: Sequence[Loss], entries: Sequence[Entry]
    ) -> StepReport:
        """Return the means, from what `queue` returned for the same losses and entries. Collective over the world
        if a rank has new names, which all ranks see in the numbers."""
        total, count, tokens, votes, *pairs = numbers
        of_ranks = pairs[2 * len(self._agreed) :]
        if votes >= NEW_NAMES:
            self._exchange(_names(entries))
            pairs = self._read(self._summed(losses, entries, 0.0))[4:]
        names = self._agreed
        means = {
            name: pairs[2 * i] / max(pairs[2 * i + 1], 1)
            for i, name in enumerate(names)
        }
        terms = {name: mean for name, mean in means.items() if names[name]}
        metrics = {name: mean for name, mean in means.items() if not names[name]}
        return StepReport(
            total / max(count, 1),
            tokens,
            votes % READY > 0,
            terms,
            metrics,
            int(votes % NEW_NAMES // READY),
            of_ranks,
        )

    def _read(self, sums: torch.Tensor) -> list[float]:
        """Return the numbers on the host, which waits for the device."""
        return read_numbers(sums, self.mesh.group("world"))

    def _exchange(self, mine: set[tuple[str, bool]]) -> None:
        """Agree on the names of all ranks, at the first step and for new names. Collective over the world."""
        agreed = dict(self.names or {})
        for names in all_gather_object(mine, self.mesh.group("world")):
            for name, is_term in sorted(names):
                if agreed.setdefault(name, is_term) != is_term:
                    raise ConfigError(
                        f"ledger name {name!r} is both a loss term and a metric: the report "
                        "has one mean for each name. Use two names."
                    )
        if taken := sorted(
            name
            for name in agreed
            if name in RESERVED or name.replace(" ", "_") in RESERVED
        ):
            raise ConfigError(
                f"ledger names {', '.join(map(repr, taken))} are fields of the log already, "
                "and one would hide the other. Use other names."
            )
        self.names = agreed

    def _summed(
        self,
        losses: Sequence[Loss],
        entries: Sequence[Entry],
        votes: float,
        own: float | None = None,
    ) -> torch.Tensor:
        row = self._row(losses, entries, votes, own)
        all_reduce_(row, self.mesh.group("world"))
        return row

    def _row(
        self,
        losses: Sequence[Loss],
        entries: Sequence[Entry],
        votes: float,
        own: float | None,
    ) -> torch.Tensor:
        """This rank's sums, on the device.

        The first tensor-parallel rank reports for all of them. Context-parallel ranks report their parts of
        the losses, and the first of them what all know, the tokens and the number of losses.
        """
        device = self.mesh.device
        reports = self.mesh.coordinate("tp") == 0
        counts = self.mesh.coordinate("cp") == 0
        # What the host has: the votes, and the number of losses.
        columns = 0 if own is None else self.mesh.group("world").size
        end = 4 + 2 * len(self._agreed)
        known = torch.zeros(end + columns, dtype=torch.float64)
        known[3] = votes
        if own is not None:
            known[end + self.mesh.group("world").rank] = own
        if reports and counts and losses and not self.per_token:
            known[1] = len(losses)
        row = on_device(known, device)
        if not reports:
            return row
        # The losses of this rank, per token or as means of the micro-batches.
        if losses:
            pairs = column(
                [x for loss in losses for x in (loss.total, loss.tokens)], device
            )
            totals, tokens = pairs.view(-1, 2).unbind(1)
            row[0] = (totals if self.per_token else totals / tokens.clamp(min=1)).sum()
            if counts:
                row[2] = tokens.sum()
            if self.per_token:
                row[1] = row[2]
        place = {name: 4 + 2 * i for i, name in enumerate(self._agreed)}
        # New names are exchanged after this row.
        added = [entry for entry in entries if entry.name in place]
        if added:
            numbers = column(
                [x for entry in added for x in (entry.value, entry.count)], device
            )
            at = torch.tensor(
                [place[entry.name] + i for entry in added for i in (0, 1)]
            )
            row.index_add_(0, on_device(at, device), numbers)
        return row


def _names(entries: Sequence[Entry]) -> set[tuple[str, bool]]:
    """(name, whether it is a loss term)"""
    return {(entry.name, entry.weight is not None) for entry in entries}


def stop_reason(requests: Sequence[tuple[str | None, float | None, str | None]]) -> str:
    """Return why the run stops: "rank 3 received SIGTERM", "time limit of 30 min reached".

    requests: of each rank, the signal that it received, the time limit in minutes, where it has passed, and
    the file that it found
    """
    received: dict[str, list[int]] = {}
    for rank, (name, _, _) in enumerate(requests):
        if name:
            received.setdefault(name, []).append(rank)
    reasons = [
        f"{_of_all(ranks, len(requests))}received {name}"
        for name, ranks in received.items()
    ]
    limits = sorted({minutes for _, minutes, _ in requests if minutes is not None})
    reasons += [f"time limit of {minutes:g} min reached" for minutes in limits]
    return ", ".join([*reasons, *(f"found {path}" for _, _, path in requests if path)])


def _of_all(ranks: Sequence[int], world: int) -> str:
    if len(ranks) == world:
        return f"all {world} ranks " if world > 1 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_in_short(ranks)} "
