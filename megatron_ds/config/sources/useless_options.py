"""Options that have no effect beside others: they are left out and noted, with the reason.

Files of a job list such options, since a value of another option turns their feature off. Each row of `USELESS` is a
condition, the options that then mean nothing, and why.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...features import features
from ..messages import written
from ..options.parallel import ACCOUNTS
from ..run import RunConfig, Source, all_options

QUANTIZED = ("zero.zero_quantized_weights", "zero.zero_quantized_gradients")
SAVING = (
    "checkpoint.save_interval",
    "checkpoint.save_total_limit",
    "checkpoint.save_retain_interval",
    "checkpoint.async_save",
    "checkpoint.no_save_optim",
    "checkpoint.extra_save_iters",
)
OF_LOADING = (
    "optimizer.use_checkpoint_opt_param_scheduler",
    "checkpoint.use_checkpoint_args",
    "checkpoint.no_load_optim",
    "checkpoint.finetune",
)
DISK = (
    "zero.nvme_block_size",
    "zero.nvme_queue_depth",
    "zero.nvme_threads",
    "zero.offload_nvme_path",
    "zero.offload_param_nvme_path",
)
ZERO_PLUS_PLUS = (
    "zero.zero_hpz_partition_size",
    "zero.zero_quantized_weights",
    "zero.zero_quantized_gradients",
)
OF_STAGE_3 = (
    "zero.param_persistence_threshold",
    "zero.prefetch_bucket_size",
    "zero.zero_hpz_partition_size",
)
KEPT_INPUTS = ("train.checkpoint_in_cpu", "train.distribute_saved_activations")


@dataclass(frozen=True)
class Useless:
    """Options without effect while `holds`.

    why        the reason, or what makes it of the configuration
    from_json  only those that a DeepSpeed JSON gave: its blocks list keys of features that other keys turn off
    """

    paths: tuple[str, ...]
    why: str | Callable[[RunConfig], str]
    holds: Callable[[RunConfig], bool]
    from_json: bool = False

    def reason(self, config: RunConfig) -> str:
        """Return why the options have no effect."""
        return self.why if isinstance(self.why, str) else self.why(config)


def _one_tile(config: RunConfig) -> bool:
    hidden = config.model.hidden_size
    length = config.model.seq_length
    if config.train.tiled_mlp != 0 or not hidden or not length:
        return False
    return length <= hidden


def _one_tile_text(config: RunConfig) -> str:
    model = config.model
    return (
        f"a tile has as many tokens as the hidden size, {model.hidden_size:,}, and a sequence has "
        f"{model.seq_length:,}"
    )


def _one_data_rank(config: RunConfig) -> bool:
    parallel = config.parallel
    of_model = (
        parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    )
    return config.zero.stage == 3 and config.world_size == of_model


def _sum_dtype(config: RunConfig) -> str:
    return config.zero.communication_data_type or config.optimizer.main_grads_dtype


USELESS = (
    # Experts and recomputation.
    Useless(
        ("parallel.expert_tensor_parallel_size",),
        "there are no experts",
        lambda config: config.model.num_experts is None,
    ),
    Useless(
        ("train.recompute_num_layers",),
        "nothing is recomputed",
        lambda config: (
            config.train.recompute_granularity is None
            and config.train.recompute_num_layers == 1  # Megatron's default
        ),
    ),
    Useless(
        KEPT_INPUTS,
        "it does not turn recomputation on (--recompute-granularity full does)",
        lambda config: config.train.recompute_granularity != "full",
        from_json=True,
    ),
    Useless(
        KEPT_INPUTS[1:],
        "with --sequence-parallel every rank keeps a slice of each activation",
        lambda config: config.parallel.sequence_parallel,
    ),
    Useless(
        KEPT_INPUTS[1:],
        "there is one tensor-parallel rank",
        lambda config: config.parallel.tensor_model_parallel_size == 1,
    ),
    Useless(("train.tiled_mlp",), _one_tile_text, _one_tile),
    # What few ranks, or other types, make needless.
    Useless(
        QUANTIZED,
        "one data-parallel rank sends neither weights nor gradients, so nothing is rounded; with several ranks the "
        "numbers differ",
        _one_data_rank,
    ),
    Useless(
        ("zero.prescale_gradients", "zero.gradient_predivide_factor"),
        lambda config: (
            f"gradients are summed in {_sum_dtype(config)}, which cannot overflow as fp16 does"
        ),
        lambda config: _sum_dtype(config) != "fp16",
    ),
    Useless(
        ACCOUNTS,
        "there is one pipeline stage",
        lambda config: config.parallel.pipeline_model_parallel_size == 1,
    ),
    Useless(
        ("optimizer.loss_scale",),
        "only fp16 scales the loss",
        lambda config: not config.optimizer.fp16,
    ),
    Useless(
        DISK,
        "nothing is offloaded to a disk",
        lambda config: not config.zero.disk_folders(),
        from_json=True,
    ),
    Useless(
        ("zero.sub_group_size", "zero.offload_optimizer_ratio"),
        "the optimizer's state is not offloaded",
        lambda config: config.zero.offload_optimizer == "none",
        from_json=True,
    ),
    Useless(
        OF_STAGE_3,
        lambda config: f"it applies to stage 3, and this is stage {config.zero.stage}",
        lambda config: config.zero.stage != 3,
        from_json=True,
    ),
    Useless(
        ZERO_PLUS_PLUS,
        "one rank sends nothing",
        lambda config: config.world_size == 1,
        from_json=True,
    ),
    Useless(
        ("parallel.cp_comm_type", "parallel.hierarchical_context_parallel_sizes"),
        "one rank holds each sequence",
        lambda config: config.parallel.context_parallel_size == 1,
    ),
    Useless(
        ("data.split",),
        "it divides the corpora of --data-path or --data-args-path, and none is given",
        lambda config: not config.data.is_divided_by_split,
    ),
    # Files that are not read or written.
    Useless(
        OF_LOADING,
        "there is no --load DIR",
        lambda config: config.checkpoint.load is None,
    ),
    Useless(
        SAVING,
        "no checkpoint is written without --save DIR",
        lambda config: config.checkpoint.save is None,
    ),
)


def without_useless_options(config: RunConfig) -> RunConfig:
    """Return the configuration without options that have no effect beside others."""
    added: list[Useless] = []
    for feature in features():
        rows = feature.useless
        added += [Useless(paths, how.why, how.holds) for paths, how in rows]
    for row in (*USELESS, *added):
        if row.holds(config):
            paths = _of_json(config, row.paths) if row.from_json else row.paths
            config = without(config, paths, row.reason(config))
    return config


def _of_json(config: RunConfig, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths that a DeepSpeed JSON gave."""
    sources = {path: config.sources.get(path) for path in paths}
    return tuple(
        path
        for path, source in sources.items()
        if source and source.kind == "deepspeed"
    )


def without(config: RunConfig, paths: tuple[str, ...], why: str) -> RunConfig:
    """Return the options set to their defaults; those that had another value are noted with the reason."""
    given = [path for path in paths if not config.is_default(path)]
    if not given:
        return config
    notes = {written(config, path): why for path in given}
    defaults = {path: all_options()[path].default for path in given}
    config = config.with_values(defaults, Source("derived", why))
    sources = {
        path: source for path, source in config.sources.items() if path not in given
    }
    return replace(
        config, sources=sources, without_effect={**config.without_effect, **notes}
    )
