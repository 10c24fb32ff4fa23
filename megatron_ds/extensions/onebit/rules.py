"""Rules about the options of 1-bit optimizers, and about what a run with one of them may ask for."""

from collections.abc import Iterator

from ...config.messages import flag, given
from ...config.run import RunConfig

FROZEN = ("onebit_adam", "onebit_lamb")
ZERO_ONE = "zero_one_adam"


def one_bit(config: RunConfig) -> Iterator[str]:
    """Between exchanges gradients are those of each rank, so nothing may ask for their sum. (ZeRO: see
    `OneBitRule.check`.)"""
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
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size
    if config.model.num_experts and parallel.expert_tensor_parallel_size not in (
        None,
        tp,
    ):
        yield (
            "[expert_tensor_parallel_size] differs from [tensor_model_parallel_size], and with [optimizer] the "
            "same ranks have to compress all parameters of a layer. Remove --expert-tensor-parallel-size."
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
