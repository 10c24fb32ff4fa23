"""Movement of tokens to the ranks of their experts, and back.

    x [T, h] of each rank
      │ permute            a row for each kept slot, sorted by expert; of one expert in the order of tokens
      │ all-to-all (ep)    to the rank of the expert
      │ all-gather (etp)   rows of the ranks that divide an expert, if they have different tokens
      │ sort               by expert
    experts [n, h]         each of these ranks computes a part of the width
      │ sort back
      │ reduce-scatter (etp), or all-reduce if they have equal tokens
      │ all-to-all (ep)
      │ combine            sum of the k rows of a token, times their weights, in the order of slots, in fp32
    y [T, h]

Ranks that divide an expert (etp) are the tensor-parallel ones, which have different tokens with sequence
parallelism alone, or others, which always have. With etp 1 nothing is gathered.

Numbers of rows are exchanged first: of different tokens all-gathered over etp, then all-to-all over ep,
8 E bytes a rank. They are read by the host, which waits for the device there. In plans, where tensors have no
values, experts receive equal numbers of rows.

Gradients travel the same way back. Every row has one destination, so no sum depends on the order of arrival.

Lepikhin et al. 2020 (arXiv:2006.16668), section 3.2; dropless: Gale et al. 2022 (arXiv:2211.15841).

Letters: T tokens of this rank, k slots of a token, E experts, R rows that this rank sends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import torch

from ..errors import ConfigError
from ..mpu import collectives
from ..mpu.context import ParallelContext
from ..mpu.group import Group
from ..mpu.host_reads import read_numbers
from ..mpu.regions import copy_to_region, reduce_from_region
from ..mpu.rows import Waiting, all_gather_rows, all_to_all_rows, reduce_scatter_rows
from ..ops.grouped import RowRuns
from ..ops.meta_tensors import has_memory
from ..ops.permute import combine, permute, reorder
from .router import Routing


@dataclass(frozen=True)
class Groups:
    """The ranks among which a layer with experts moves tokens.

    ep                 ranks that divide the experts
    tp                 ranks that divide each expert
    sequence_parallel  whether these have different tokens
    """

    ep: Group
    tp: Group
    sequence_parallel: bool

    @classmethod
    def of(cls, ctx: ParallelContext) -> "Groups":
        """Collective over the world when first called. Raises ConfigError if ranks with equal tokens would have
        different experts."""
        etp = ctx.etp
        differ = ctx.sequence_parallel or ctx.tp.size == 1
        if not differ and etp.ranks != ctx.tp.ranks:
            raise ConfigError(
                f"experts are divided over {etp.size} ranks and dense layers over {ctx.tp.size}, which have equal "
                "tokens: each would be sent twice. Use sequence parallelism, or the same ranks for both."
            )
        return cls(ctx.group("ep"), etp, differ and etp.size > 1)

    @property
    def parts(self) -> int:
        """Ranks that divide an expert and hold different tokens."""
        return self.tp.size if self.sequence_parallel else 1


class Dispatch:
    """The movement of one micro-batch in one layer. Made by all ranks of `groups` together.

    runs  rows of each expert of this rank, as the experts compute them
    """

    def __init__(self, routing: Routing, num_experts: int, groups: Groups):
        self.groups = groups
        self.weights = routing.weights
        # Kept slots in the order of their experts, and the rows that this rank has for each.
        slots = routing.experts.flatten()  # [T k]
        if routing.kept is not None:
            slots = slots.masked_fill(~routing.kept.flatten(), num_experts)
        by_expert, order = slots.sort(stable=True)
        bounds = torch.arange(num_experts + 1, device=slots.device)
        own = torch.searchsorted(by_expert, bounds).diff()  # int64 [E]
        # The numbers of all ranks come to the host together, where it waits for the device.
        chunks = self._exchange(own)  # [ep, t, E/ep]
        ep, t, local = chunks.shape
        planned = slots.numel() if routing.planned is None else routing.planned
        used = _columns_used(routing.experts, routing.kept)
        k = routing.experts.shape[1]
        # `received` is flat, [ep, t, E/ep]. Slots of a token behind the first `width` have no rows.
        rows, received, (width,) = _host(
            groups.ep,
            (own, planned),
            (chunks, planned * t),
            (used, k),
        )
        # Rows that arrive: from each ep rank those of this etp rank; then those of the other etp ranks.
        mine = groups.tp.rank if t > 1 else 0
        cells = _sums(received, ep * t)  # [ep, t], flat
        self._sent = _sums(rows, groups.ep.size)
        self._received = cells[mine::t]
        self._of_tp = [sum(cells[j::t]) for j in range(t)]
        # Rows of each expert of this rank, from all ranks.
        counts = tuple(sum(received[e::local]) for e in range(local))
        by_local = chunks.sum((0, 1)) if ep * t > 1 else chunks.view(local)
        self.runs = RowRuns(counts, by_local)
        # Maps between rows and slots, in both directions.
        total = sum(rows)
        self._order = order[:total]  # row → slot
        place = _inverse(self._order, slots.numel())  # slot → row, -1: none
        self._place = place.view(routing.experts.shape)[:, :width]  # [T, width]
        self._sort = _sorting(chunks, sum(counts))

    def _exchange(self, own: torch.Tensor) -> torch.Tensor:
        """Return the rows [ep, t, E/ep] that each rank sends to the experts of this one, from its own [E]."""
        ep = self.groups.ep
        tp = self.groups.tp
        table = own[None]
        if self.groups.sequence_parallel:
            table = collectives.all_gather(table, tp)  # [t, E]
        by_tp = table.view(len(table), ep.size, -1)  # [t, ep, E/ep]
        by_rank = by_tp.transpose(0, 1).contiguous()  # [ep, t, E/ep]
        arriving = torch.empty_like(by_rank)
        collectives.all_to_all_(arriving.view(-1), by_rank.view(-1), ep)
        return arriving

    def send(self, x: torch.Tensor, waiting: Waiting | None = None) -> torch.Tensor:
        """x [T, h] → the rows that this rank receives from ep; see `arrive`. Collective over ep."""
        k = self.weights.shape[1]
        rows = permute(x, self._order, self._place, k)
        return all_to_all_rows(
            rows,
            self._sent,
            self._received,
            self.groups.ep,
            waiting,
        )

    def arrive(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of `send` → [n, h], sorted by expert. Collective over etp."""
        groups = self.groups
        if groups.sequence_parallel:
            rows = all_gather_rows(rows, self._of_tp, groups.tp)
        else:
            rows = copy_to_region(rows, groups.tp)
        return rows if self._sort is None else self._sort.forward(rows)

    def follow(self, values: torch.Tensor) -> torch.Tensor:
        """Numbers [T] of the tokens → [n], those of the tokens of the experts' rows. Without gradients.

        Collective over ep, and over etp if its ranks have different tokens.
        """
        groups = self.groups
        rows = values[self._order // self.weights.shape[1]]
        rows = all_to_all_rows(rows, self._sent, self._received, groups.ep)
        if groups.sequence_parallel:
            rows = all_gather_rows(rows, self._of_tp, groups.tp)
        return rows if self._sort is None else rows[self._sort.order]

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Results of the experts, partial sums over etp → y [T, h]. Collective over etp and ep."""
        groups = self.groups
        if self._sort is not None:
            rows = self._sort.backward(rows)
        if groups.sequence_parallel:
            rows = reduce_scatter_rows(rows, self._of_tp, groups.tp)
        else:
            rows = reduce_from_region(rows, groups.tp)
        rows = all_to_all_rows(rows, self._received, self._sent, groups.ep)
        return combine(rows, self.weights, self._order, self._place)


class Sorting:
    """A permutation of rows and its inverse. order: row of the result → row of the input."""

    def __init__(self, order: torch.Tensor):
        self.order = order
        self.inverse = _inverse(order, len(order))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows in the new order."""
        return reorder(x, self.order, self.inverse)

    def backward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows in the old order again."""
        return reorder(x, self.inverse, self.order)


def _sorting(chunks: torch.Tensor, rows: int) -> Sorting | None:
    """By expert, rows that arrive in the order etp rank, ep rank, expert.

    chunks: their numbers, int64 [ep, t, E/ep]; rows: the sum
    """
    ep, t, local = chunks.shape
    if ep * t == 1:
        return None
    experts = torch.arange(local, device=chunks.device).repeat(ep * t)
    chunks = chunks.transpose(0, 1).flatten()
    if not has_memory(chunks):
        # In plans an order without values has the right shape.
        return Sorting(torch.empty(rows, dtype=torch.int64, device=chunks.device))
    expert_of_row = experts.repeat_interleave(chunks, output_size=rows)
    return Sorting(expert_of_row.argsort(stable=True))


def _inverse(order: torch.Tensor, size: int) -> torch.Tensor:
    """place[order[i]] = i, -1 elsewhere, int64 [size]."""
    place = torch.full((size,), -1, dtype=torch.int64, device=order.device)
    place[order] = torch.arange(len(order), device=order.device)
    return place


def _columns_used(experts: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """int64 [1]: 1 + the last of the k columns with a kept slot; k where all are kept or have no values."""
    k = experts.shape[1]
    if kept is None or not has_memory(kept):
        return experts.new_full((1,), k)
    numbers = torch.arange(1, k + 1, device=kept.device)
    used = kept.any(0) * numbers
    return used.amax(0, keepdim=True)


def _host(group: Group, *counted: tuple[torch.Tensor, int]) -> list[list[int]]:
    """Return the numbers of each tensor, flat, on the host, which waits once. group: ranks that the wait depends on.

    Each tensor is given with a planned total: without values the numbers are equal parts of it.
    """
    tensors = [counts.flatten() for counts, _ in counted]
    if all(has_memory(t) for t in tensors):
        numbers = iter(read_numbers(torch.cat(tensors), group))
        return [list(islice(numbers, len(t))) for t in tensors]
    return [_equal_parts(total, counts.numel()) for counts, total in counted]


def _equal_parts(total: int, count: int) -> list[int]:
    """`count` numbers with this sum, which differ by one at most."""
    bounds = [total * i // count for i in range(count + 1)]
    return [end - begin for begin, end in pairwise(bounds)]


def _sums(numbers: Sequence[int], parts: int) -> list[int]:
    """Return the sums of equal parts of the numbers, one after the other."""
    each = len(numbers) // parts
    return [sum(numbers[i * each : (i + 1) * each]) for i in range(parts)]
