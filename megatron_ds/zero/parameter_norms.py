"""Norms of logical parameters, over all their parts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..host.device_copies import on_device
from ..mpu.collectives import all_reduce_
from ..mpu.group import Group
from ..mpu.managed_parameter import spec_of
from ..mpu.param_spec import EXPERT_DATA_AXES, ParamSpec
from .data_groups import Axes, DataGroups


@dataclass(frozen=True, slots=True)
class NormEntry:
    """A logical parameter. is_split: each rank along `axes`, those that sum its gradient, holds a part of its
    optimizer state."""

    spec: ParamSpec
    axes: Axes
    is_split: bool
    is_tied: bool


class ParameterNorms:
    """Norms of tensors that belong to logical parameters, such as weights or updates, over all their parts.

    A parameter may be in shards of several data-parallel ranks, split over tensor-parallel ranks, over ranks
    with other experts, and held by two pipeline stages. A call makes one all-reduce for all parameters over
    each group that has parts, and no host synchronization. It is collective; ranks without parts of any
    parameter call it with empty lists.

    entries: parameters whose optimizers ask for norms, in the same order on all ranks of the same stages
    """

    def __init__(
        self, entries: Sequence[NormEntry], groups: DataGroups, device: torch.device
    ):
        self._groups = groups
        self._device = torch.device(device)
        self.lists = 0  # of the last call
        self._position = {entry.spec.name: i for i, entry in enumerate(entries)}
        self._indices: dict[tuple[str, ...], torch.Tensor] = {}
        tied = sorted(
            (entry.spec.tied, i) for i, entry in enumerate(entries) if entry.is_tied
        )
        self._tied = self._tensor([i for _, i in tied], torch.int64)
        self._is_first_holder = self._tensor(
            [not entries[i].spec.tied_copy for _, i in tied]
        )
        self._counts_here = self._tensor(
            [
                e.spec.tensor_split is not None or groups.dividing(e.axes).rank == 0
                for e in entries
            ]
        )
        # Over data-parallel ranks: parts in shards, and experts, which the first of the ranks that hold the
        # same ones counts.
        is_first = groups.rank_by_axes.get(EXPERT_DATA_AXES, 0) == 0
        over_data = [e.is_split or e.axes == EXPERT_DATA_AXES for e in entries]
        self._sums_over_data = any(over_data)
        self._over_data = self._tensor(over_data, torch.bool)
        self._part_here = self._tensor(
            [
                of_data and (e.is_split or is_first)
                for of_data, e in zip(over_data, entries)
            ]
        )

    def __call__(
        self,
        lists: Sequence[Sequence[torch.Tensor]],
        parameters: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Norms, fp32 [len(lists), len(parameters)], of the logical parameters with the parts `parameters`.

        lists: of tensors, one for each of `parameters`: the parts themselves, their updates, ...
        """
        return self.of(self.reduced(self.squares(lists, parameters)), parameters)

    def squares(
        self,
        lists: Sequence[Sequence[torch.Tensor]],
        parameters: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """float64 [len(lists), entries]: sums of squares of these parts, to add to those of other parts."""
        self.lists = len(lists)
        squares = torch.zeros(
            len(lists), len(self._position), dtype=torch.float64, device=self._device
        )
        if parameters:
            values = [tensor for tensors in lists for tensor in tensors]
            norms = torch.stack(torch._foreach_norm(values, 2, torch.float64)).view(
                len(lists), -1
            )
            squares.index_add_(1, self._index(parameters), norms.square())
        return squares

    def reduced(self, squares: torch.Tensor) -> torch.Tensor:
        """Norms of all entries, fp32, from the squares of all parts that this rank has. Collective."""
        return self._sum(squares).sqrt().float()

    def of(
        self, norms: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the columns of `reduced` of the logical parameters with the parts `parameters`."""
        return norms[:, self._index(parameters)]

    def largest(
        self, values: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Maxima, fp32 [len(parameters)], over all parts of the logical parameters.

        values: fp32 [len(parameters)], not negative, of the parts `parameters`. Collective, as a call.
        """
        found = torch.zeros(len(self._position), device=self._device)
        index = self._index(parameters)
        found.scatter_reduce_(0, index, values, "amax")
        for group, _ in self.sent_of_largest():
            all_reduce_(found, group, "max")
        return found[index]

    def sent_of_largest(self) -> Iterator[tuple[Group, int]]:
        """(group, bytes) of each all-reduce of `largest`."""
        if self._position and self._sums_over_data:
            yield self._groups.data, 4 * len(self._position)
        if self._position and self._groups.tp.size > 1:
            yield self._groups.tp, 4 * len(self._position)

    def sent(self, lists: int) -> Iterator[tuple[Group, int]]:
        """(group, bytes) of each all-reduce of a call with this many lists."""
        whole = 8 * lists * len(self._position)
        if self._sums_over_data:
            yield self._groups.data, whole
        if self._groups.tp.size > 1 and whole:
            yield self._groups.tp, whole
        if len(self._tied):
            yield self._groups.tied, 8 * lists * len(self._tied)

    def _index(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        names = tuple(spec_of(p).name for p in parameters)
        # Copied to the device once, since every step uses the same.
        if names not in self._indices:
            self._indices[names] = self._tensor(
                [self._position[name] for name in names], torch.int64
            )
        return self._indices[names]

    def _sum(self, squares: torch.Tensor) -> torch.Tensor:
        # Of parameters that all ranks dividing a layer hold, the first one's; these may lie along either group.
        squares = squares * self._counts_here
        # Parameters that are whole on every data-parallel rank have their sum already.
        if self._sums_over_data:
            summed = squares * self._part_here
            all_reduce_(summed, self._groups.data)
            squares = torch.where(self._over_data, summed, squares)
        # Tensor-parallel parts.
        if self._groups.tp.size > 1:
            all_reduce_(squares, self._groups.tp)
        # Pipeline stages: all holders use the sum of the first, so that their copies stay equal to the bit.
        if len(self._tied):
            of_first = squares[:, self._tied] * self._is_first_holder
            all_reduce_(of_first, self._groups.tied)
            squares = squares.index_copy(1, self._tied, of_first)
        return squares

    def _tensor(self, values: list, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return on_device(torch.tensor(values, dtype=dtype), self._device)
