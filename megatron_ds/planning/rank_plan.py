"""What one rank holds, keeps and sends in a step, as integers, from the config and modules without memory.

The same functions that lay out the state of a real run (`zero.sets`), predict its bytes (`zero.memory`, `zero.traffic`) and
what a micro-batch keeps (`activations`) are asked here, for any rank of any world.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from ..config import RunConfig
from ..mpu.fake_group import fake_group
from ..mpu.grid import Grid
from ..mpu.param_spec import DATA_AXES
from ..mpu.traffic import Traffic
from ..optim import OPTIMIZERS
from ..pipeline.instruction import Op, Program
from ..pipeline.passes import RECEIVES
from ..pipeline.simulate import Simulation
from ..zero.buffer_pool import UNDER_WAY
from ..zero.data_groups import Hierarchy
from ..zero.gathering import LayerGathering
from ..zero.layer_plan import LayerPlan
from ..zero.layout import SlotPiece
from ..zero.prediction import ZeroMemory, predict_places, predict_sets
from ..zero.set_plan import SHARED, Fact, SetPlan, plan_sets
from ..zero.settings import policy_of
from ..zero.shard_optimizer import InnerOptimizer, make_leaf
from ..zero.traffic import CountedUnit, foresee_gathers, predict_traffic
from .activations import at_work, kept_by_stage, most_kept, workload_of
from .fake_stages import ImaginedStage
from .gather_budget import gradient_buffers
from .run_model import DTYPES, boundary_shape, bucket_elements, objective_terms
from .run_plan import moments_of

NORM_BYTES = 4 * 8, 3 * 8                             # fp64: `grad_norm.sum_over_ranks`, data and model group


def report_bytes(terms: Sequence[str]) -> int:
    """Of the message that `training.report.share` sends: four numbers in fp64, and two for each of the terms."""
    return 8 * (4 + 2 * len(terms))


@dataclass(frozen=True)
class Place:
    """Where a rank stands, as far as it matters for what it holds."""

    rank: int
    at: dict[str, int]
    data: Hierarchy
    tp: int
    holders: int            # of tied parameters that this rank holds
    model: int
    world: int


@dataclass(frozen=True)
class RankPlan:
    """Bytes of one rank.

    parameters  elements, of this rank's modules
    state       weights, gradients, masters and moments;  away: of it, by place, what is not on the device
    buffers     gradients that fill up or travel, layers that are whole for a while, hidden states on their way
    kept        activations that micro-batches keep, at the worst moment;  kept_each: by one of them, of all stages here
    at_work     what the layer at work needs beside them, roughly
    """

    rank: int
    stages: tuple[int, ...]
    parameters: int
    state: ZeroMemory
    away: dict[str, int]
    buffers: int
    kept: int
    kept_each: int
    at_work: int
    traffic: Traffic

    @property
    def peak(self) -> int:
        """On the device."""
        return self.state.total - sum(self.away.values()) + self.buffers + self.kept + self.at_work


def place_of(config: RunConfig, grid: Grid, rank: int, placement: Sequence[int]) -> Place:
    """placement: stage → pipeline rank."""
    at, inner_size = grid.coordinates(rank), config.zero.zero_hpz_partition_size
    size, data_rank = grid.size("dp", "cp"), grid.group_of(rank, "dp", "cp").index(rank)
    data = fake_group("dp-cp", size, data_rank)
    ranks = Hierarchy.flat(data)
    if inner_size > 1:
        o, i = divmod(data_rank, inner_size)
        inner = data if inner_size == size else fake_group("dp-cp-inner", inner_size, i)
        ranks = Hierarchy(data, inner, fake_group("dp-cp-outer", size // inner_size, o))
    ends = {placement[0], placement[-1]}
    holders = len(ends) if at["pp"] in ends else 1
    return Place(rank, at, ranks, grid.tp, holders, grid.size("tp", "pp"), grid.world_size)


def plan_rank(config: RunConfig, place: Place, stages: Sequence[ImaginedStage], program: Program, microbatches: int,
              device: str) -> RankPlan:
    """stages: of this rank. program: its own, lowered, for so many micro-batches."""
    parameters = list(dict.fromkeys(p for stage in stages for p in stage.parameters))
    plans = plan_state(config, place, stages, parameters)
    dtype, zero, data = DTYPES[config.optimizer.params_dtype], config.zero, place.data.data
    sizes = dict(parameter_bytes=dtype.itemsize, state_tensors=state_tensors(config),
                 gradient_bytes=DTYPES[config.optimizer.gradient_dtype].itemsize)
    places = predict_places(
        plans, data.rank, 0, optimizer=_place(zero.offload_optimizer), parameters=_place(zero.offload_param),
        ratio=zero.offload_optimizer_ratio, sub_group_elements=zero.sub_group_size, **sizes)
    gathers, whole = _gathers(config, plans, stages, parameters, program)
    traffic = _state_traffic(config, place, plans, parameters, gathers, microbatches)
    for stage in stages:
        traffic.add_all(stage.traffic, microbatches)
    _add_sends(traffic, config, program)
    work, train = workload_of(config, device), config.train
    kept = {stage.index: kept_by_stage(work, stage.kinds, train.recompute_granularity, train.recompute_num_layers)
            for stage in stages}
    buffers = whole * dtype.itemsize + _gradient_buffers(config, plans, data.size) + _messages(config, program)
    return RankPlan(place.rank, tuple(kept), sum(p.numel() for p in parameters), predict_sets(plans, data.rank, 0, **sizes),
                    {where: count for where, count in places.items() if where != "device"}, buffers,
                    most_kept(program, kept), sum(kept.values()),
                    max(at_work(work, stage.kinds, train.recompute_granularity) for stage in stages), traffic)


def plan_state(config: RunConfig, place: Place, stages: Sequence[ImaginedStage],
               parameters: Sequence[nn.Parameter]) -> tuple[SetPlan, ...]:
    """The sets that `ZeroOptimizer` would make of these parameters."""
    zero, data = config.zero, place.data
    places: dict[nn.Parameter, tuple[int, int]] = {}
    for stage in stages:
        places |= {p: (SHARED if p in places else stage.index, 0) for p in stage.parameters}
    if zero.stage == 3:
        layers = {stage.index: [list(module.parameters()) for module in stage.modules] for stage in stages}
        places |= LayerPlan(layers).places()
    facts = [Fact(p.spec.name, p.numel(), str(p.dtype), p.spec.reduced_over != DATA_AXES, _is_tied(p, place), False,
                  *places[p]) for p in parameters]
    return plan_sets(facts, policy_of(zero.stage, zero.zero_hpz_partition_size), data_shards=data.data.size,
                     expert_shards=data.data.size, bucket_elements=bucket_elements(zero, sum(p.numel() for p in parameters)),
                     persistence=zero.param_persistence_threshold, gather_alone=zero.offload_param != "none",
                     inner_shards=data.inner.size if zero.zero_hpz_partition_size > 1 else None)


@cache
def _state_tensors(name: str, settings) -> int:
    leaf = make_leaf(_Spec(), SlotPiece(0, 0, 64, 0, 0, 64), torch.zeros(64), torch.zeros(64))
    inner = InnerOptimizer(lambda groups: OPTIMIZERS[name](groups, settings=settings), [leaf])
    return len(list(inner.state_of(leaf)))


class _Spec:
    decay = True


def state_tensors(config: RunConfig) -> int:
    """fp32 numbers that the optimizer keeps for each weight: asked of the optimizer itself."""
    return _state_tensors(config.optimizer.optimizer, config.optimizer)


def _is_tied(p: nn.Parameter, place: Place) -> bool:
    return p.spec.tied is not None and place.holders > 1


def _place(where: str) -> str:
    return "device" if where == "none" else where


def _gathers(config: RunConfig, plans: Sequence[SetPlan], stages: Sequence[ImaginedStage], parameters: Sequence[nn.Parameter],
             program: Program) -> tuple[list[list[int]], int]:
    """(for each plan, how often each of its units is gathered; the most elements that are whole at a time)."""
    units = [[CountedUnit(_numel(plan, i)) for i in range(len(plan.units))] for plan in plans]
    unit_of = {parameters[member]: its_units[i] for plan, its_units in zip(plans, units)
               for member, slot in zip(plan.members, plan.layout.slots)
               for i, (_, first, stop) in enumerate(plan.units) if first <= slot.bucket < stop}
    if not unit_of:
        return units, 0
    gatherings = {}
    for stage in stages:
        needs = [list(dict.fromkeys(unit_of[p] for p in module.parameters() if p in unit_of)) for module in stage.modules]
        read = [needed if getattr(module, "weights_read_in_backward", True) else []
                for module, needed in zip(stage.modules, needs)]
        gatherings[stage.index] = LayerGathering(needs, read, config.zero.prefetch_bucket_size, stage=stage.index)
    counts, whole = foresee_gathers(gatherings, moments_of(program))
    return [[counts[unit] for unit in its_units] for its_units in units], whole


def _numel(plan: SetPlan, unit: int) -> int:
    _, first, stop = plan.units[unit]
    return plan.layout.buckets[stop - 1].stop - plan.layout.buckets[first].start


def _state_traffic(config: RunConfig, place: Place, plans: Sequence[SetPlan], parameters: Sequence[nn.Parameter],
                   gathers: Sequence[Sequence[int]], microbatches: int) -> Traffic:
    """Of gradients, weights, tied and partial gradients, the norm and the report."""
    o, zero, ranks = config.optimizer, config.zero, place.data
    gradient, sent = DTYPES[o.gradient_dtype].itemsize, DTYPES.get(zero.sent_dtype, DTYPES[o.gradient_dtype]).itemsize
    traffic = predict_traffic(plans, [ranks] * len(plans), gathers, microbatches=microbatches,
                              reduce_each=zero.stage >= 2 and zero.zero_accumulate == "sharded",
                              parameter_bytes=DTYPES[o.params_dtype].itemsize, gradient_bytes=sent)
    for plan in plans:
        pieces = plan.layout.slot_intersections(ranks.shard) if plan.policy.optimizer else plan.layout.whole_slots()
        member = lambda slot, plan=plan: parameters[plan.members[slot]]
        partial = sum(piece.padded_numel for piece in pieces if "tp" in member(piece.slot).spec.partial_over)
        if partial and place.tp > 1:
            traffic.add("all_reduce", "tp", place.tp, partial * gradient)
        for i, slot in enumerate(plan.layout.slots):
            if _is_tied(member(i), place):
                numel = slot.numel
                if plan.policy.gradient is not None:
                    piece = plan.layout.shard_pieces(ranks.shard)[slot.bucket]
                    numel = piece.stop - piece.start
                traffic.add("all_reduce", "embd", place.holders, numel * gradient)
    for axes, size, num_bytes in (("dp-cp", ranks.data.size, NORM_BYTES[0]), ("tp-pp", place.model, NORM_BYTES[1]),
                                  ("tp-cp-dp-pp", place.world, report_bytes(objective_terms(config)))):
        if size > 1:
            traffic.add("all_reduce", axes, size, num_bytes)
    return traffic


def _hidden_bytes(config: RunConfig) -> int:
    return torch.Size(boundary_shape(config)).numel() * DTYPES[config.optimizer.params_dtype].itemsize


def _add_sends(traffic: Traffic, config: RunConfig, program: Program) -> None:
    count = sum(i.op in (Op.SEND_ACT, Op.SEND_GRAD) for i in program)
    if count:
        traffic.add("send", "pp", config.parallel.pipeline_model_parallel_size, count * _hidden_bytes(config), count)


def _messages(config: RunConfig, program: Program) -> int:
    """Bytes of receives that are posted, and of a message each way that has not left yet."""
    sends = {i.op for i in program} & {Op.SEND_ACT, Op.SEND_GRAD}
    receives = Simulation((program,), (), ()).peak_receives[0] if any(i.op in RECEIVES for i in program) else 0
    return (receives + len(sends)) * _hidden_bytes(config)


def _gradient_buffers(config: RunConfig, plans: Sequence[SetPlan], data_size: int) -> int:
    """Bytes of whole buckets in which gradients fill up, where only shards are kept; and of those in which they travel."""
    o, zero = config.optimizer, config.zero
    lengths = lambda plan: ([_numel(plan, unit) for unit in range(len(plan.units))] if plan.units else
                            [bucket.stop - bucket.start for bucket in plan.layout.buckets])
    filling = [length for plan in plans if plan.policy.gradient for length in lengths(plan)]
    total = gradient_buffers(filling, UNDER_WAY, kept_whole=zero.zero_accumulate == "full",
                             gradient_bytes=DTYPES[o.gradient_dtype].itemsize)
    if zero.sent_dtype not in (None, o.gradient_dtype) and data_size > 1:
        total += (UNDER_WAY + 1) * max(bucket.stop - bucket.start for plan in plans for bucket in plan.layout.buckets) \
            * DTYPES[zero.sent_dtype].itemsize
    return total
