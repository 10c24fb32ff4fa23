"""Rules about mixers: what each layer is, how heads are divided, and what a model with mixers has not."""

import math
from collections.abc import Iterator

from ...config.messages import divisors, either
from ...config.options.model import ModelConfig
from ...config.run import RunConfig
from ...config.sources.reading import attempt
from .layer_kinds import kinds_of
from .letters import DELTA, EXPERTS, FACTORS, MAMBA, SIDE_BY_SIDE


def kinds(config: RunConfig) -> Iterator[str]:
    """One option describes the layers, of a GPT."""
    model = config.model
    if model.mixer_pattern is None and model.linear_attention_freq is None:
        return
    if model.model != "gpt":
        yield (
            f"[model]: layers with a state go through a text from left to right, and {model.model} may not. Use "
            "--model gpt."
        )
    if _has_two_descriptions(model):
        yield (
            "[mixer_pattern] and [linear_attention_freq] both choose what each layer is; give one."
        )
        return
    # What is wrong with the pattern itself.
    problems: list[str] = []
    if model.num_layers:
        attempt(problems, kinds_of, model)
    yield from problems


def halves(config: RunConfig) -> Iterator[str]:
    """Experts are where a pattern of half blocks has them, and half blocks have no parallel or second norm."""
    model = config.model
    is_readable = model.num_layers and not _has_two_descriptions(model)
    if model.mixer_pattern is None or not is_readable:
        return
    pattern = attempt([], kinds_of, model)
    if pattern is None:
        return
    # The experts of the pattern, and those of the other options.
    problems: list[str] = []
    wanted = tuple(letter == EXPERTS for letter in pattern)
    found = attempt(problems, lambda: tuple(map(bool, model.experts)))
    if not problems and found != wanted:
        yield (
            "[mixer_pattern] has experts in layers where --num-experts and --moe-layer-freq have none, or the "
            "other way round. Give --num-experts, and leave --moe-layer-freq out: the pattern has their places."
        )
    if model.use_parallel_residual or model.norm_after_sublayer:
        yield (
            "[mixer_pattern]: its layers are halves of blocks, which have neither --use-parallel-residual nor "
            "--norm-after-sublayer. Remove these."
        )


def _has_two_descriptions(model: ModelConfig) -> bool:
    return bool(model.mixer_pattern and model.linear_attention_freq)


def heads(config: RunConfig) -> Iterator[str]:
    """Heads form groups, which ranks divide whole."""
    model = config.model
    letters = attempt([], kinds_of, model) if model.num_layers else None
    if letters is None:
        return
    if DELTA in letters:
        keys = model.linear_num_key_heads
        if model.linear_num_value_heads % keys:
            yield (
                "[linear_num_value_heads] is not a multiple of [linear_num_key_heads], by which they are grouped."
            )
        yield from _divided(config, "linear_num_key_heads", keys)
    if {MAMBA, SIDE_BY_SIDE} & {*letters}:
        groups = model.mamba_num_groups
        if model.hidden_size and model.mamba_heads % groups:
            yield (
                f"[mamba_num_groups] does not divide the {model.mamba_heads} heads of Mamba-2. Use "
                f"--mamba-num-groups {either(divisors(model.mamba_heads))}, or another --mamba-num-heads."
            )
        yield from _divided(config, "mamba_num_groups", groups)


def _divided(config: RunConfig, name: str, groups: int) -> Iterator[str]:
    """Yield what is wrong with a number of groups for these ranks."""
    parallel = config.parallel
    t = parallel.tensor_model_parallel_size
    c = parallel.context_parallel_size
    if groups % t:
        yield (
            f"[{name}] is not a multiple of [tensor_model_parallel_size]: each rank holds whole groups of heads. Use "
            f"--tensor-model-parallel-size {either(divisors(groups))}."
        )
    elif groups // t % c:
        yield (
            f"[{name}] / [tensor_model_parallel_size] is not a multiple of [context_parallel_size]: ranks exchange "
            f"tokens for whole groups of heads. Use --context-parallel-size {either(divisors(groups // t))}."
        )
    if c > 1 and set(parallel.cp_comm_type) != {"a2a"}:
        yield (
            "[cp_comm_type]: a state passes through all tokens of a sequence, so ranks exchange tokens for heads. Use "
            "--cp-comm-type a2a."
        )


def factors(config: RunConfig) -> Iterator[str]:
    """Factors are those of blocks with Mamba-2 beside attention and a dense, gated feed-forward."""
    model = config.model
    values = model.mixer_multipliers
    if values is None:
        return
    if model.linear_attention_type != "mamba_beside_attention":
        yield (
            "[mixer_multipliers] are factors of blocks with Mamba-2 beside attention. Use --linear-attention-type "
            "mamba_beside_attention, or remove them."
        )
    if len(values) != FACTORS or not all(0 < value < math.inf for value in values):
        yield (
            f"[mixer_multipliers] has {len(values)} values, and must have {FACTORS} finite ones above 0: the input and "
            "output of attention, the same of Mamba-2, z, x, B, C, dt, the gate and the output of the feed-forward."
        )
    if model.num_experts or not model.is_gated:
        yield (
            "[mixer_multipliers] has a factor of the gate of a dense feed-forward. Use --swiglu or another activation "
            "with a gate, without --num-experts."
        )


def norms(config: RunConfig) -> Iterator[str]:
    """Norms behind attention, and of all heads, are those of whole blocks with plain attention."""
    model = config.model
    given = [
        name
        for name in ("norms_behind_attention", "qk_layernorm_of_all_heads")
        if getattr(model, name)
    ]
    if not given:
        return
    odd = [
        name
        for name in ("mixer_pattern", "attention_output_gate", "use_parallel_residual")
        if getattr(model, name)
    ]
    odd += [
        name for name in ("qk_layernorm", "norm_after_sublayer") if getattr(model, name)
    ]
    if model.normalization != "RMSNorm" or model.apply_layernorm_1p:
        yield (
            f"[{given[0]}] is of models with RMSNorm and weights around 1. Use --normalization RMSNorm, without "
            "--apply-layernorm-1p."
        )
    for name in odd:
        yield (
            f"[{given[0]}] and [{name}] both describe blocks with attention, which have one of them. Remove one."
        )


def others(config: RunConfig) -> Iterator[str]:
    """Features that know blocks of attention alone are refused."""
    model = config.model
    is_mixed = bool(model.mixer_pattern or model.linear_attention_freq)
    if is_mixed and getattr(model, "sparse_attention", None):
        yield (
            "[sparse_attention]: its layouts are those of models whose layers all have attention. Remove it."
        )
