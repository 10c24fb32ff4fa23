"""Rules about layers with experts: which layers, the router's choice, balance, capacity, and distribution."""

from collections.abc import Iterator
from math import gcd

from ...errors import ConfigError
from ..messages import divisors, either, given
from ..model_facts import facts_of_model, other_models
from ..options.moe import CHOICES
from ..run import RunConfig

EP = "--expert-model-parallel-size"
ETP = "--expert-tensor-parallel-size"
TOPK = "--moe-router-topk"
BIAS = "model.moe_router_enable_expert_bias"
NUM_EXPERTS = "model.num_experts"
GROUPS = ("model.moe_router_num_groups", "model.moe_router_group_topk")
MOST_EXPERTS = 1 << 16
CAPACITY_FACTOR = "model.moe_expert_capacity_factor"


def sizes(config: RunConfig) -> Iterator[str]:
    """No layer has so many experts that tables of all of them are the work."""
    if any(number > MOST_EXPERTS for number in config.model.num_experts or ()):
        yield (
            f"[num_experts]: a layer has at most {MOST_EXPERTS:,} experts, because each token has a score "
            "for every one of them, and the host reads how many tokens each has. Use --num-experts 1 to "
            f"{MOST_EXPERTS:,}."
        )


def layers(config: RunConfig) -> Iterator[str]:
    """One option chooses the layers with experts, at least one, and there is a number for each of them."""
    model = config.model
    freq = config.sources.get("model.moe_layer_freq")
    if model.num_experts is None or not model.num_layers:
        return
    by_flag = freq is not None and freq.kind == "flag"
    if model.expert_interval is not None and (
        by_flag or not config.is_default("model.moe_layer_freq")
    ):
        yield (
            "[moe_layer_freq] and [expert_interval] both choose the layers with experts, the first "
            "counting from 0, the second from 1. Give only one."
        )
    if not any(model.experts):  # raises if the options do not fit
        choice = (
            "expert_interval" if model.expert_interval is not None else "moe_layer_freq"
        )
        yield (
            f"[num_experts], but [{choice}] chooses none of {model.num_layers} layers. Remove "
            "--num-experts for a dense model, or choose at least one layer."
        )


def distribution(config: RunConfig) -> Iterator[str]:
    """The expert-parallel size divides the experts of each layer and the ranks among which they are divided."""
    # Experts of each layer, and the ranks that share them.
    ep = config.parallel.expert_model_parallel_size
    numbers = _numbers(config)
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size
    etp = _expert_tensor(config)
    ranks = config.data_parallel_size * parallel.context_parallel_size * tp // etp
    # `world` reports the last.
    if ep == 1 or not numbers or config.world_size % parallel.model_parallel_size:
        return
    # Sizes that divide both are the advice.
    even = divisors(gcd(*numbers))
    legal = either([n for n in even if ranks % n == 0])
    mistaken = (
        " It is a number of ranks, not the number of experts, which is [num_experts]."
        if ep in numbers
        else ""
    )
    if uneven := [number for number in numbers if number % ep]:
        yield (
            "[num_experts] is not a multiple of [expert_model_parallel_size]: each rank holds an equal "
            f"part of the {either(uneven)} experts of a layer. Use {EP} {legal}."
        )
    elif ranks % ep:
        more = ep * parallel.model_parallel_size * max(1, etp // tp)
        what = "data-parallel rank"
        if etp != tp:
            what = (
                f"group of [expert_tensor_parallel_size] rank{'s' if etp > 1 else ''}"
            )
        yield (
            f"[expert_model_parallel_size] does not divide {ranks} {what}{'s' if ranks > 1 else ''}, "
            f"among which the experts of a layer are divided.{mistaken} Use {EP} {legal}, or start a "
            f"multiple of {more} ranks."
        )


def folding(config: RunConfig) -> Iterator[str]:
    """Experts may be divided over other ranks than dense layers where all of these have different tokens."""
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size
    etp = _expert_tensor(config)
    if config.model.num_experts is None or etp == tp:
        return
    # Sizes of groups that lie within each other.
    if max(tp, etp) % min(tp, etp):
        yield (
            "[expert_tensor_parallel_size] is neither a divisor nor a multiple of [tensor_model_parallel_size]: "
            f"of the groups of ranks of both, one must contain the other. Use {ETP} {either(divisors(tp))}, or a "
            f"multiple of {tp}."
        )
    elif config.data_parallel_size * parallel.context_parallel_size * tp % etp:
        yield (
            "[expert_tensor_parallel_size] does not divide the ranks of a pipeline stage, among which experts are "
            f"divided. Start a multiple of {parallel.model_parallel_size * etp // tp} ranks, or use {ETP} {tp}."
        )
    # A token is on one rank.
    if tp > 1 and not parallel.sequence_parallel:
        yield (
            "[expert_tensor_parallel_size] differs from [tensor_model_parallel_size], so tensor-parallel ranks send "
            "tokens to experts as other ranks do, but without sequence parallelism all of them have the same "
            f"tokens. Add --sequence-parallel, or remove {ETP}."
        )
    if etp > tp and config.model.moe_pad_expert_input_to_capacity:
        yield (
            "[expert_tensor_parallel_size] is above [tensor_model_parallel_size], so ranks with different samples "
            "divide an expert, but [moe_pad_expert_input_to_capacity] has places for those of one rank. Use "
            f"{ETP} {either(divisors(tp))}, or remove --moe-pad-expert-input-to-capacity."
        )


def _expert_tensor(config: RunConfig) -> int:
    """Return the number of ranks that divide an expert."""
    parallel = config.parallel
    return parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size


def widths(config: RunConfig) -> Iterator[str]:
    """Ranks hold equal parts of every expert and of the shared experts, and move equal parts of padded rows."""
    model = config.model
    tp = config.parallel.tensor_model_parallel_size
    etp = _expert_tensor(config)
    if model.num_experts is None:
        return
    # Feed-forward widths.
    of_dense = "tensor_model_parallel_size", tp
    of_experts = of_dense if etp == tp else ("expert_tensor_parallel_size", etp)
    for path, what, (option, size) in (
        ("moe_ffn_hidden_size", "an expert", of_experts),
        ("moe_shared_expert_intermediate_size", "the shared experts", of_dense),
    ):
        width = getattr(model, path)
        if width and width % size:
            fits = either(divisors(gcd(width, model.num_attention_heads or width)))
            yield (
                f"[{path}] is not a multiple of [{option}]: each rank holds an equal "
                f"part of {what}. Use --{option.replace('_', '-')} {fits}."
            )
    # Columns of padded rows.
    h = model.hidden_size
    if model.moe_pad_expert_input_to_capacity and h and h % etp:
        fits = either(divisors(gcd(h, model.num_attention_heads or h)))
        yield (
            f"[hidden_size] is not a multiple of [{of_experts[0]}], but with "
            "[moe_pad_expert_input_to_capacity] each rank moves an equal part of the columns of every "
            f"token. Use --{of_experts[0].replace('_', '-')} {fits}, or remove --moe-pad-expert-input-to-capacity."
        )


def dense_part(config: RunConfig) -> Iterator[str]:
    """What a layer has besides its routed experts: shared experts with or without gate, or a residual MLP."""
    model = config.model
    shared = config.model.moe_shared_expert_intermediate_size
    if model.num_experts is None:
        return
    if model.moe_shared_expert_gate and not shared:
        yield (
            "[moe_shared_expert_gate] multiplies the output of shared experts, but there are none. Add "
            "--moe-shared-expert-intermediate-size, or remove it."
        )
    if model.mlp_type == "residual" and shared:
        yield (
            "[mlp_type] and [moe_shared_expert_intermediate_size] both add a feed-forward that every "
            "token passes. Give only one."
        )


def choice(config: RunConfig) -> Iterator[str]:
    """The number of experts of a token, and a router that can learn."""
    # A layer has as many experts.
    model = config.model
    numbers = _numbers(config)
    k = config.model.moe_router_topk
    if numbers and k > numbers[0]:
        yield (
            f"[moe_router_topk] is more than the {numbers[0]} expert{'s' if numbers[0] > 1 else ''} of a layer. "
            f"Use {TOPK} {either(range(1, numbers[0] + 1))}."
        )
    # The weight of a single expert carries a gradient, unless nothing is trained.
    is_softmax = (
        model.moe_router_score_function == "softmax"
        and not model.moe_router_pre_softmax
    )
    trains = not config.train.skip_train
    if numbers and k == 1 and is_softmax and trains and model.moe_choice == "top-k":
        yield (
            "[moe_router_topk] with a softmax over the chosen experts: the weight of a single expert is "
            "always 1, so the router would not learn. Add --moe-router-pre-softmax, which weighs by the "
            "softmax over all experts (as Switch Transformer and DeepSpeed do)."
        )
    # One noise.
    if (
        model.moe_input_jitter_eps is not None
        and numbers
        and model.moe_router_noise != "jitter"
    ):
        yield (
            "[moe_input_jitter_eps] is the width of the jitter, but [moe_router_noise]. Remove one of the "
            "two."
        )


def groups(config: RunConfig) -> Iterator[str]:
    """Groups of equal size; the best ones hold enough experts for a token, and each is scored by some."""
    # Both options, or none.
    model = config.model
    numbers = _numbers(config)
    k = config.model.moe_router_topk
    count = model.moe_router_num_groups
    kept = model.moe_router_group_topk
    if not numbers or count is None and kept is None:
        return
    if count is None:
        yield (
            "[moe_router_group_topk] without --moe-router-num-groups: the number of groups is missing. "
            f"Add --moe-router-num-groups N, N one of {either(divisors(gcd(*numbers)))}."
        )
    elif kept is None:
        yield (
            "[moe_router_num_groups] without --moe-router-group-topk: the number of groups of a token is "
            f"missing. Add --moe-router-group-topk N, N one of {either(range(1, count + 1))}."
        )
    # Groups of equal size, with enough experts.
    elif any(number % count for number in numbers):
        yield (
            "[num_experts] is not a multiple of [moe_router_num_groups]: groups have equal numbers of "
            f"experts. Use --moe-router-num-groups {either(divisors(gcd(*numbers)))}."
        )
    elif kept > count:
        yield (
            "[moe_router_group_topk] is more than [moe_router_num_groups]. Use --moe-router-group-topk "
            f"{either(range(1, count + 1))}."
        )
    elif k % kept or k > kept * numbers[0] // count:
        most = kept * numbers[0] // count
        yield (
            "[moe_router_topk] with [moe_router_group_topk] of [moe_router_num_groups]: a token takes "
            f"equally many experts for each of its groups, which have {most} experts together. Use {TOPK} "
            f"{either(range(kept, most + 1, kept))}, or another number of groups."
        )


def balance(config: RunConfig) -> Iterator[str]:
    """Each loss has one weight; a choice that is balanced by itself has no other means of balance."""
    # One weight for each loss.
    model = config.model
    kinds = model.moe_router_load_balancing_type
    weights = model.moe_aux_loss_coeff
    if model.num_experts is None:
        return
    if len(kinds) != len(weights):
        yield (
            f"[moe_router_load_balancing_type] with [moe_aux_loss_coeff]: {len(kinds)} kind"
            f"{'s' if len(kinds) > 1 else ''} of loss, but {len(weights)} "
            f"weight{'s' if len(weights) > 1 else ''}. Give each loss its own weight."
        )
    elif len(set(kinds)) < len(kinds):
        yield (
            "[moe_router_load_balancing_type] has a loss twice. Give it once, with one "
            "--moe-aux-loss-coeff."
        )
    # Kinds that are no losses.
    alone = [kind for kind in kinds if kind in (*CHOICES, "none")]
    if alone and len(kinds) > 1:
        yield (
            f"[moe_router_load_balancing_type]: {alone[0]} cannot be combined with other values. Give it "
            "alone, or only losses."
        )
    elif alone and any(weights):
        yield (
            "[moe_aux_loss_coeff] is the weight of a load balancing loss, but "
            "[moe_router_load_balancing_type] has none. Remove it, or use "
            "--moe-router-load-balancing-type aux_loss."
        )
    # The bias of experts.
    if (
        model.moe_router_enable_expert_bias
        and model.moe_router_score_function != "sigmoid"
    ):
        yield (
            f"[{BIAS}] is added to the score of an expert, but with [moe_router_score_function] that "
            "score also depends on all others. Add --moe-router-score-function sigmoid."
        )


def balanced_choice(config: RunConfig) -> Iterator[str]:
    """Sinkhorn and expert choice compare tokens, and replace the choice by groups and bias."""
    # Options of the top-k choice that a balanced choice replaces.
    if config.model.num_experts is None or config.model.moe_choice == "top-k":
        return
    by_experts = config.model.moe_choice == "expert_choice"
    excluded = (*GROUPS, BIAS, *((CAPACITY_FACTOR,) if by_experts else ()))
    why = (
        "each expert takes an equal number of tokens, whatever the scores of others"
        if by_experts
        else "the choice is balanced over all experts at once"
    )
    yield from given(
        config,
        excluded,
        f"has no meaning with [moe_router_load_balancing_type]: {why}. Remove "
        "one of the two.",
    )
    unread = (
        "model.moe_router_pre_softmax",
        *(() if by_experts else ("model.moe_router_score_function",)),
    )
    yield from given(
        config,
        unread,
        "is not read with [moe_router_load_balancing_type], which has weights "
        "of its own. Remove one of the two.",
    )
    # A token is chosen by comparing it with others, which a rank must have.
    if by_experts and facts_of_model(config.model.model).is_causal:
        yield (
            "[moe_router_load_balancing_type]: an expert compares the tokens of a sequence, so earlier "
            "tokens would depend on later ones, which [model] must not see. Use "
            f"aux_loss{other_models()}."
        )


def _numbers(config: RunConfig) -> list[int]:
    """The numbers of experts of the layers, each once, rising; empty if `sizes`, `layers` or `missing` has
    reported them.
    """
    if not config.model.num_layers or any(sizes(config)):
        return []
    try:
        return sorted({number for number in config.model.experts if number})
    except ConfigError:
        return []


MOE_RULES = (
    sizes,
    layers,
    distribution,
    folding,
    widths,
    dense_part,
    choice,
    groups,
    balance,
    balanced_choice,
)
