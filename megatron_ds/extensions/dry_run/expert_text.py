"""The part of a dry run's text about layers with experts: parameters of a token, rows, all-to-all.

A *row* is the vector of a token at one expert. A token has as many as it chooses experts.
"""

from collections.abc import Iterator, Sequence
from math import ceil

from ...config import RunConfig
from ...models import Layer
from ...moe.capacity import Capacity
from ...mpu.grid import Grid
from ...mpu.param_spec import ParamSpec
from ...planning.rank_plan import RankPlan
from .world_plan import WorldPlan

Rows = tuple[int, int, int | None]  # experts, planned rows, most rows


def has_experts(config: RunConfig) -> bool:
    """Return whether any layer has experts."""
    return any(config.model.experts)


def expert_parameters(specs: Sequence[ParamSpec]) -> int:
    """Elements of these logical tensors that belong to one expert each."""
    of_experts = [spec for spec in specs if spec.is_split_over("ep")]
    return sum(spec.numel for spec in of_experts)


def active_parameters(specs: Sequence[ParamSpec], topk: int) -> int:
    """Return the elements that one token uses: all but those of experts, and of these `topk`."""
    used = 0
    for spec in specs:
        if spec.is_split_over("ep"):
            # Dimension 0 counts the experts.
            experts = spec.shape[0]
            used += spec.numel // experts * min(topk, experts)
        else:
            used += spec.numel
    return used


def expert_rows(config: RunConfig) -> list[Rows]:
    """(experts, planned rows, most rows) of a micro-batch on a rank, for layers of each number of experts.

    The most is None if the data do not change the number. Without a capacity all tokens of all expert-parallel
    ranks may choose experts of one rank, each token as many as there are or as it chooses. With a capacity these
    ranks hold some sequences; if they are fewer than the ranks that divide a sequence, parts of them.
    """
    model = config.model
    grid = config.grid()
    ep = grid.ep
    # Capacities count all tokens of a sequence, dispatch those of the ranks that divide an expert.
    whole = config.train.micro_batch_size * model.seq_length
    ranks = grid.size("tp", "cp")
    tokens = whole * grid.etp // ranks
    # Such groups of ranks that divide a sequence.
    parts = max(1, ranks // grid.etp)
    topk = model.moe_router_topk
    found: list[Rows] = []
    for experts in numbers_of_experts(config):
        capacity = Capacity.of(model, experts, training=True)
        local = experts // ep
        planned = tokens * topk
        most = ep * tokens * min(topk, local)
        if capacity.factor is not None:
            # An expert has a number of rows for each set of tokens.
            sets = capacity.sets(config.train.micro_batch_size)
            rows = capacity.rows(whole // sets)
            seen = min(ep, parts) * tokens // sets
            planned = capacity.planned(sets, whole // sets) * tokens // whole
            sequences = ceil(ep / parts)
            most = local * sequences * sets * min(rows, seen)
        # With padding all rows are there, used or not.
        if capacity.factor is not None and capacity.padded:
            most = experts * sets * min(rows, tokens // sets)
        if capacity.padded:
            found.append((experts, most, None))
        else:
            found.append((experts, planned, most))
    return found


def numbers_of_experts(config: RunConfig) -> list[int]:
    """Return the different numbers of experts of layers that have any, ascending."""
    return sorted(set(filter(None, config.model.experts)))


def flops_of_rank(plan: WorldPlan, layers: Sequence[Layer]) -> float:
    """Model FLOPs of these layers in a step on one rank."""
    # Tokens of all sequences of the rank, divided among the ranks that share each of them.
    config = plan.config
    samples = plan.microbatches * config.train.micro_batch_size
    s = config.model.seq_length
    vocabulary = config.padded_vocab_size
    per_sample = sum(layer.flops(s, vocabulary).total for layer in layers)
    return samples * per_sample / plan.grid.size("tp", "cp")


def _divided(grid: Grid) -> str:
    """Return the sizes of the axes of experts."""
    text = f"expert-parallel {grid.ep} × expert-data {grid.edp}"
    if grid.folds:
        text = f"expert-tensor {grid.etp} × {text}"
    return text


def experts_text(plan: WorldPlan, mine: RankPlan) -> Iterator[str]:
    """Yield lines; none for a model without experts. mine: the plan of the planned rank"""
    config = plan.config
    model = config.model
    grid = plan.grid
    if not has_experts(config):
        return
    # Layers may have different numbers of experts.
    numbers = numbers_of_experts(config)
    layers = sum(map(bool, model.experts))
    each = ", ".join(f"{n:,}" for n in numbers)
    held = ", ".join(f"{n // grid.ep:,}" for n in numbers)
    yield (
        f"experts: {each} in {layers} of {model.num_layers} "
        f"blocks, {model.moe_router_topk} of them for a token, "
        f"{held} on a rank ({_divided(grid)})"
    )
    active = active_parameters(plan.specs, model.moe_router_topk)
    share = active / plan.parameters
    share_of_experts = expert_parameters(plan.specs) / plan.parameters
    yield (
        f"  a token uses {active:,} of the parameters, {share:.1%}; "
        f"experts have {share_of_experts:.1%} of all"
    )
    # The rows that a rank computes depend on the data: equal loads are planned, and the most is a bound.
    for experts, planned, most in expert_rows(config):
        of = " of a layer"
        if len(numbers) > 1:
            of = f" of a layer with {experts:,} experts"
        known = "padded to the capacity: the same for all data"
        if most is not None:
            known = (
                f"with equal loads of the experts; the most for any data is {most:,}"
            )
        yield f"  rows{of} that a rank computes for a micro-batch: {planned:,}, {known}"
    # How fast a network must be for the all-to-all to take no longer than the computation:
    # bytes a second for each FLOP a second.
    sent = mine.traffic.bytes.get(("all_to_all_v", "ep", grid.ep), 0)
    if sent:
        pp = grid.coordinates(plan.rank)["pp"]
        stages = plan.stages_of(pp)
        own = [layer for stage in stages for layer in stage.layers]
        ratio = flops_of_rank(plan, own) / sent
        yield (
            f"  all-to-all: {ratio:,.0f} model FLOPs for each byte that rank "
            f"{plan.rank} sends; both take equally long at {1e3 / ratio:.3g} GB/s "
            "for each TFLOP/s that the device achieves"
        )
