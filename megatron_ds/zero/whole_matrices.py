"""`WholeMatrices`: brings the parts of logical matrices to one rank each, and the changed parts back.

The momentum of a matrix is in the shards of ZeRO and in the slices of tensor parallelism, like all state. For
an update that needs the whole, such as Muon's, each matrix has an owner that computes it (matrix_owners.py):

    data-parallel ranks d        parts in shards            whole slices               parts in shards
    tensor-parallel ranks t      slice t of each     →      at their owner d    →      slice t of each
                                                              ↓         ↑
                                                        whole at owner t: change

Two hops there and two back, each one all-to-all of unequal sizes for all parameters of a round. A hop over
one rank does nothing; with stage 0 every data-parallel rank has all elements, and computes all matrices. With
n elements in its slices, a rank sends about 2 n/d in each hop and its return. So results do not depend on the
layout, and buffers, shards and checkpoints are those of other optimizers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from ..mpu.collectives import all_to_all_
from ..mpu.group import Group
from ..optim import MakeOptimizer, ParamGroup
from ..optim.matrix_batches import change_matrices
from .data_groups import DataGroups
from .leaf_tensor import LeafTensor
from .matrix_owners import ROUND, MatrixEntry, Owned, matrix_entries, plan_rounds
from .set_plan import SetPlan

FP32_BYTES = 4
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class SegmentExchange:
    """Segments of tensors on the ranks of a group, which meet at one rank each.

    owners   name → the rank where they meet
    lengths  name → elements of the segment on each rank
    device   of all segments
    """

    group: Group
    owners: Mapping[str, int]
    lengths: Mapping[str, Sequence[int]]
    device: torch.device

    def there(
        self, segments: Mapping[str, torch.Tensor]
    ) -> dict[str, list[torch.Tensor]]:
        """Flat segments of all names → the segments of all ranks, of the names that this rank owns.

        A rank without elements of a name has no segment. Collective.
        """
        if self.group.size == 1 or not self.owners:
            return {name: [segments[name]] for name in self.owners}
        out = self._empty(self._inward())
        here = [
            segments[name]
            for name in self._by_owner()
            if self.lengths[name][self.group.rank]
        ]
        self._exchange(out, here, self._inward(), self._outward())
        mine = self._mine()
        pieces = iter(
            out.split(
                [self.lengths[name][rank] for rank in self._ranks for name in mine]
            )
        )
        of_ranks = [[next(pieces) for _ in mine] for _ in self._ranks]
        return {name: list(of_name) for name, of_name in zip(mine, zip(*of_ranks))}

    def back(
        self, segments: Mapping[str, Sequence[torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Return the inverse of `there`. Collective."""
        if self.group.size == 1 or not self.owners:
            return {name: segments[name][0] for name in self.owners}
        out = self._empty(self._outward())
        mine = self._mine()
        names = self._by_owner()
        self._exchange(
            out,
            [segments[name][rank] for rank in self._ranks for name in mine],
            self._outward(),
            self._inward(),
        )
        return dict(
            zip(
                names,
                out.split([self.lengths[name][self.group.rank] for name in names]),
            )
        )

    def sent(self) -> tuple[int, int]:
        """Bytes that this rank sends to others there, and back."""
        here = self.group.rank
        there, back = (
            FP32_BYTES * (sum(sizes) - sizes[here])
            for sizes in (self._outward(), self._inward())
        )
        return there, back

    @property
    def _ranks(self) -> range:
        return range(self.group.size)

    def _mine(self) -> list[str]:
        return [name for name, owner in self.owners.items() if owner == self.group.rank]

    def _by_owner(self) -> list[str]:
        # The sort is stable, so names of one owner stay in order.
        return sorted(self.owners, key=self.owners.__getitem__)

    def _outward(self) -> list[int]:
        sizes = [0] * self.group.size
        for name, owner in self.owners.items():
            sizes[owner] += self.lengths[name][self.group.rank]
        return sizes

    def _inward(self) -> list[int]:
        mine = self._mine()
        return [sum(self.lengths[name][rank] for name in mine) for rank in self._ranks]

    def _empty(self, sizes: Sequence[int]) -> torch.Tensor:
        return torch.empty(sum(sizes), device=self.device)

    def _exchange(
        self,
        out: torch.Tensor,
        pieces: Sequence[torch.Tensor],
        received: Sequence[int],
        sent: Sequence[int],
    ) -> None:
        whole = (
            torch.cat([piece.reshape(-1) for piece in pieces])
            if pieces
            else out.new_empty(0)
        )
        all_to_all_(out, whole, self.group, (sent, received))


def _leaf(tensor: torch.Tensor) -> LeafTensor:
    # A plan has tensors of torch's own class in their place, with the same attributes.
    return cast(LeafTensor, tensor)


class WholeMatrices:
    """The matrices of the parameters of one optimizer, and their owners.

    entries: in the same order on all ranks that divide a layer and on all data-parallel ranks
    """

    def __init__(
        self,
        entries: Sequence[MatrixEntry],
        groups: DataGroups,
        device: torch.device,
        round_elements: int = ROUND,
    ):
        self._rounds = [
            MatrixRound(owned, groups, device)
            for owned in plan_rounds(entries, groups, round_elements)
        ]

    def __call__(
        self,
        change: Change,
        unit: str,
        parts: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Return the parts of `parameters` after `change` of batches [n, o, i] of their matrices. Collective.

        parts: of an update, in the form of the parameters, padding included; they may be overwritten
        unit: see `optim.matrix_batches`
        """
        leaves = [_leaf(p) for p in parameters]
        found = {leaf.spec.name: part for leaf, part in zip(leaves, parts)}
        for round_ in self._rounds:
            round_.run(
                change,
                unit,
                found,
                {leaf.spec.name: leaf.piece.stop - leaf.piece.start for leaf in leaves},
            )
        return [found[leaf.spec.name] for leaf in leaves]

    def sent(self) -> Iterator[tuple[Group, int]]:
        """(group, bytes that this rank sends) of each all-to-all of a call."""
        for round_ in self._rounds:
            for hop in round_.hops:
                if hop.group.size > 1 and hop.owners:
                    yield from ((hop.group, count) for count in hop.sent())


def whole_matrices(
    plans: Sequence[SetPlan],
    parameters: Sequence[nn.Parameter],
    param_groups: Sequence[ParamGroup],
    groups: DataGroups,
    device: torch.device,
) -> dict[MakeOptimizer, WholeMatrices]:
    """For each optimizer that changes whole matrices, those of the parameters that it updates.

    parameters: to which the indices in the plans refer. Raises ConfigError, see `matrix_entries`.
    """
    wanting = dict.fromkeys(
        group.optimizer for group in param_groups if group.traits.needs_matrices
    )
    entries = {
        optimizer: matrix_entries(plans, parameters, param_groups, optimizer)
        for optimizer in wanting
    }
    return {
        optimizer: WholeMatrices(found, groups, device)
        for optimizer, found in entries.items()
    }


class MatrixRound:
    """Parameters whose matrices are whole at the same time, and the hops of their parts."""

    def __init__(
        self, owned: Sequence[Owned], groups: DataGroups, device: torch.device
    ):
        tensor = {axes: groups.dividing(axes) for axes in groups.by_axes}
        sizes = {
            e.spec.tensor_split.axis: tensor[e.axes].size
            for e, _, _ in owned
            if e.spec.tensor_split is not None
        }
        self._specs = {entry.spec.name: entry.spec for entry, _, _ in owned}
        self._matrices = {entry.spec.name: entry.matrices for entry, _, _ in owned}
        self._shapes = {
            name: spec.local_shape(sizes) for name, spec in self._specs.items()
        }
        numel = lambda name: torch.Size(self._shapes[name]).numel()
        # Over data-parallel ranks, a hop for each set of axes; their ranks hold spans in any order.
        self._data = []
        self._spans = {
            e.spec.name: e.spans for e, owner, _ in owned if owner is not None
        }
        for axes, group in groups.by_axes.items():
            of_axes = [
                (e, owner)
                for e, owner, _ in owned
                if e.axes == axes and owner is not None
            ]
            self._data.append(
                SegmentExchange(
                    group,
                    {e.spec.name: owner for e, owner in of_axes},
                    {e.spec.name: [b - a for a, b in e.spans] for e, _ in of_axes},
                    device,
                )
            )
        # Over the ranks that divide a layer, those whose slices this rank or all data-parallel ranks have.
        here = lambda e, owner: owner is None or owner == groups.by_axes[e.axes].rank
        self._here = [e.spec.name for e, owner, _ in owned if here(e, owner)]
        self._slices = []
        for group in {group.axes: group for group in tensor.values()}.values():
            owners = {
                e.spec.name: tp
                for e, owner, tp in owned
                if tensor[e.axes].axes == group.axes
                and here(e, owner)
                and tp is not None
            }
            lengths = {name: [numel(name)] * group.size for name in owners}
            self._slices.append(SegmentExchange(group, owners, lengths, device))

    @property
    def hops(self) -> list[SegmentExchange]:
        """All hops, in the order in which they begin."""
        return [*self._data, *self._slices]

    def run(
        self,
        change: Change,
        unit: str,
        parts: dict[str, torch.Tensor],
        numels: Mapping[str, int],
    ) -> None:
        """Replace the parts of this round's parameters in `parts`. numels: of the parts without padding."""
        flat = {
            name: part.reshape(-1)[: numels[name]]
            for name, part in parts.items()
            if name in self._specs
        }
        # To the owners.
        local = {name: flat[name] for name in self._here if name not in self._spans}
        for hop in self._data:
            local |= {
                name: self._joined(name, pieces)
                for name, pieces in hop.there(flat).items()
            }
        divided = {name for hop in self._slices for name in hop.owners}
        wholes = {
            name: local[name].view(self._shapes[name])
            for name in self._here
            if name not in divided
        }
        for hop in self._slices:
            wholes |= {
                name: self._assembled(name, of_ranks)
                for name, of_ranks in hop.there(local).items()
            }
        change_matrices(
            change,
            unit,
            [(whole, self._matrices[name]) for name, whole in wholes.items()],
        )
        # And back.
        local |= {name: whole.reshape(-1) for name, whole in wholes.items()}
        for hop in self._slices:
            mine = [name for name in hop.owners if name in wholes]
            local |= hop.back(
                {name: self._cut(name, wholes[name], hop.group.size) for name in mine}
            )
        changed = {name: local[name] for name in self._here if name not in self._spans}
        for hop in self._data:
            changed |= hop.back(
                {
                    name: [local[name][a:b] for a, b in self._spans[name]]
                    for name in self._here
                    if name in hop.owners
                }
            )
        if moved := [
            (flat[name], changed[name])
            for name in flat
            if not _is_same(flat[name], changed[name])
        ]:
            outs, values = zip(*moved)
            torch._foreach_copy_(outs, values)

    def _joined(self, name: str, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the flat slice of a parameter from the pieces of all data-parallel ranks."""
        if len(pieces) == 1:
            return pieces[0]
        in_order = sorted(zip(self._spans[name], pieces), key=lambda pair: pair[0])
        return torch.cat([piece for _, piece in in_order])

    def _assembled(self, name: str, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the logical tensor from the flat slices of all tensor-parallel ranks."""
        whole = slices[0].new_empty(self._specs[name].shape)
        boxes = self._boxes(
            name, whole, [flat.view(self._shapes[name]) for flat in slices]
        )
        outs, values = zip(*boxes)
        torch._foreach_copy_(outs, values)
        return whole

    def _cut(self, name: str, whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        """Return the inverse of `_assembled`."""
        slices = [whole.new_empty(self._shapes[name]) for _ in range(ranks)]
        of_whole, of_slices = map(list, zip(*self._boxes(name, whole, slices)))
        torch._foreach_copy_(of_slices, of_whole)
        return slices

    def _boxes(
        self, name: str, whole: torch.Tensor, slices: Sequence[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(view of the logical tensor, view of a slice) of the same elements."""
        split = self._specs[name].tensor_split
        assert split is not None, "whole parameters have no slices"
        for rank, local in enumerate(slices):
            for box in self._specs[name].boxes({split.axis: (rank, len(slices))}):
                yield (
                    _part(whole, box.logical, box.sizes),
                    _part(local, box.local, box.sizes),
                )


def _is_same(flat: torch.Tensor, changed: torch.Tensor) -> bool:
    """Return whether two tensors are the same memory; also of tensors without memory, which have no address."""
    places = [
        (tensor.untyped_storage()._cdata, tensor.storage_offset())
        for tensor in (flat, changed)
    ]
    return places[0] == places[1]


def _part(
    tensor: torch.Tensor, corner: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    return tensor[
        tuple(slice(start, start + size) for start, size in zip(corner, sizes))
    ]
