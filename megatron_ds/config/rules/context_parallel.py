"""Rules about ranks that share a sequence."""

from collections.abc import Iterator

from ..messages import divisors, either, flag, neighbours
from ..run import RunConfig


def context_parallel(config: RunConfig) -> Iterator[str]:
    """Ranks that split a sequence hold equal parts of it, or equal numbers of heads."""
    # One way of communication for each layer.
    model = config.model
    parallel = config.parallel
    c = parallel.context_parallel_size
    kinds = parallel.cp_comm_type
    if c == 1:
        return
    if len(kinds) > 1 and model.num_layers and len(kinds) != model.num_layers:
        yield (
            f"[cp_comm_type] names {len(kinds)} ways for [num_layers]. Give one, or one for each layer."
        )
    # Equal parts of the sequence.
    t = parallel.tensor_model_parallel_size
    chunks = config.sequence_parts
    if model.seq_length and model.seq_length % chunks:
        yield (
            f"[seq_length] is not a multiple of {chunks}: each of [context_parallel_size] ranks holds "
            f"{_parts(config)} of a sequence. Use --seq-length "
            f"{neighbours(model.seq_length, chunks)}."
        )
    # The two levels of a2a+p2p.
    sizes = parallel.hierarchical_context_parallel_sizes
    if "a2a+p2p" in kinds and (len(sizes) != 2 or sizes[0] * sizes[1] != c):
        yield _two_levels(config)
    # Equal numbers of heads, where heads are divided.
    heads = model.num_attention_heads
    if not heads or heads % t:
        return
    groups = (model.num_query_groups or heads) // t
    fits = [
        d for d in divisors(heads // t) if groups % d == 0 or d % max(groups, 1) == 0
    ]
    for kind, ranks, name in (
        ("a2a", c, "context_parallel_size"),
        ("a2a+p2p", sizes[0], "hierarchical_context_parallel_sizes"),
    ):
        if kind in kinds and ranks not in fits:
            yield (
                f"[cp_comm_type] divides heads among {ranks} ranks ([{name}]), but each tensor-parallel "
                f"rank has {heads // t} heads in {groups} groups. Use {either(fits)} ranks, or "
                "--cp-comm-type p2p."
            )


def _two_levels(config: RunConfig) -> str:
    c = config.parallel.context_parallel_size
    path = "parallel.hierarchical_context_parallel_sizes"
    # A size of 1 would be p2p alone, and c would be a2a.
    inner = [d for d in divisors(c) if 1 < d < c] or divisors(c)
    use = f"{flag(path)} {either([f'{d} {c // d}' for d in inner])}"
    if config.is_default(path):
        return (
            "[cp_comm_type] needs the numbers of ranks that exchange tokens for heads and of ranks that "
            f"pass keys on, whose product is [context_parallel_size]. Add {use}."
        )
    return (
        "[hierarchical_context_parallel_sizes] are not two numbers whose product is "
        "[context_parallel_size]: ranks that exchange tokens for heads × ranks that pass keys on. Use "
        f"{use}."
    )


def _parts(config: RunConfig) -> str:
    part = "two equal chunks" if config.is_zigzag else "an equal run"
    if config.parallel.sequence_parallel:
        return f"{part}, divided among tensor-parallel ranks,"
    return part


CONTEXT_RULES = (context_parallel,)
