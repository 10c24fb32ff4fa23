"""`RankPlan`: the bytes that one rank holds and sends in a step, from the configuration and modules without
memory.

The same functions compute the layout of the state (`zero.set_plan`) and its bytes (`zero.prediction`) in a
real run; here they are called for any rank of a world of any size. Activations come from `fake_stages`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

import torch
from torch import nn

from ..config import RunConfig
from ..moe.balance import balances_of
from ..mpu.fake_group import fake_group
from ..mpu.grid import Grid
from ..mpu.group import Group, Traffic, solo
from ..mpu.managed_parameter import spec_of
from ..mpu.param_spec import DATA_AXES, EXPERT_DATA_AXES, Init, Matrices, ParamSpec
from ..optim import MakeOptimizer, ParamGroup, group_of
from ..pipeline.executor import program_length
from ..pipeline.instruction import SENDS, Program
from ..zero.data_groups import DataGroups
from ..zero.gather_counts import CountedUnit, count_gathers
from ..zero.gathering import gathering_over, units_by_parameter
from ..zero.layout import SlotPiece
from ..zero.matrix_owners import MatrixEntry
from ..zero.memory import ZeroMemory
from ..zero.norm import DATA_BYTES, MODEL_BYTES
from ..zero.norm_entries import norm_entries
from ..zero.parameter_norms import NormEntry, ParameterNorms
from ..zero.prediction import ElementBytes, predict_places, predict_sets
from ..zero.set_plan import ParameterUse, SetPlan, is_tied, plan_parameters
from ..zero.settings import ZeroSettings
from ..zero.shard_optimizer import ShardOptimizer, make_leaf
from ..zero.traffic import predict_traffic
from ..zero.whole_matrices import WholeMatrices, whole_matrices
from .fake_stages import FakeStage, most_kept
from .gradient_memory import fillings_of, gradient_buffers
from .run_model import DTYPES, boundary_shape
from .run_plan import moments_of
from .update_memory import bytes_of_update


@dataclass(frozen=True)
class RankPlan:
    """Bytes of one rank.

    parameters  elements of this rank's modules; of_experts: those of experts among them
    state       weights, gradients, masters and moments
    away        the part of `state` that is not on the device, by place
    buffers     gradients that accumulate or are sent, gathered layers and what their decoding takes, hidden
                states sent or received
    kept        activations that micro-batches keep, at the maximum; kept_each: of one, on all stages
    at_work     estimate of what the running layer needs in addition
    reserved    what torch's CUDA allocator reserves for `kept`, if it starts without freed blocks
    in_host     activations in host memory, at the maximum; not in `kept` and not in `peak`
    in_update   what optimizers of matrices need during an update (update_memory.py)
    gathered    the part of `buffers` that holds gathered layers
    copied      host memory for the state that --async-save writes, at most: each of the ranks that hold the
                same content writes a part of it
    beside      what the objective holds beside the model for the whole step, such as a second model; before: most of
                what it needs for a time, before the forward of the model
    is_host     the device is the host's processor, so that `copied` is in `peak`
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
    of_experts: int = 0
    reserved: int = 0
    in_host: int = 0
    in_update: int = 0
    gathered: int = 0
    copied: int = 0
    beside: int = 0
    before: int = 0
    is_host: bool = False

    @property
    def peak(self) -> int:
        """Estimate of the maximum on the device. During the update there are no activations."""
        at_most = max(self.kept + self.at_work, self.in_update, self.before)
        at_most += self.copied if self.is_host else 0
        held = self.state.total - sum(self.away.values()) + self.beside
        return held + self.buffers + at_most


def data_groups(
    config: RunConfig, grid: Grid, rank: int, placement: Sequence[int]
) -> DataGroups:
    """Return the mapping groups without transports, by which state is divided. placement: stage → pipeline rank"""
    at = grid.coordinates(rank)
    inner_size = config.zero.zero_hpz_partition_size
    size = grid.size("dp", "cp")
    data_rank = grid.group_of(rank, "dp", "cp").index(rank)
    data = fake_group("dp-cp", size, data_rank)
    inner = None
    outer = None
    if inner_size > 1:
        o, i = divmod(data_rank, inner_size)
        inner = data if inner_size == size else fake_group("dp-cp-inner", inner_size, i)
        outer = fake_group("dp-cp-outer", size // inner_size, o)
    experts = fake_group(
        "edp", grid.size("edp"), grid.group_of(rank, "edp").index(rank)
    )
    # Ranks that divide an expert, and those that hold a tied embedding.
    [axis] = grid.known(("etp",))
    of_expert = fake_group(axis, grid.etp, at["etp"])
    ends = {placement[0], placement[-1]}
    holders = len(ends) if at["pp"] in ends else 1
    return DataGroups(
        {DATA_AXES: data, EXPERT_DATA_AXES: experts},
        fake_group("tp", grid.tp, at["tp"]),
        fake_group("tp-pp", grid.size("tp", "pp"), 0),
        fake_group("embd", holders, 0),
        inner,
        outer,
        etp=of_expert,
    )


def plan_rank(
    config: RunConfig,
    rank: int,
    groups: DataGroups,
    stages: Sequence[FakeStage],
    program: Program,
    messages_held: int,
    num_metrics: int,
    device: str,
) -> RankPlan:
    """Return the memory and the traffic of one rank.

    groups         from `data_groups`
    stages         of this rank
    program        of this rank with transfers and collectives
    messages_held  `Simulation.peak_messages` of the rank
    num_metrics    names in the ledgers of all stages
    device         planned, "cpu" or "cuda"
    """
    # `ZeroOptimizer` makes the same sets of the parameters.
    parameters = list(dict.fromkeys(p for stage in stages for p in stage.parameters))
    settings = ZeroSettings.from_config(config)
    use = ParameterUse.of_stages({stage.index: list(stage.modules) for stage in stages})
    plans = plan_parameters(parameters, settings, groups, use)
    # Offloaded state is predicted apart, since it takes no memory of the device.
    sizes = _element_bytes(config, settings, parameters)
    state = predict_sets(plans, groups.rank_by_axes, sizes)
    places = predict_places(plans, groups.rank_by_axes, sizes, settings.offload)
    gathers, whole = gathers_of(config, plans, use, parameters, program)
    # Each part of the traffic is added to one sum.
    microbatches = program_length(program)
    traffic = state_traffic(
        config, settings, groups, plans, parameters, gathers, microbatches
    )
    _add_optimizers(traffic, plans, parameters, settings, groups)
    _add_sums(traffic, config, groups, stages, num_metrics)
    message = torch.Size(boundary_shape(config)).numel() * sizes.parameter
    _add_stages(traffic, config, stages, program, message)
    # All buffers may be in use at the same time.
    gathered = whole * sizes.parameter
    buffers = gathered + _bytes_received(config, settings, whole)
    buffers += _bytes_of_decoding(plans)
    buffers += _gradient_buffers(
        config, settings, plans, parameters, use, groups, microbatches
    )
    buffers += messages_held * message
    of_experts = [p for p in parameters if spec_of(p).reduced_over == EXPERT_DATA_AXES]
    return RankPlan(
        rank=rank,
        stages=tuple(stage.index for stage in stages),
        parameters=sum(p.numel() for p in parameters),
        state=state,
        away={where: count for where, count in places.items() if where != "device"},
        buffers=buffers,
        traffic=traffic,
        of_experts=sum(p.numel() for p in of_experts),
        in_update=bytes_of_update(plans, parameters, settings, groups, device),
        gathered=gathered,
        copied=_most_copied(config, state),
        is_host=device == "cpu",
        **_activations(stages, program),
    )


def _activations(stages: Sequence[FakeStage], program: Program) -> dict[str, int]:
    """Return the fields of `RankPlan` about activations; the program keeps those of several micro-batches."""
    runs = {stage.index: stage.run for stage in stages}
    most = lambda name: most_kept(
        program, {index: getattr(run, name) for index, run in runs.items()}
    )
    return {
        "kept": most("kept"),
        "kept_each": sum(run.kept for run in runs.values()),
        "at_work": max(run.at_work for run in runs.values()),
        "reserved": most("reserved"),
        "in_host": most("in_host"),
    }


def _add_stages(
    traffic: Traffic,
    config: RunConfig,
    stages: Sequence[FakeStage],
    program: Program,
    message: int,
) -> None:
    """Add what layers send, and the hidden states between stages. message: bytes of the latter, for a micro-batch"""
    for stage in stages:
        traffic.add_all(stage.run.traffic, program_length(program))
    if sends := sum(i.op in SENDS for i in program):
        size = config.parallel.pipeline_model_parallel_size
        traffic.add("send", "pp", size, sends * message, sends)


def _element_bytes(
    config: RunConfig, settings: ZeroSettings, parameters: Sequence[nn.Parameter]
) -> ElementBytes:
    """Bytes of an element of each kind of state."""
    specs = {spec_of(p).name: spec_of(p) for p in parameters}
    return ElementBytes(
        DTYPES[config.optimizer.params_dtype].itemsize,
        settings.grad_dtype.itemsize,
        lambda name: _tried(group_of(specs[name], settings.param_groups).optimizer)[0],
        settings.update_rule.keeps_masters,
        settings.frozen_masters,
    )


def _bytes_received(config: RunConfig, settings: ZeroSettings, whole: int) -> int:
    """Return the bytes of gathered layers in the format of their messages, 0 if that is their own. whole: elements"""
    sent = settings.weight_blocks
    if config.zero.stage == 3:
        sent = sent or settings.frozen_blocks
    return sent.nbytes(whole) if sent else 0


def _most_copied(config: RunConfig, state: ZeroMemory) -> int:
    """Return the bytes of weights and optimizer state that --async-save copies. Masters are saved as the weights."""
    if not config.checkpoint.async_save:
        return 0
    weights = state.masters or state.parameters
    if config.checkpoint.no_save_optim:
        return weights
    return weights + state.optimizer


def _add_optimizers(
    traffic: Traffic,
    plans: Sequence[SetPlan],
    parameters: Sequence[nn.Parameter],
    settings: ZeroSettings,
    groups: DataGroups,
) -> None:
    """Add what optimizers send: norms of parameters, and whole matrices if they compute with these."""
    for group, num_bytes in _norms_sent(plans, parameters, settings, groups):
        if group.size > 1:
            traffic.add("all_reduce", group.axes, group.size, num_bytes)
    of_optimizers = whole_matrices(
        plans, parameters, settings.param_groups, groups, torch.device("cpu")
    )
    for matrices in of_optimizers.values():
        for group, num_bytes in matrices.sent():
            traffic.add("all_to_all_v", group.axes, group.size, num_bytes)


def _add_sums(
    traffic: Traffic,
    config: RunConfig,
    groups: DataGroups,
    stages: Sequence[FakeStage],
    num_metrics: int,
) -> None:
    """Add the sums of a step over ranks: of the gradient norm, the routers' memories and the metrics."""
    # Routers remember int64, a number for each expert. The metrics have the format of
    # `training.step_metrics`: fp64, four numbers and two for each name.
    balances = balances_of(stage.modules for stage in stages)
    remembered = 8 * sum(balance.num_experts for balance in balances)
    metrics = 8 * (4 + 2 * num_metrics)
    for axes, size, num_bytes in (
        ("dp-cp", groups.data.size, DATA_BYTES),
        ("dp-cp", groups.data.size, remembered),
        ("tp-pp", groups.model.size, MODEL_BYTES),
        ("tp-cp-dp-pp", config.world_size, metrics),
    ):
        if size > 1 and num_bytes:
            traffic.add("all_reduce", axes, size, num_bytes)


@cache
def _tried(optimizer: MakeOptimizer) -> tuple[int, int]:
    """(fp32 tensors that an optimizer keeps for each weight, norms of each weight that a step needs), found
    by trying the optimizer on a small weight."""
    spec = ParamSpec("w", (8, 8), Init("zeros"), matrices=Matrices())
    leaf = make_leaf(
        spec,
        SlotPiece(0, 0, 64, 0, 0, 64),
        torch.zeros(64),
        torch.zeros(64),
        shape=spec.shape,
    )
    group = ParamGroup("all", lambda spec: True, optimizer)
    alone = DataGroups({DATA_AXES: solo()})
    cpu = torch.device("cpu")
    norms = ParameterNorms([NormEntry(spec, DATA_AXES, False, False)], alone, cpu)
    matrices = {
        optimizer: WholeMatrices([MatrixEntry(spec, DATA_AXES, ())], alone, cpu)
    }
    return len(
        list(ShardOptimizer([group], [leaf], norms, matrices).state_of(leaf))
    ), norms.lists


def _norms_sent(
    plans: Sequence[SetPlan],
    parameters: Sequence[nn.Parameter],
    settings: ZeroSettings,
    groups: DataGroups,
) -> Iterator[tuple[Group, int]]:
    """(group, bytes) of the all-reduces of a step with which optimizers get norms of parameters."""
    norms = ParameterNorms(
        norm_entries(plans, parameters, settings, groups), groups, torch.device("cpu")
    )
    for optimizer in dict.fromkeys(
        g.optimizer for g in settings.param_groups if g.traits.needs_norms
    ):
        yield from norms.sent(_tried(optimizer)[1])
        yield from settings.update_rule.norm_messages(norms)


def gathers_of(
    config: RunConfig,
    plans: Sequence[SetPlan],
    use: ParameterUse,
    parameters: Sequence[nn.Parameter],
    program: Program,
) -> tuple[list[list[int]], int]:
    """(gathers of each unit of each plan in a step, maximum of gathered elements at a time)."""
    units = [
        [CountedUnit(_numel(plan, i)) for i in range(len(plan.units))] for plan in plans
    ]
    by_parameter = units_by_parameter(
        (plan, [parameters[member] for member in plan.members], its_units)
        for plan, its_units in zip(plans, units)
    )
    if not by_parameter:
        return [[0] * len(its_units) for its_units in units], 0
    prefetch = config.zero.prefetch_bucket_size
    gatherings = {
        stage: gathering_over(use, stage, by_parameter, prefetch)
        for stage in use.layers
    }
    counts, whole = count_gathers(gatherings, moments_of(program))
    return [[counts[unit] for unit in its_units] for its_units in units], whole


def _bytes_of_decoding(plans: Sequence[SetPlan]) -> int:
    """Most bytes that the decoding of a bucket takes beside the weights; frozen weights alone have such."""
    needs = [0]
    for plan in plans:
        if plan.blocks is not None:
            for bucket in plan.layout.buckets:
                numel = bucket.stop - bucket.start
                needs.append(plan.blocks.bytes_of_decoding(numel))
    return max(needs)


def _numel(plan: SetPlan, unit: int) -> int:
    _, first, stop = plan.units[unit]
    return plan.layout.buckets[stop - 1].stop - plan.layout.buckets[first].start


def state_traffic(
    config: RunConfig,
    settings: ZeroSettings,
    groups: DataGroups,
    plans: Sequence[SetPlan],
    parameters: Sequence[nn.Parameter],
    gathers: Sequence[Sequence[int]],
    microbatches: int,
) -> Traffic:
    """Traffic of gradients and weights, and of tied and partial gradients."""
    # The rule of an optimizer may send more than gradients and weights.
    zero = config.zero
    rule = settings.update_rule
    gradient = settings.grad_dtype.itemsize
    ranks = [groups.ranks_of(plan.reduced_over) for plan in plans]
    traffic = predict_traffic(
        plans,
        ranks,
        gathers,
        settings.make_exchange(torch.device("cpu")),
        microbatches=microbatches,
        reduce_each=zero.stage >= 2 and zero.zero_accumulate == "sharded",
        parameter_bytes=DTYPES[config.optimizer.params_dtype].itemsize,
        further=chain.from_iterable(
            rule.messages(
                plan.layout, [parameters[i] for i in plan.members], where, groups
            )
            for plan, where in zip(plans, ranks)
            if not plan.frozen
        ),
    )
    # Gradients of some parameters are partial sums over tensor-parallel ranks, and tied weights add theirs.
    for plan, where in zip(plans, ranks):
        if plan.frozen:
            continue
        pieces = plan.layout.whole_slots()
        if plan.policy.optimizer and not rule.keeps_gradients:
            pieces = plan.layout.slot_intersections(where.shard)
        member = lambda slot, plan=plan: parameters[plan.members[slot]]
        partial = sum(
            piece.padded_numel
            for piece in pieces
            if member(piece.slot).spec.partial_over
        )
        # Over the ranks that divide the layers.
        tp = groups.dividing(plan.reduced_over)
        if partial and tp.size > 1:
            traffic.add("all_reduce", tp.axes, tp.size, partial * gradient)
        for i, slot in enumerate(plan.layout.slots):
            if is_tied(member(i), groups):
                numel = slot.numel
                if plan.policy.gradient is not None:
                    piece = plan.layout.shard_pieces(where.shard)[slot.bucket]
                    numel = piece.stop - piece.start
                traffic.add("all_reduce", "embd", groups.tied.size, numel * gradient)
    return traffic


def _gradient_buffers(
    config: RunConfig,
    settings: ZeroSettings,
    plans: Sequence[SetPlan],
    parameters: Sequence[nn.Parameter],
    use: ParameterUse,
    groups: DataGroups,
    microbatches: int,
) -> int:
    """Bytes of the buckets in which gradients accumulate, if only shards are kept, and of the exchange."""
    fillings = list(fillings_of(plans, parameters, settings, use.used_twice()))
    filling = gradient_buffers(
        fillings,
        microbatches=microbatches,
        kept_whole=config.zero.zero_accumulate == "full",
    )
    buckets = chain.from_iterable(plan.layout.buckets for plan in plans)
    longest = max((bucket.stop - bucket.start for bucket in buckets), default=0)
    # The exchange needs memory for the longest bucket; the optimizer's rule keeps values of its own.
    return (
        filling * settings.grad_dtype.itemsize
        + settings.make_exchange(torch.device("cpu")).planned_bytes(
            longest, groups.data.size
        )
        + sum(
            settings.update_rule.state_bytes(plan.layout, _shard(plan, groups))
            for plan in plans
            if not plan.frozen
        )
    )


def _shard(plan: SetPlan, groups: DataGroups) -> int | None:
    """Return the shard of the optimizer's state that the rank has; None if it has all."""
    if plan.policy.optimizer is None:
        return None
    return groups.ranks_of(plan.reduced_over).shard
