"""`ParameterSet`: one set of parameters with its memory: weights, gradients, and the leaves that optimizers
update.

A leaf is the fp32 master of a piece. In an fp32 model it is the weight itself; in a 16-bit model it is in a
buffer of its own, on the device or, with its moments, in the tier that they are offloaded to.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..host.large_pages import huge_page_zeros
from ..mpu.collectives import all_reduce_
from ..mpu.group import Group, solo
from ..mpu.managed_parameter import spec_of
from .buckets import GradBuckets, GradientStore, Holder, Reduction
from .data_groups import DataGroups, Hierarchy
from .exchange import BufferPool, GradientExchange
from .layout import SlotPiece
from .norm import is_counted, norm_views
from .offloaded import OffloadedLeaves
from .param_store import Draw, ParameterStore, WholeParameters
from .set_plan import ParameterUse, SetPlan, is_tied
from .settings import ZeroSettings
from .shard_optimizer import Leaf, make_leaf
from .tiers import Tiers

if TYPE_CHECKING:
    from .gradient_checksum import GradientChecksum
    from .offload import SubGroup
    from .sub_groups import SubGroupPlan


@dataclass(frozen=True)
class ParameterSet:
    """The parameters of a set with their weights, gradients and optimizer state.

    parameters  in the order of the buffer
    buckets     None if frozen
    masters     of resident leaves, in a 16-bit model
    resident    leaves that are updated on the device
    sub_groups  offloaded leaves
    norm_views  the gradients of this rank's shard that count in the norm
    padding     elements of norm_views that belong to no parameter, and are always zero
    """

    plan: SetPlan
    parameters: list[nn.Parameter]
    store: ParameterStore
    buckets: GradientStore | None
    masters: torch.Tensor | None
    resident: list[Leaf]
    sub_groups: "list[SubGroup]"
    norm_views: list[torch.Tensor]
    padding: int = 0

    @property
    def gradients(self) -> GradientStore:
        """The gradients of a set that is trained."""
        assert self.buckets is not None, "a frozen set has no gradients"
        return self.buckets

    @property
    def leaves(self) -> Iterator[Leaf]:
        """All leaves of this rank, in a fixed order."""
        for group in self.sub_groups:
            yield from group.leaves
        yield from self.resident

    def master_bytes(self) -> int:
        """Bytes of masters in all tiers."""
        resident = 0 if self.masters is None else self.masters.nbytes
        return resident + sum(group.state_bytes()[0] for group in self.sub_groups)


@dataclass(frozen=True)
class SetMaker:
    """What all sets of a rank are made with. pool: buffers in which sharded gradients fill up."""

    settings: ZeroSettings
    groups: DataGroups
    use: ParameterUse
    draw: Draw | None
    pool: BufferPool
    exchange: GradientExchange
    tiers: Tiers
    update: OffloadedLeaves
    checksum: "GradientChecksum | None" = None

    @property
    def device(self) -> torch.device:
        """The device of state that is not offloaded."""
        return self.pool.device

    def make(self, plan: SetPlan, everything: Sequence[nn.Parameter]) -> ParameterSet:
        """Make the set of a plan. everything: the parameters to which the indices in the plan refer."""
        parameters = [everything[i] for i in plan.members]
        ranks = self.groups.ranks_of(plan.reduced_over)
        store = self._store(plan, parameters)
        if plan.encoded:
            return ParameterSet(plan, parameters, store, None, None, [], [], [])
        if plan.frozen:
            masters, resident = self._resident(
                store, None, plan, parameters, store.pieces
            )
            return ParameterSet(
                plan, parameters, store, None, masters, resident, [], []
            )
        # Masters: the first part of them in an offload tier, the rest on the device.
        buckets = self._buckets(plan, parameters)
        away, stay = self._divided(plan, store)
        masters, resident = self._resident(store, buckets, plan, parameters, stay)
        sub_groups = [
            self._sub_group(group_plan, store, buckets, parameters)
            for group_plan in away
        ]
        # What this rank adds to the norm of the gradient.
        counted = [
            p
            for p in plan.layout.slot_intersections(ranks.shard)
            if is_counted(spec_of(parameters[p.slot]), self.groups)
        ]
        views = norm_views(buckets.flat, counted, buckets.start_of)
        padding = sum(p.padded_numel - (p.stop - p.start) for p in counted)
        return ParameterSet(
            plan,
            parameters,
            store,
            buckets,
            masters,
            resident,
            sub_groups,
            views,
            padding,
        )

    def _store(self, plan: SetPlan, parameters: list[nn.Parameter]) -> ParameterStore:
        ranks = self.groups.ranks_of(plan.reduced_over)
        if not plan.units:
            sharded = plan.policy.optimizer is not None
            return WholeParameters(
                parameters, plan.layout, ranks, sharded, self.device, self.draw
            )
        # The modules of other stores are loaded by the runs that have them.
        units = plan.units
        if plan.blocks is None:
            from .sharded_parameters import ShardedParameters

            tier = self.tiers.parameters
            return ShardedParameters(
                parameters, plan.layout, ranks, units, self.device, tier, self.draw
            )
        # In codes: those of frozen weights alone, or beside what an update writes.
        format = self.device, plan.blocks, self.draw
        if plan.encoded:
            from .encoded_parameters import EncodedParameters

            if plan.policy.parameter is None:
                ranks = Hierarchy.flat(solo())
            return EncodedParameters(parameters, plan.layout, ranks, units, *format)
        from .quantized_parameters import QuantizedParameters

        return QuantizedParameters(parameters, plan.layout, ranks, units, *format)

    def _buckets(
        self, plan: SetPlan, parameters: Sequence[nn.Parameter]
    ) -> GradientStore:
        whole = plan.policy.gradient is None
        places = self.use.places()
        counts = self.use.counts
        # A tied parameter's whole gradient is complete after its stages have summed it: one more
        # contribution.
        holders = [
            Holder(
                p,
                counts.get(p, 1) + (whole and is_tied(p, self.groups)),
                places.get(p, (None, 0))[0],
            )
            for p in parameters
        ]
        reduction = Reduction(
            self.groups.ranks_of(plan.reduced_over),
            self.groups.dividing(plan.reduced_over),
            self.exchange,
            self._overlaps(plan, parameters),
            self.checksum,
        )
        if whole:
            return GradBuckets(
                holders,
                plan.layout,
                reduction,
                sharded=plan.policy.optimizer is not None,
                stays_whole=self.settings.update_rule.keeps_gradients,
                dtype=self.pool.dtype,
            )
        from .grad_shards import GradShards  # ZeRO 2 and 3

        return GradShards(holders, plan.layout, reduction, pool=self.pool)

    def _overlaps(self, plan: SetPlan, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether a bucket is reduced as soon as its contributions have arrived.

        Not of experts with parameters of their own: one without tokens gets no gradient. Ranks would start
        its reduction at different times, and a rank that waits for it would not reach the all-to-all for
        which another rank waits. The weights of all experts of a layer, in one parameter, always get one.
        Not of whole gradients of a group of one where others would be sharded: it is armed before each
        micro-batch and has nothing to reduce. Not of sharded parameters: gathers are interleaved, so
        reductions start when a layer is left, in the same order on all ranks.
        """
        policy = self.settings.policy
        off = policy.gradient if plan.policy.gradient is None else policy.parameter
        may_lack = any("ep" in spec_of(p).distinct_over for p in parameters)
        return self.settings.overlap and off is None and not may_lack

    def _resident(
        self,
        store: ParameterStore,
        buckets: GradientStore | None,
        plan: SetPlan,
        parameters: Sequence[nn.Parameter],
        pieces: Sequence[SlotPiece],
    ) -> tuple[torch.Tensor | None, list[Leaf]]:
        # fp32 masters of 16-bit weights, in one buffer; fp32 weights are their own masters.
        values = [store.values_of(piece) for piece in pieces]
        lows: list[torch.Tensor | None] = [None] * len(pieces)
        masters = None
        settings = self.settings
        is_wide = bool(values) and values[0].dtype == torch.float32
        needs_masters = not is_wide or settings.update_rule.keeps_masters
        if plan.frozen and not settings.frozen_masters:
            needs_masters = False
        if values and needs_masters:
            weights = values
            masters = huge_page_zeros(
                sum(v.numel() for v in weights), device=self.device
            )
            values = list(masters.split([v.numel() for v in weights]))
            for master, weight in zip(values, weights):
                master.copy_(weight)
            lows = [*weights]
        # The optimizer's tensors: one for each piece of a parameter in this rank's shard.
        leaves = []
        for piece, value, low in zip(pieces, values, lows):
            p = parameters[piece.slot]
            grad = None if buckets is None else buckets.grad_of(piece)
            leaves.append(
                make_leaf(
                    spec_of(p),
                    piece,
                    value,
                    grad,
                    low,
                    tuple(p.shape) if plan.whole else None,
                )
            )
        return masters, leaves

    def _divided(
        self, plan: SetPlan, store: ParameterStore
    ) -> "tuple[Sequence[SubGroupPlan], Sequence[SlotPiece]]":
        """Return (sub-groups whose masters are in an offload tier, pieces whose masters are on the device)."""
        if self.tiers.optimizer is None:
            return (), store.pieces
        from .sub_groups import plan_sub_groups

        offload = self.settings.offload
        return plan_sub_groups(
            plan.layout, store.pieces, offload.sub_group_elements, offload.ratio
        )

    def _sub_group(
        self,
        plan: "SubGroupPlan",
        store: ParameterStore,
        buckets: GradientStore,
        parameters: Sequence[nn.Parameter],
    ) -> "SubGroup":
        tier = self.tiers.optimizer
        assert tier is not None, "only offloaded leaves are in sub-groups"
        specs = [spec_of(p) for p in parameters]
        return self.update.add(
            plan, store, buckets, specs, self.settings.param_groups, tier
        )


class TiedGradients:
    """The sum, once a step, of gradients of parameters that several pipeline stages hold."""

    def __init__(self, sets: Iterable[ParameterSet], groups: DataGroups):
        tied = []
        for s in sets:
            holders = () if s.buckets is None else s.buckets.holders
            for i, h in enumerate(holders):
                if is_tied(h.parameter, groups):
                    tied.append((s, i, h))
        # In the order of their keys, which is the same on all stages that hold them.
        self._holders = sorted(
            tied, key=lambda entry: str(spec_of(entry[2].parameter).tied)
        )
        self._group: Group = groups.tied
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._waiting = self._holders

    def reduce(self, stage: int | None = None) -> None:
        """Sum those of a stage (None: all) that are not summed yet, after all backwards. Collective."""
        waiting = self._waiting
        self._waiting = []
        for s, i, holder in waiting:
            if stage is not None and holder.stage not in (None, stage):
                self._waiting.append((s, i, holder))
            elif s.plan.policy.gradient is None:
                s.gradients.gradients[i].contribute(self._sum_over_stages)
            else:  # each in a bucket of its own, so that all holders have the same shards
                s.gradients.finish()
                piece = s.plan.layout.shard_pieces(s.gradients.ranks.shard)[
                    s.plan.layout.slots[i].bucket
                ]
                all_reduce_(
                    s.gradients.flat[
                        piece.offset : piece.offset + piece.stop - piece.start
                    ],
                    self._group,
                )

    def _sum_over_stages(self, gradient: torch.Tensor, overwrites: bool) -> None:
        if overwrites:
            gradient.zero_()
        all_reduce_(gradient.view(-1), self._group)
