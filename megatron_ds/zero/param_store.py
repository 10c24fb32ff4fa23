"""The parameters of one set, in flat buffers: whole on every rank (`WholeParameters`) or in shards
(`ShardedParameters`).

    fp32 model     flat  |w2|b2| w1 |     the update writes the model itself
    16-bit model   flat  |w2|b2| w1 |     the update writes fp32 masters and rounds them into flat

If optimizer state is sharded, each rank updates its shard, and the ranks gather the rest: bucket by bucket in
place, or in ZeRO 3 layer by layer when it is needed.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from ..host.memory_maps import huge_page_zeros
from ..mpu.collectives import all_gather_into_
from ..mpu.group import DONE, Waitable
from ..mpu.managed_parameter import spec_of
from ..mpu.param_spec import ParamSpec
from .data_groups import Hierarchy
from .gathering import MappedUnit, SharedParts, Unit
from .layout import Layout, ShardPiece, SlotPiece
from .tiers import Array, Tier

Draw = Callable[[ParamSpec, int, torch.Tensor], None]
"""Fills a flat tensor with the initial values of elements [start, start + len) of a local parameter."""


class ParameterStore:
    """The weights of one set. Its parameters, in the order of layout.slots, become views of flat buffers.

    ranks    ranks that hold the same parameters
    sharded  each rank updates its shard only
    pieces   what this rank updates
    units    what is gathered layer by layer; empty if parameters are whole
    """

    units: Sequence[Unit] = ()

    def __init__(self, layout: Layout, ranks: Hierarchy, sharded: bool):
        self.layout = layout
        self.ranks = ranks
        self.sharded = sharded
        self.pieces = (
            layout.slot_intersections(ranks.shard) if sharded else layout.whole_slots()
        )

    @property
    def nbytes(self) -> int:
        """Bytes of parameters held now, in any tier."""
        raise NotImplementedError

    @property
    def is_shared(self) -> bool:
        """Whether other ranks map the memory of this rank's parts."""
        return False

    def values_of(self, piece: SlotPiece) -> torch.Tensor:
        """Return the model's weights of a piece, padding included: a view."""
        raise NotImplementedError

    def array_of(self, first: SlotPiece, numel: int) -> Array:
        """`numel` weights from the beginning of a piece on, in one bucket."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Make the updates of all ranks visible, after each rank has updated its pieces: on return, or when
        units are gathered, or after `wait`."""

    def wait(self, buckets: Iterable[int] | None = None) -> None:
        """The weights of these buckets (None: of all) are there for what is queued from now on."""


class WholeParameters(ParameterStore):
    """A `ParameterStore` of parameters that are whole on every rank, in one flat buffer.

    waits_later  `refresh` only begins to gather, and `wait` is called before weights are read
    """

    waits_later = False

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        ranks: Hierarchy,
        sharded: bool,
        device: torch.device | None = None,
        draw: Draw | None = None,
    ):
        super().__init__(layout, ranks, sharded)
        first = parameters[0]
        self._under_way: dict[int, Waitable] = {}  # gathers by bucket
        self.flat = huge_page_zeros(
            layout.numel, dtype=first.dtype, device=device or first.device
        )
        for slot, p in zip(layout.slots, parameters):
            view = self.flat[slot.start : slot.stop]
            fill(view, p, 0, draw)
            become(p, view.view(p.shape))

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def values_of(self, piece: SlotPiece) -> torch.Tensor:
        return self.flat[piece.flat : piece.flat + piece.padded_numel]

    def array_of(self, first: SlotPiece, numel: int) -> Array:
        return Array(self.flat[first.flat : first.flat + numel])

    def refresh(self) -> None:
        """Make the updates of all ranks visible. Collective if sharded."""
        if not self.sharded:
            return
        layout = self.layout
        ranks = self.ranks
        shards = layout.shard_pieces(ranks.shard)
        parts = layout.shard_pieces(ranks.inner.rank, ranks.inner.size)
        for wholes, mine, group in (
            (parts, shards, ranks.outer),
            (layout.buckets, parts, ranks.inner),
        ):
            self.wait()
            # The first layers have the last buckets.
            for bucket in reversed(range(len(mine))):
                whole = wholes[bucket]
                own = mine[bucket]
                self._under_way[bucket] = all_gather_into_(
                    self.flat[whole.start : whole.stop],
                    self.flat[own.start : own.stop],
                    group,
                    async_op=True,
                )
        if not self.waits_later:
            self.wait()

    def wait(self, buckets: Iterable[int] | None = None) -> None:
        for bucket in [*self._under_way] if buckets is None else buckets:
            self._under_way.pop(bucket, DONE).wait()


class ShardedParameters(ParameterStore):
    """A `ParameterStore` of parameters in shards, gathered by units (ZeRO 3).

        part     this rank's weights, in a tier: on the device, in host memory or on a disk. There are as many
                 parts as an inner group has ranks (data_groups.py), which are the ranks that gather. This
                 rank updates its shard of it
        flat     of each unit, when gathered

    unit_plans  (layer, first bucket, last bucket + 1), in the order of the buckets
    tier        of the parts, unless ranks share their memory
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        ranks: Hierarchy,
        unit_plans: Sequence[tuple[int, int, int]],
        device: torch.device,
        tier: Tier,
        draw: Draw | None,
    ):
        super().__init__(layout, ranks, sharded=True)
        self._device = device
        here = ranks.inner.rank, ranks.inner.size
        self._parts = layout.shard_pieces(*here)
        dtype = parameters[0].dtype
        shares = ranks.inner.memory and tier.is_plain
        self._shared = SharedParts(layout, ranks.inner, dtype) if shares else None
        self._arrays = (
            self._shared.arrays
            if self._shared  # one for each bucket
            else tier.arrays([part.stop - part.start for part in self._parts], dtype)
        )
        for piece in layout.slot_intersections(*here):
            fill(
                self.values_of(piece)[: piece.stop - piece.start],
                parameters[piece.slot],
                piece.start,
                draw,
            )
        tier.settle()
        self.units = [
            self._make_unit(*unit_plan, parameters) for unit_plan in unit_plans
        ]

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's parts."""
        return sum(array.tensor.nbytes for array in self._arrays)

    @property
    def is_shared(self) -> bool:
        return self._shared is not None

    @property
    def nbytes(self) -> int:
        return self.shard_bytes + sum(
            unit.nbytes for unit in self.units if not unit.is_free
        )

    def values_of(self, piece: SlotPiece) -> torch.Tensor:
        """Return the weights of a piece in this rank's part."""
        bucket = self.layout.slots[piece.slot].bucket
        start = piece.flat - self._parts[bucket].start
        return self._arrays[bucket].tensor[start : start + piece.padded_numel]

    def array_of(self, first: SlotPiece, numel: int) -> Array:
        bucket = self.layout.slots[first.slot].bucket
        start = first.flat - self._parts[bucket].start
        return self._arrays[bucket].part(start, start + numel)

    def refresh(self) -> None:
        """Make the updates of all ranks visible, when units are gathered. Collective over the outer group."""
        for unit in self.units:
            unit.claims.clear()
            unit.free()
        if self.ranks.outer.size > 1:
            shards = self.layout.shard_pieces(self.ranks.shard)
            works = [
                self._refresh_part(*of) for of in zip(self._arrays, self._parts, shards)
            ]
            for work in works:
                work.wait()

    def _refresh_part(
        self, array: Array, part: ShardPiece, shard: ShardPiece
    ) -> Waitable:
        """An offloaded array is copied to the device for it."""
        start = shard.start - part.start
        stop = shard.stop - part.start
        if array.is_at(self._device, array.tensor.dtype):
            return all_gather_into_(
                array.tensor, array.tensor[start:stop], self.ranks.outer, async_op=True
            )
        near = torch.empty(
            part.stop - part.start, dtype=array.tensor.dtype, device=self._device
        )
        array.part(start, stop).read(near[start:stop]).wait()
        all_gather_into_(near, near[start:stop], self.ranks.outer)
        array.write(near).wait()
        return DONE

    def _make_unit(
        self, layer: int, first: int, stop: int, parameters: Sequence[nn.Parameter]
    ) -> Unit:
        buckets = self.layout.buckets[first:stop]
        group = self.ranks.gathering
        start = buckets[0].start
        dtype = parameters[0].dtype
        if self._shared:
            unit: Unit = MappedUnit(
                layer, first, stop - 1, dtype, self._shared.map(first, stop), group
            )
        else:
            flat = torch.empty(
                buckets[-1].stop - start, dtype=dtype, device=self._device
            )
            unit = Unit(layer, first, stop - 1, flat, group)
        unit.buckets = [
            (unit.flat[bucket.start - start : bucket.stop - start], array)
            for bucket, array in zip(buckets, self._arrays[first:stop])
        ]
        show_unit(unit, self.layout, parameters)
        return unit


def show_unit(unit: Unit, layout: Layout, parameters: Sequence[nn.Parameter]) -> None:
    """Make the parameters of a new unit views of its flat buffer, then free it.

    parameters: of the whole set, by slot
    """
    buckets = layout.buckets[unit.first_bucket : unit.last_bucket + 1]
    start = buckets[0].start
    for i in range(buckets[0].first_slot, buckets[-1].last_slot):
        slot = layout.slots[i]
        p = parameters[i]
        become(p, unit.flat[slot.start - start : slot.stop - start].view(p.shape))
    unit.free()  # only now: views cannot be made of a storage of no bytes


@torch.no_grad()
def fill(
    out: torch.Tensor, parameter: nn.Parameter, start: int, draw: Draw | None
) -> None:
    """Elements [start, start + len(out)) of the flattened parameter; drawn if it is on the meta device."""
    if not parameter.is_meta:
        out.copy_(parameter.detach().reshape(-1)[start : start + out.numel()])
    else:
        assert draw is not None, (
            f"{spec_of(parameter).name} is on the meta device and there is no `draw`"
        )
        draw(spec_of(parameter), start, out)


def become(parameter: nn.Parameter, view: torch.Tensor) -> None:
    """Make the parameter a view of `view`; it keeps a version counter of its own."""
    if not parameter.is_meta:
        parameter.data = view
        return
    # .data: a version counter of its own.
    real = nn.Parameter(view.data, requires_grad=parameter.requires_grad)
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)
