"""The part of a dry run's text about layers with experts: parameters of a token, rows, all-to-all."""

from collections.abc import Iterator, Sequence
from math import ceil

from ..config import RunConfig
from ..models import Layer
from ..moe.capacity import Capacity
from ..mpu.param_spec import ParamSpec
from .rank_plan import RankPlan
from .world_plan import WorldPlan


def has_experts(config: RunConfig) -> bool:
    """Whether any layer has."""
    return any(config.model.experts)


def expert_parameters(specs: Sequence[ParamSpec]) -> int:
    """Elements of these logical tensors that belong to one expert each."""
    return sum(spec.numel for spec in specs if spec.is_split_over("ep"))


def active_parameters(specs: Sequence[ParamSpec], topk: int) -> int:
    """Elements that one token uses: all, but of experts only `topk`."""
    unused = (
        spec.numel // spec.shape[0] * max(0, spec.shape[0] - topk)
        for spec in specs
        if spec.is_split_over("ep")
    )
    return sum(spec.numel for spec in specs) - sum(unused)


def expert_rows(config: RunConfig) -> list[tuple[int, int, int | None]]:
    """(experts, planned rows, most rows) of a micro-batch on a rank, for layers of each number of experts.

    The most is None where the data do not change the number. Dropless: all tokens of all expert-parallel
    ranks may choose experts of one rank, each as many as it has or as a token chooses. With a capacity these
    ranks hold all of some sequences, or, fewer than context-parallel ranks, a part of them.
    """
    model = config.model
    ep = config.parallel.expert_model_parallel_size
    cp = config.grid().cp
    whole = config.train.micro_batch_size * model.seq_length
    tokens = whole // cp  # of an expert-parallel rank
    found = []
    for experts in sorted({number for number in model.experts if number}):
        capacity = Capacity.of(model, experts, training=True)
        local = experts // ep
        planned = tokens * model.moe_router_topk
        most = ep * tokens * min(model.moe_router_topk, local)
        if capacity.factor is not None:
            sets = capacity.sets(config.train.micro_batch_size)
            rows = capacity.rows(whole // sets)
            seen = min(ep, cp)
            planned = capacity.planned(sets, whole // sets) // cp
            most = local * ceil(ep / cp) * sets * min(rows, seen * tokens // sets)
            if capacity.padded:
                most = experts * sets * min(rows, tokens // sets)
        found.append(
            (experts, most, None) if capacity.padded else (experts, planned, most)
        )
    return found


def flops_of_rank(plan: WorldPlan, layers: Sequence[Layer]) -> float:
    """Model FLOPs of these layers in a step on one rank."""
    config = plan.config
    samples = plan.microbatches * config.train.micro_batch_size
    per_sample = sum(
        layer.flops(config.model.seq_length, config.padded_vocab_size).total
        for layer in layers
    )
    return samples * per_sample / plan.grid.size("tp", "cp")


def experts_text(plan: WorldPlan, mine: RankPlan) -> Iterator[str]:
    """Lines; none for a model without experts. mine: the plan of the planned rank."""
    config = plan.config
    model = plan.config.model
    grid = plan.grid
    if not has_experts(config):
        return
    # How many experts there are, and how many parameters a token uses.
    numbers = sorted({number for number in model.experts if number})
    specs = plan.specs
    active = active_parameters(specs, model.moe_router_topk)
    of_experts = expert_parameters(specs)
    each = ", ".join(f"{n:,}" for n in numbers)
    held = ", ".join(f"{n // grid.ep:,}" for n in numbers)
    yield (
        f"experts: {each} in {sum(map(bool, model.experts))} of {model.num_layers} blocks, "
        f"{model.moe_router_topk} of them for a token, {held} on a rank (expert-parallel {grid.ep} × "
        f"expert-data {grid.edp})"
    )
    yield (
        f"  a token uses {active:,} of the parameters, {active / plan.parameters:.1%}; experts have "
        f"{of_experts / plan.parameters:.1%} of all"
    )
    # How many rows a rank computes: the planned number, and the largest for any data.
    for experts, planned, most in expert_rows(config):
        of = (
            f" of a layer with {experts:,} experts"
            if len(numbers) > 1
            else " of a layer"
        )
        known = (
            "padded to the capacity: the same for all data"
            if most is None
            else f"with equal loads of the experts; the most for any data is {most:,}"
        )
        yield f"  rows{of} that a rank computes for a micro-batch: {planned:,}, {known}"
    # How fast a network must be for the all-to-all to take no longer than the computation.
    sent = mine.traffic.bytes.get(("all_to_all_v", "ep", grid.ep), 0)
    if sent:
        stages = plan.stages_of(grid.coordinates(plan.rank)["pp"])
        layers = [layer for stage in stages for layer in stage.layers]
        ratio = flops_of_rank(plan, layers) / sent
        yield (
            f"  all-to-all: {ratio:,.0f} model FLOPs for each byte that rank {plan.rank} sends; both take "
            f"equally long at {1e3 / ratio:.3g} GB/s for each TFLOP/s that the device achieves"
        )
