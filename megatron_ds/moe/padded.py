"""`PaddedDispatch`: a `Dispatch` whose shapes are known before any token is routed.

Every expert computes C rows for each set of tokens that compete for it (`capacity.py`); a place without a
token is a row of zeros. Nothing reads a number from the device, no numbers of rows are exchanged, and all
pieces of the all-to-all are equal, so memory and traffic do not depend on the data, and a plan has exactly
those of a run. Results are those of `Dispatch` with the same capacity: whatever an expert computes from an
empty row, a bias included, is read by no token and has the gradient zero.

    x [T, h] of each rank
      │ all-to-all (tp)    rows for columns, with sequence parallelism; else each rank takes its columns
    [T', h/t]              all tokens of the tensor-parallel ranks, routed alike by all of them
      │ permute            place (expert, set, c) of E n C places
      │ all-to-all (ep)    to the rank of the expert
      │ all-gather (tp)    of columns; sort by expert
    experts [ep n C E/ep, h]
      │ sort back; reduce-scatter (tp) of columns
      │ all-to-all (ep)
      │ combine            as in `Dispatch`
    [T', h/t]
      │ all-to-all (tp)    columns for rows; without sequence parallelism an all-gather of columns
    y [T, h]

Bytes that a rank sends in a forward, and again in a backward, with e bytes a number and R = E n C / t rows:

    ep   2 (ep-1)/ep R h e
    tp   2 (t-1) R h e, and 2 (t-1)/t T h e for x and y, without sequence parallelism half of that (y, in a
         backward the gradient of x)

and with sequence parallelism the experts and weights of the tokens over tp. For as many rows `Dispatch` sends
the same over ep with sequence parallelism, and without it t times as much.

Where experts are divided over other ranks than dense layers, those of etp, t of them, stand for tp, as with
sequence parallelism.

Letters as in `dispatch.py`; t tensor-parallel ranks, n sets of competing tokens, C places of each expert.
"""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..mpu import collectives
from ..mpu.columns import columns_of_rows, rows_of_columns
from ..mpu.group import Group
from ..mpu.regions import (
    copy_to_region,
    gather_from_region,
    gather_from_sequence_region,
    scatter_to_region,
)
from ..mpu.rows import Waiting, all_to_all_rows
from ..ops.grouped import RowRuns
from ..ops.permute import combine_padded, permute_padded
from .dispatch import Groups
from .router import Routing


class PaddedDispatch:
    """The movement of one micro-batch in one layer, as `Dispatch`.

    All ranks of `groups` make it together, with micro-batches of one shape. No expert may keep more than
    `places` tokens of a set; token t belongs to set t modulo `sets`.
    """

    def __init__(
        self, routing: Routing, num_experts: int, groups: Groups, sets: int, places: int
    ):
        self.groups = groups
        tp = groups.tp
        experts = routing.experts
        weights = routing.weights
        if routing.kept is not None:
            experts = experts.masked_fill(~routing.kept, num_experts)
        if groups.sequence_parallel:
            experts = collectives.all_gather(experts, tp)
            weights = gather_from_sequence_region(weights, tp)
        else:
            # Gradients of this rank's columns only.
            weights = copy_to_region(weights, tp)
        # [T', k]
        self.weights = weights
        runs = num_experts * sets
        self._to_expert, self._rows = _places(experts, runs, sets, places)
        local = num_experts // groups.ep.size
        self._each = local * sets * places  # rows from an ep rank
        rows = groups.ep.size * sets * places
        self.runs = RowRuns((rows,) * local, experts.new_full((local,), rows))

    def send(self, x: torch.Tensor, waiting: Waiting | None = None) -> torch.Tensor:
        """x [T, h] → [E n C, h/t] from the ranks of ep; see `arrive`. Collective over ep and tp."""
        groups = self.groups
        enter = columns_of_rows if groups.sequence_parallel else scatter_to_region
        rows = permute_padded(enter(x, groups.tp), self._to_expert, self._rows)
        return self._swap(rows, waiting)

    def arrive(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of `send` → [ep n C E/ep, h], sorted by expert. Collective over tp."""
        return (
            _ToExperts.apply(rows, self._shape, self.groups.tp)
            if self._is_divided
            else rows
        )

    def follow(self, values: torch.Tensor) -> torch.Tensor:
        """Numbers [T] of the tokens → [ep n C E/ep], those of the tokens of the experts' rows; any number in places
        without a token. Without gradients. Collective over ep, and over tp with sequence parallelism."""
        if self.groups.sequence_parallel:
            values = collectives.all_gather(values, self.groups.tp)
        slots = self._to_expert.clamp(min=0)
        rows = self._swap(values[slots // self.weights.shape[1]])
        return rows.view(self._shape).transpose(0, 1).flatten()

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Results of the experts, partial sums over tp → y [T, h]. Collective over tp and ep."""
        groups = self.groups
        if self._is_divided:
            rows = _FromExperts.apply(rows, self._shape, groups.tp)
        y = combine_padded(self._swap(rows), self.weights, self._to_expert, self._rows)
        leave = rows_of_columns if groups.sequence_parallel else gather_from_region
        return leave(y, groups.tp)

    def _swap(self, rows: torch.Tensor, waiting: Waiting | None = None) -> torch.Tensor:
        each = [self._each] * self.groups.ep.size
        return all_to_all_rows(rows, each, each, self.groups.ep, waiting)

    @property
    def _is_divided(self) -> bool:
        return self.groups.ep.size * self.groups.tp.size > 1

    @property
    def _shape(self) -> tuple[int, int, int]:
        """Rows that arrive: ep ranks, experts of each, places of an expert."""
        ep = self.groups.ep.size
        local = len(self.runs.counts)
        return ep, local, self._each // local


def _places(
    experts: torch.Tensor, runs: int, sets: int, places: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slot of each row [runs C], row of each slot [T', k]); -1: none.

    experts: int64 [T', k], not below E: no row. A run are the places of an expert for one set; within it
    tokens are in order.
    """
    set_of_token = torch.arange(len(experts), device=experts.device) % sets
    keys = (experts * sets + set_of_token[:, None]).clamp(max=runs).flatten()
    by_run, slots = keys.sort(stable=True)
    bounds = torch.searchsorted(by_run, torch.arange(runs + 1, device=keys.device))
    held = bounds.diff()
    # Rows from slots: the c-th place of a run is taken if the run has more than c slots.
    place = torch.arange(places, device=keys.device)
    at = (bounds[:-1, None] + place).clamp(max=len(slots) - 1)  # [runs, C]
    slot_of_row = slots[at].masked_fill(place >= held[:, None], -1).flatten()
    # Slots from rows.
    row = (
        by_run * places + torch.arange(len(slots), device=keys.device) - bounds[by_run]
    )
    row_of_slot = torch.empty_like(row)
    row_of_slot[slots] = row.masked_fill(by_run == runs, -1)
    return slot_of_row, row_of_slot.view(experts.shape)


def _to_experts(
    rows: torch.Tensor, shape: tuple[int, int, int], tp: Group
) -> torch.Tensor:
    """[ep E_l n C, h/t] of each rank → [E_l ep n C, h]."""
    rows = collectives.all_gather(rows, tp).view(tp.size, *shape, -1)
    return rows.permute(2, 1, 3, 0, 4).flatten(3).flatten(0, 2)


def _from_experts(
    rows: torch.Tensor, shape: tuple[int, int, int], tp: Group
) -> torch.Tensor:
    """Return the adjoint: [E_l ep n C, h] → the sum over tp of this rank's columns, [ep E_l n C, h/t]."""
    ep, local, places = shape
    pieces = (
        rows.view(local, ep, places, tp.size, -1).permute(3, 1, 0, 2, 4).flatten(0, 3)
    )
    return collectives.reduce_scatter(pieces, tp)


class _ToExperts(Function):
    @staticmethod
    def forward(ctx, rows, shape, tp):
        ctx.route = shape, tp
        return _to_experts(rows, shape, tp)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _from_experts(grad.contiguous(), *ctx.route), None, None


class _FromExperts(Function):
    @staticmethod
    def forward(ctx, rows, shape, tp):
        ctx.route = shape, tp
        return _from_experts(rows.contiguous(), shape, tp)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _to_experts(grad, *ctx.route), None, None
