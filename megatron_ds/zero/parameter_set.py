"""`ParameterSet`: one set of parameters made real: its weights, gradients, and the leaves that the optimizer updates.

A leaf is the fp32 master of a piece. In an fp32 model that is the weight itself; in a 16-bit model it lies in a buffer of its
own, on the device or, with its moments, in the home that they were offloaded to.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..host.memory_maps import huge_page_zeros
from ..mpu.group import Group
from ..mpu.param_spec import ParamSpec
from .buckets import GradBuckets, Holder
from .buffer_pool import BufferPool
from .data_groups import Hierarchy
from .exchange import GradCommunication
from .grad_shards import GradShards
from .layout import SlotPiece
from .norm import is_counted, norm_views
from .offload import GRAD, LOW, MASTER, Offload, OffloadedUpdate, SubGroup
from .param_store import ParamStore
from .set_plan import SetPlan
from .shard_optimizer import Leaf, MakeOptimizer, make_leaf
from .sub_groups import plan_places
from .tiers import InMemory, MemoryHome
from .units import Draw, ShardedParams


@dataclass(frozen=True)
class ParameterSet:
    """parameters: in the order of the buffer. buckets: None where frozen. masters: of resident leaves in a 16-bit model.

    resident    leaves updated on the device
    sub_groups  the offloaded ones
    counted     of this rank's shard, the pieces that count in the norm
    """

    plan: SetPlan
    parameters: list[nn.Parameter]
    store: ParamStore | ShardedParams
    buckets: GradBuckets | GradShards | None
    masters: torch.Tensor | None
    resident: list[Leaf]
    sub_groups: list[SubGroup]
    counted: list[SlotPiece]
    norm_views: list[torch.Tensor]

    @property
    def leaves(self) -> Iterator[Leaf]:
        for group in self.sub_groups:
            yield from group.leaves
        yield from self.resident

    def lend_grads(self) -> None:
        """Gradients of another dtype than the masters': an fp32 copy for the update."""
        if self._grads_are_narrow():
            for leaf in self.resident:
                leaf.tensor.grad = self.buckets.grad_of(leaf.piece).float()

    def drop_grads(self) -> None:
        if self._grads_are_narrow():
            for leaf in self.resident:
                leaf.tensor.grad = None

    def master_bytes(self) -> int:
        resident = 0 if self.masters is None else self.masters.nbytes
        return resident + sum(group.state_bytes()[0] for group in self.sub_groups)

    def _grads_are_narrow(self) -> bool:
        return self.buckets is not None and self.buckets.flat.dtype != torch.float32


@dataclass(frozen=True)
class SetMaker:
    """What all sets of a rank are made with; see `ZeroOptimizer`."""

    uses: Mapping[nn.Parameter, int]
    tp: Group
    device: torch.device
    draw: Draw | None
    # Not of experts: one without tokens gets no gradient. Ranks would start its reduction at different times, and a rank that
    # waits for it would not come to the all-to-all that another rank waits for.
    overlap_whole: bool             # whole gradients are reduced as soon as their contributions have come
    overlap_shards: bool            # and gradients of which shards are kept
    pool: BufferPool
    communication: GradCommunication
    offload: Offload
    make_optimizer: MakeOptimizer
    update: OffloadedUpdate

    def make(self, plan: SetPlan, parameters: list[nn.Parameter], stages: Sequence[int | None], awaits_tie: Sequence[bool],
             ranks: Hierarchy) -> ParameterSet:
        """stages, awaits_tie: of each parameter. ranks: its data-parallel ones."""
        store = self._store(plan, parameters, ranks)
        specs = [p.spec for p in parameters]
        if plan.frozen:
            masters, resident = self._resident(store, None, specs, store.pieces)
            return ParameterSet(plan, parameters, store, None, masters, resident, [], [], [])
        # A tied parameter's whole gradient is complete after its stages have summed it.
        holders = [Holder(p, self.uses.get(p, 1) + (plan.policy.gradient is None and tied), stage)
                   for p, stage, tied in zip(parameters, stages, awaits_tie)]
        buckets = self._buckets(plan, holders, ranks)
        ratio = self.offload.ratio if self.offload.optimizer else 0.0
        away, stay = plan_places(plan.layout, store.pieces, self.offload.sub_group_elements, ratio)
        masters, resident = self._resident(store, buckets, specs, stay)
        sub_groups = [self._sub_group(group_plan, store, buckets, specs) for group_plan in away]
        counted = [p for p in plan.layout.slot_intersections(ranks.shard) if is_counted(specs[p.slot], self.tp.rank)]
        views = norm_views(buckets.flat, counted, buckets.start_of)
        return ParameterSet(plan, parameters, store, buckets, masters, resident, sub_groups, counted, views)

    def _store(self, plan: SetPlan, parameters: list[nn.Parameter], ranks: Hierarchy) -> ParamStore | ShardedParams:
        if not plan.units:
            return ParamStore(parameters, plan.layout, ranks, plan.policy.optimizer is not None, self.device, self.draw)
        home = self.offload.parameters or MemoryHome(self.device)
        return ShardedParams(parameters, plan.layout, ranks, plan.units, self.device, home, self.draw)

    def _buckets(self, plan: SetPlan, holders: list[Holder], ranks: Hierarchy) -> GradBuckets | GradShards:
        common = dict(ranks=ranks, tp=self.tp, communication=self.communication)
        if plan.policy.gradient is None:
            return GradBuckets(holders, plan.layout, sharded=plan.policy.optimizer is not None,
                               overlap=self.overlap_whole and not plan.expert, dtype=self.pool.dtype, **common)
        return GradShards(holders, plan.layout, pool=self.pool, overlap=self.overlap_shards and not plan.expert, **common)

    def _resident(self, store, buckets, specs: Sequence[ParamSpec],
                  pieces: Sequence[SlotPiece]) -> tuple[torch.Tensor | None, list[Leaf]]:
        values = [store.values_of(piece) for piece in pieces]
        lows, masters = [None] * len(pieces), None
        if values and values[0].dtype != torch.float32:
            lows, masters = values, huge_page_zeros(sum(v.numel() for v in values), device=self.device)
            values = list(masters.split([v.numel() for v in lows]))
            for master, low in zip(values, lows):
                master.copy_(low)
        grads = [None if buckets is None else buckets.grad_of(piece) for piece in pieces]
        return masters, [make_leaf(specs[piece.slot], piece, *tensors) for piece, *tensors in zip(pieces, values, grads, lows)]

    def _sub_group(self, plan, store, buckets, specs: Sequence[ParamSpec]) -> SubGroup:
        first, numel, home = plan.pieces[0], plan.numel, self.offload.optimizer
        weights, start = store.array_of(first, numel), buckets.start_of(first)
        arrays = {MASTER: weights, GRAD: InMemory(buckets.flat[start:start + numel])}
        if weights.tensor.dtype != torch.float32:
            [arrays[MASTER]] = home.arrays([numel], torch.float32)
            arrays[LOW] = weights
            buffer = self.update.buffers.get(MASTER, arrays[MASTER].padded_numel, torch.float32)
            buffer[:numel].copy_(weights.tensor)
            arrays[MASTER].write(buffer).wait()
        group = SubGroup(plan, specs, arrays, home, self.make_optimizer, self.update.buffers)
        self.update.groups.append(group)
        return group
