"""Rules about the options of optimizers, and about what a run with one of them may ask for."""

from collections.abc import Iterable, Iterator

from ..messages import flag, given
from ..optimizer_facts import FACTS, MOMENTS, OptimizerFacts, facts_of
from ..run import RunConfig
from .group_rules import group_rules

FROZEN = ("onebit_adam", "onebit_lamb")
ZERO_ONE = "zero_one_adam"


def _own_paths(optimizers: Iterable[OptimizerFacts]) -> dict[str, None]:
    """Paths of the options that only these optimizers have, in the order of the optimizers."""
    paths = {}
    for facts in optimizers:
        paths |= dict.fromkeys(f"optimizer.{name}" for name in facts.own_fields)
    return paths


def optimizer_options(config: RunConfig) -> Iterator[str]:
    """Options of one optimizer have no effect on another one."""
    facts = facts_of(config.optimizer.optimizer)
    rules = group_rules(config.optimizer.param_groups)
    if facts is None:
        return
    # Options of the optimizers in use, and those that only other optimizers have.
    used = (facts, *(facts_of(rule.optimizer) for rule in rules))
    own = _own_paths(one for one in used if one is not None)
    others = [path for path in _own_paths(FACTS.values()) if path not in own]
    yield from given(
        config,
        others,
        "is not an option of [optimizer], which has "
        f"{', '.join(map(flag, own))}. Remove it.",
    )
    # Rules of single optimizers.
    yield from _one_bit(config)
    yield from _adam_variants(config) if facts.name == "adam" else ()
    yield from _muon_parts(config) if facts.name == "muon" else ()
    if config.optimizer.lamb_min_coeff > config.optimizer.lamb_max_coeff:
        yield "[lamb_min_coeff] is above [lamb_max_coeff]: no trust ratio is between them. Lower the minimum."


def _adam_variants(config: RunConfig) -> Iterator[str]:
    if config.optimizer.adam_amsgrad and not config.optimizer.adam_bias_correction:
        yield (
            "[adam_amsgrad] is torch's, which corrects its moments, but [adam_bias_correction]. Remove "
            "one of them."
        )


def _muon_parts(config: RunConfig) -> Iterator[str]:
    o = config.optimizer
    lion = ("optimizer.lion_beta1", "optimizer.lion_beta2")
    adam = [f"optimizer.{name}" for names in MOMENTS.values() for name in names]
    others = adam if o.muon_scalar_optimizer == "lion" else lion
    # Defaults of a JSON are no wish.
    wished = [
        path
        for path in others
        if path in config.sources and config.sources[path].kind != "deepspeed"
    ]
    yield from given(
        config,
        wished,
        "is not an option of [muon_scalar_optimizer], which updates what is not "
        "a matrix. Remove it.",
    )
    if o.muon_coefficient_type == "cubic5" and o.muon_num_ns_steps != 5:
        yield "[muon_coefficient_type] has coefficients of 5 iterations, but [muon_num_ns_steps]. Use 5."
    if o.muon_per_head and not o.muon_split_qkv:
        yield "[muon_per_head] divides what [muon_split_qkv] leaves in one. Remove one of them."


def _one_bit(config: RunConfig) -> Iterator[str]:
    """Between exchanges gradients are those of each rank, so nothing may ask for their sum. (ZeRO: see
    `zero/settings.py`.)"""
    # Numbers of the optimizers.
    o = config.optimizer
    train = config.train
    if o.factor_min > o.factor_max:
        yield "[factor_min] is above [factor_max]: no factor is between them. Lower the minimum."
    if o.optimizer not in (*FROZEN, ZERO_ONE):
        return
    # Features that need the sum of the gradients.
    for path in ("profiler.grad_noise_scale", "logging.log_num_zeros_in_grad"):
        yield from given(
            config,
            [path],
            "needs the gradient of the global batch, but with [optimizer] "
            "ranks exchange signs, not gradients. Remove it, or use another "
            "optimizer.",
        )
    if config.parallel.expert_model_parallel_size > 1:
        yield (
            "[expert_model_parallel_size] with [optimizer]: one scale is sent for each parameter, and "
            "here the experts of one are on several ranks. Use --expert-model-parallel-size 1."
        )
    # The steps in which ranks exchange.
    if o.optimizer == ZERO_ONE:
        yield from given(
            config,
            ["train.check_weight_hash_across_dp_replicas_interval"],
            "compares weights of data-parallel ranks, but with [optimizer] they differ between "
            "exchanges. Remove it, or set --local-step-clipper 1 and compare checkpoints.",
        )
    elif (
        train.train_iters
        and o.freeze_step >= train.train_iters
        and not _is_of_engine(config)
    ):
        yield (
            f"[freeze_step] is not below [train_iters]: the run would end before it compresses anything. "
            f"Use {flag('optimizer.freeze_step')} {max(1, train.train_iters * 15 // 100)} to "
            f"{max(1, train.train_iters // 4)}, 15 to 25 % of the steps."
        )


def _is_of_engine(config: RunConfig) -> bool:
    """Whether the program decides how long it trains."""
    source = config.sources.get("train.train_iters")
    return source is not None and source.kind == "script"
