"""What the ranks exchange after a step: losses of the last stage, and requests to stop. One small all-reduce."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..mpu.collectives import all_reduce_
from ..mpu.mesh import Mesh
from ..planning.text_tables import ranks_in_short


@dataclass(frozen=True)
class StepReport:
    """loss: mean over micro-batches and data-parallel ranks; tokens: counted in the loss; the same on every rank.

    terms: the means of what else the objective holds, by name.
    """

    loss: float
    tokens: float
    stop: bool
    terms: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, (self.loss, *self.terms.values())))


def share(losses: Sequence, mesh: Mesh, stop: bool = False, per_token: bool = False,
          terms: Sequence[str] = ()) -> StepReport:
    """Collective over the world: an all-reduce of four float64, and two for each of `terms`, the names of `Loss.terms`.

    losses: of the local micro-batches; empty on ranks that do not hold the last stage. Sums are in float64, so that the
    reported loss does not depend on how samples are spread over ranks beyond the last bit.
    per_token: average over all tokens of the step instead of over micro-batches.
    """
    reports = mesh.coordinate("tp") == 0 and bool(losses)
    row = torch.zeros(4 + 2 * len(terms), dtype=torch.float64)
    if reports:
        totals = torch.stack([loss.total.double() for loss in losses]).cpu()
        tokens = torch.stack([loss.tokens.double() for loss in losses]).cpu()
        means = totals / tokens.clamp(min=1)
        row[0] = (totals if per_token else means).sum()
        row[1] = tokens.sum() if per_token else len(losses)
        row[2] = tokens.sum()
        for i in range(len(terms)):
            row[4 + 2 * i] = sum(loss.terms[i][0].double() for loss in losses)
            row[5 + 2 * i] = sum(loss.terms[i][1].double() for loss in losses)
    row[3] = float(stop)
    row = row.to(mesh.device)
    all_reduce_(row, mesh.group("world"))
    total, count, tokens, stop_votes, *rest = row.tolist()
    means = {name: rest[2 * i] / max(rest[2 * i + 1], 1) for i, name in enumerate(terms)}
    return StepReport(total / max(count, 1), tokens, stop_votes > 0, means)


def stop_reason(requests: Sequence[tuple[str | None, float | None]]) -> str:
    """Why the run stops, in words: "rank 3 received SIGTERM", "time limit of 30 min reached".

    requests: of each rank, the name of the signal that it received, and the time limit in minutes if that is over
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
