"""`Totals`: sums over the tokens of a micro-batch, which the losses, the balance and the metrics of a layer
share.

With sequence parallelism a rank has some of the tokens. All sums of a layer travel in one all-reduce, in
fp64, where numbers of slots are exact. The gradient of the sums is each rank's own, for its own tokens.

Letters: T tokens of this rank, k slots of a token, E experts, z logits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..mpu.group import Group
from ..mpu.regions import reduce_from_region
from .router import Routing


@dataclass(frozen=True)
class Totals:
    """Sums over each set of tokens, a sequence or the micro-batch, on all ranks that hold some of it. Padding
    does not count.

    table  fp64 [sets, 2 E + columns], differentiable, without the first dimension for `whole`: slots of each
           expert before drops, scores of each expert, and of the tokens what `columns` names:

           tokens   1
           entropy  of the scores
           squares  logsumexp(z)², if asked for
           kept     slots after drops, and
           served   1 with such a slot; both only where slots may drop or are padding
    topk   k
    """

    table: torch.Tensor
    columns: tuple[str, ...]
    num_experts: int
    topk: int

    @classmethod
    def of(
        cls,
        chosen: Routing,
        kept: torch.Tensor | None,
        sets: int,
        group: Group | None,
        counted: torch.Tensor | None = None,
        squares: bool = False,
    ) -> "Totals":
        """Token t belongs to set t modulo `sets`.

        chosen   without slots of padding, before drops
        kept     bool [T, k], after drops; None: all
        group    ranks that divide the sequences; collective over it. None: this rank has them whole
        counted  bool [T], False for padding; None: all tokens
        """
        num_experts = chosen.scores.shape[1]
        k = chosen.experts.shape[1]
        scores = chosen.scores if counted is None else chosen.scores * counted[:, None]
        columns = dict(_columns(chosen, kept, counted, squares))
        others = torch.stack(tuple(columns.values()), 1).view(-1, sets, len(columns))
        table = torch.cat(
            (
                demand_of(chosen.experts, num_experts, sets, chosen.kept),
                scores.view(-1, sets, num_experts).sum(0),
                others.sum(0, dtype=torch.float64),
            ),
            1,
        )
        if group is not None:
            table = reduce_from_region(table, group)
        return cls(table, tuple(columns), num_experts, k)

    @cached_property
    def whole(self) -> "Totals":
        """Over all sets together."""
        return replace(
            self, table=self.table[0] if len(self.table) == 1 else self.table.sum(0)
        )

    @cached_property
    def demand(self) -> torch.Tensor:
        """[sets, E], slots of each expert before drops, whole numbers."""
        return self._constants[..., : self.num_experts]

    @property
    def scores(self) -> torch.Tensor:
        """[sets, E], sums of scores, differentiable."""
        return self.table[..., self.num_experts : 2 * self.num_experts]

    def sum_of(self, column: str) -> torch.Tensor:
        """[sets]. Of the columns only "squares" is differentiable."""
        table = self.table if column == "squares" else self._constants
        return table[..., 2 * self.num_experts + self.columns.index(column)]

    @cached_property
    def _constants(self) -> torch.Tensor:
        return self.table.detach()


def _columns(
    chosen: Routing,
    kept: torch.Tensor | None,
    counted: torch.Tensor | None,
    squares: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name of a column and its values for the tokens, [T] of any dtype."""
    of_tokens = {
        "tokens": torch.ones_like(chosen.scores[:, 0]),
        "entropy": torch.special.entr(chosen.scores.detach()).sum(1),
    }
    if squares:
        of_tokens["squares"] = chosen.logits.logsumexp(1).square()
    for name, values in of_tokens.items():
        yield name, values if counted is None else values * counted
    if kept is not None:
        yield "kept", kept.sum(1)
        yield "served", kept.any(1)


def demand_of(
    experts: torch.Tensor, num_experts: int, sets: int, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """int64 [sets, E]: slots of each expert. experts: int64 [T, k]; token t belongs to set t modulo `sets`.

    kept: bool [T, k] or [T, 1], the slots that count; None: all
    """
    ones = (
        torch.ones_like(experts)
        if kept is None
        else kept.expand_as(experts).to(torch.int64)
    )
    by_set = lambda t: t.view(-1, sets, t.shape[1]).transpose(0, 1).reshape(sets, -1)
    return experts.new_zeros(sets, num_experts).scatter_add_(
        1, by_set(experts), by_set(ones)
    )
