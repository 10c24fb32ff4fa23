"""Rules about the shapes of the model, and about its distribution over the ranks."""

import re
from collections.abc import Iterator

from ..messages import divisors, either, neighbours
from ..options.parallel import COMM_GROUPS
from ..run import RunConfig
from .position import POSITION_RULES

TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"


def heads(config: RunConfig) -> Iterator[str]:
    """Heads share the hidden size and the key/value heads evenly; rotary embeddings pair their channels."""
    # Query heads and key/value heads.
    model = config.model
    n = model.num_attention_heads
    g = model.query_groups
    h = model.hidden_size
    if n and g and n % g:
        yield (
            "[num_attention_heads] is not a multiple of [num_query_groups]: each key/value head serves "
            f"the same number of query heads. Use --num-query-groups {either(divisors(n))}."
        )
    if model.group_query_attention and model.num_query_groups is None:
        yield (
            "[group_query_attention] without --num-query-groups: the number of key/value heads is "
            f"missing. Add --num-query-groups N{f', N one of {either(divisors(n))}' if n else ''}."
        )
    # The width of a head.
    if n and h and model.kv_channels is None and h % n:
        yield (
            f"[hidden_size] is not a multiple of [num_attention_heads]: a head would have {h / n:g} "
            f"channels. Use --num-attention-heads {either([d for d in divisors(h) if d <= 4 * n][-8:])}, "
            "or set the width of a head with --kv-channels."
        )
    elif (
        n
        and h
        and model.is_rotary
        and (rotated := int(model.head_dim * model.rotary_percent)) % 2
    ):
        yield (
            "rotary embeddings rotate pairs of channels, but [rotary_percent] of a head of "
            f"{model.head_dim} channels is {rotated}, an odd number. Change --num-attention-heads, "
            "--kv-channels or --rotary-percent."
        )


def feed_forward(config: RunConfig) -> Iterator[str]:
    """The default width must not be rounded down to 0."""
    model = config.model
    if model.hidden_size and not model.ffn_size:
        yield (
            "[activation] with [hidden_size]: the default width of the feed-forward block, 8/3 × hidden "
            "size rounded down to a multiple of 64, would be 0. Set it, for instance --ffn-hidden-size "
            f"{max(1, 8 * model.hidden_size // 3)}."
        )


def world(config: RunConfig) -> Iterator[str]:
    """The world size is a multiple of the ranks that hold one copy of the model."""
    # The sizes, each with the others as they are, that would divide the world.
    ranks = config.world_size
    size = config.parallel.model_parallel_size
    if ranks % size:
        tp = config.parallel.tensor_model_parallel_size
        pp = config.parallel.pipeline_model_parallel_size
        cp = config.parallel.context_parallel_size
        fits = [
            t
            for t in divisors(ranks)
            if (ranks // t) % (pp * cp) == 0 and _tp_fits(config, t)
        ]
        options = [f"{TP} {either(fits)}"] if fits and ranks % (pp * cp) == 0 else []
        stages = [
            p
            for p in divisors(ranks)
            if (ranks // p) % (tp * cp) == 0 and p <= (config.model.num_layers or p)
        ]
        options += (
            [f"{PP} {either(stages)}"] if stages and ranks % (tp * cp) == 0 else []
        )
        if cp > 1 and ranks % (tp * pp) == 0:
            options.append(
                f"--context-parallel-size {either(divisors(ranks // (tp * pp)))}"
            )
        # The message, with the other world sizes.
        hint = " In a plan, --world-size sets the number of ranks."
        yield (
            f"world size {ranks} is not divisible by [tensor_model_parallel_size] × "
            f"{'[context_parallel_size] × ' if cp > 1 else ''}[pipeline_model_parallel_size] = {size}, the ranks "
            "that hold one copy of the model. Start "
            f"{size}, {2 * size} or {3 * size} ranks{', or use ' if options else ''}{' or '.join(options)}."
            f"{hint if config.plan.is_dry else ''}"
        )


def tensor_parallel(config: RunConfig) -> Iterator[str]:
    """The tensor-parallel size divides heads, feed-forward width and, with sequence parallelism, tokens."""
    # Sizes that divide all three widths are the advice for each.
    model = config.model
    t = config.parallel.tensor_model_parallel_size
    width = _ffn_width(config)
    fits = [d for d in divisors(model.num_attention_heads or 1) if _tp_fits(config, d)]
    for name, number, reason in (
        (
            "[num_attention_heads]",
            model.num_attention_heads,
            "each rank holds whole heads",
        ),
        (
            "[num_query_groups]",
            model.num_query_groups,
            "each rank holds whole key/value heads",
        ),
        (
            "[ffn_hidden_size]"
            if model.ffn_hidden_size
            else f"the feed-forward width {width}",
            width,
            "each rank holds an equal part of the feed-forward block",
        ),
    ):
        if number and number % t:
            yield (
                f"{name} is not a multiple of [tensor_model_parallel_size]: {reason}. Use {TP} "
                f"{either(fits)}."
            )
    # Tokens.
    # `context_parallel` reports others.
    alone = config.parallel.context_parallel_size == 1
    if (
        config.parallel.sequence_parallel
        and alone
        and model.seq_length
        and model.seq_length % t
    ):
        yield (
            "[seq_length] is not a multiple of [tensor_model_parallel_size]: with --sequence-parallel "
            "each rank holds an equal slice of the sequence. Use --seq-length "
            f"{neighbours(model.seq_length, t)}, or remove --sequence-parallel."
        )


def nccl_blocks(config: RunConfig) -> Iterator[str]:
    """Limits name a group and a number."""
    for text in config.parallel.nccl_max_ctas:
        group, _, number = text.partition("=")
        if group not in COMM_GROUPS or not re.fullmatch("[1-9][0-9]{0,3}", number):
            yield (
                f"[nccl_max_ctas]: {text!r} is not GROUP=NUMBER. Use one of the groups "
                f"{', '.join(COMM_GROUPS)} and a number from 1 to 9999, such as pp=2."
            )


def rank_order(config: RunConfig) -> Iterator[str]:
    """Each mesh axis occurs once."""
    default = "tp-cp-ep-dp-pp"
    if sorted(config.parallel.rank_order.split("-")) != sorted(default.split("-")):
        yield (
            f"[rank_order] must contain each axis of {default} once. Give them in any order, the axis "
            "that varies fastest with the rank first."
        )


def _ffn_width(config: RunConfig) -> int | None:
    model = config.model
    return model.ffn_hidden_size or (model.hidden_size and model.ffn_size)


def _tp_fits(config: RunConfig, size: int) -> bool:
    """Whether the model can be split over a tensor-parallel group of this size."""
    numbers = (
        config.model.num_attention_heads,
        config.model.num_query_groups,
        _ffn_width(config),
    )
    return all(number % size == 0 for number in numbers if number)


SHAPE_RULES = (heads, feed_forward, *POSITION_RULES)
PLACE_RULES = (world, tensor_parallel, rank_order, nccl_blocks)
