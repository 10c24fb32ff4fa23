"""Settings of all sources → one `RunConfig`.

    defaults  <  values of the entry script  <  files (YAML and DeepSpeed JSON)  <  flags

Two files that give one option different values are an error, because neither takes precedence. After that,
missing batch sizes are derived, and options that have no effect together with others are left out: they are
noted in `RunConfig.without_effect`, which startup prints.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ...features import features
from ..options.moe import MOE_PATHS
from ..options.parallel import ACCOUNTS, COUNTS
from ..run import RUN, RunConfig, Source, all_options
from ..training_schedule import parse_batch_steps
from .reading import Deferred, Setting, is_deferred, reject
from .useless_options import SAVING, without, without_useless_options


def merge(
    files: Sequence[Setting],
    flags: Sequence[Setting],
    world_size: int = 1,
    scripted: Sequence[Setting] = (),
) -> RunConfig:
    """`combined`, but raises ConfigError if files contradict each other."""
    reject(contradictions(files, flags))
    return combined(files, flags, world_size, scripted)


def contradictions(files: Iterable[Setting], flags: Iterable[Setting]) -> list[str]:
    """Return a problem for each option to which files give different values, unless a flag overrides them."""
    decided = {setting.path for setting in flags}
    first: dict[str, Setting] = {}
    wrong = []
    for setting in files:
        before = first.setdefault(setting.path, setting)
        if before.value != setting.value and setting.path not in decided:
            option = all_options()[setting.path]
            wrong.append(
                f"{option.flag} is {before.value} in {before.source} but {setting.value} in "
                f"{setting.source}: files do not override each other. Remove one of the two, or "
                f"override both with {option.flag}."
            )
    return wrong


def combined(
    files: Sequence[Setting],
    flags: Sequence[Setting],
    world_size: int = 1,
    scripted: Sequence[Setting] = (),
) -> RunConfig:
    """Return the configuration that all settings together describe; the first of two files wins.

    scripted: values of the entry script
    """
    # A deferred flag stands beside another value of its option, which it may read.
    late = [setting for setting in flags if is_deferred(setting)]
    plain = [setting for setting in flags if not is_deferred(setting)]
    chosen = {
        setting.path: setting for setting in (*scripted, *reversed(files), *plain)
    }
    config = RunConfig(world_size=world_size)
    for setting in (*sorted(chosen.values(), key=is_deferred), *late):
        value = setting.value
        if isinstance(value, Deferred):
            value = value.of(config)
            if value is None:
                continue
        config = config.with_values({setting.path: value}, setting.source)
    if config.plan.is_dry and config.plan.world_size:
        config = replace(config, world_size=config.plan.world_size)
    config = with_ulysses(with_activation(config))
    config = with_implied(with_finetuning(config))
    # What options mean beside others, and then those that mean nothing.
    config = _with_tokenizer(_with_experts(config))
    if config.data.mock_data:
        config = _with_mock_data(config)
    config = _with_rows(config, files)
    config = without_useless_options(_with_recomputation(config))
    return with_batch_sizes(with_evaluation_only(_with_layout(config)))


def with_evaluation_only(config: RunConfig) -> RunConfig:
    """--skip-train needs no learning rate, length of training or optimizer state, and saves nothing."""
    train = config.train
    why = "no step is made with --skip-train"
    if not train.skip_train:
        return config
    if config.optimizer.lr is None:
        config = _derived(config, "optimizer.lr", 1.0, why)
    if train.train_iters is train.train_samples is train.train_tokens is None:
        config = _derived(config, "train.train_iters", 0, why)
    if config.checkpoint.load is not None:
        config = _derived(config, "checkpoint.no_load_optim", True, why)
    return without(config, ("checkpoint.save", *SAVING), why)


def with_activation(config: RunConfig) -> RunConfig:
    """Without Megatron's fused GELU, which is the tanh approximation, GELU is exact. Megatron fuses it with
    the bias of the linear layer before it, so without biases it is exact, too.
    """
    fused = config.train.bias_gelu_fusion and config.model.add_bias_linear
    if fused or "model.activation" in config.sources:
        return config
    why = (
        "--disable-bias-linear"
        if config.train.bias_gelu_fusion
        else "--no-bias-gelu-fusion"
    )
    return _derived(config, "model.activation", "gelu_exact", why)


def with_finetuning(config: RunConfig) -> RunConfig:
    """--sft packs conversations into rows, of which some have more answers than others: tokens weigh alike."""
    objective = config.objective
    is_of_tokens = objective is None or objective.is_of_tokens
    if not config.data.sft or not is_of_tokens:
        return config
    for path in ("data.pack_documents", "train.calculate_per_token_loss"):
        if path not in config.sources:  # rules refuse False
            config = _derived(config, path, True, "--sft")
    return config


def with_implied(config: RunConfig) -> RunConfig:
    """Return the config with what features set where no source does, or in any case."""
    for feature in features():
        implied = feature.implies(config) if feature.implies is not None else {}
        for path, (value, why, *replaces) in implied.items():
            if replaces or path not in config.sources:
                config = _derived(config, path, value, why)
    return config


def with_ulysses(config: RunConfig) -> RunConfig:
    """Megatron-DeepSpeed's name of the context-parallel size stands for one way to share attention."""
    source = config.sources.get("parallel.context_parallel_size")
    if (
        source is None
        or source.name != ULYSSES
        or "parallel.cp_comm_type" in config.sources
    ):
        return config
    return _derived(config, "parallel.cp_comm_type", ("a2a",), ULYSSES)


def with_batch_sizes(config: RunConfig) -> RunConfig:
    """Fill in what is missing of: global batch = micro-batch × accumulation steps × data-parallel size.

    The micro-batch is derived only if a DeepSpeed JSON gave one of the others, as DeepSpeed does. With
    Megatron's flags it is required: a forgotten flag should not mean the largest micro-batch. Does nothing
    where a number is not divisible; `rules` reports that.
    """
    # The numbers as given.
    train = config.train
    ranks = config.data_parallel_size
    micro = train.micro_batch_size
    total = train.global_batch_size
    steps = train.gradient_accumulation_steps
    if not ranks:
        return config
    alike = f"{f'{steps} steps × ' if steps else ''}{ranks} data-parallel ranks"  # micro-batches of a step
    kinds = {
        source.kind
        for path, source in config.sources.items()
        if path.startswith("train.")
    }
    # The micro-batch of a DeepSpeed JSON.
    if (
        micro is None
        and total
        and total % (ranks * (steps or 1)) == 0
        and (steps or "deepspeed" in kinds)
    ):
        micro = total // (ranks * (steps or 1))
        config = _derived(
            config, "train.micro_batch_size", micro, f"global batch {total} / ({alike})"
        )
    # The global batch.
    if total is None and (total := _last_of_schedule(config)):
        config = _derived(
            config,
            "train.global_batch_size",
            total,
            "the last of --step-batch-size-schedule",
        )
    if total is None and micro is not None:
        total = micro * ranks * (steps or 1)
        config = _derived(
            config, "train.global_batch_size", total, f"micro-batch {micro} × {alike}"
        )
    # Steps that follow from the other two are not kept.
    if steps is not None and micro is not None and total == micro * steps * ranks:
        config = replace(
            config, train=replace(config.train, gradient_accumulation_steps=None)
        )
    return config


def _derived(config: RunConfig, path: str, value: Any, why: str) -> RunConfig:
    return config.with_values({path: value}, Source("derived", why))


def _last_of_schedule(config: RunConfig) -> int | None:
    """Return the last size of --step-batch-size-schedule, if it can be read."""
    train = config.train
    seq_length = config.model.seq_length
    if not train.step_batch_size_schedule or not seq_length:
        return None
    try:
        return parse_batch_steps(train.step_batch_size_schedule, seq_length)[-1][1]
    except ValueError:
        return None


PAI_TOKENIZER = "--patch-tokenizer-type"  # its files are in the folder of --load
OLD_METHOD = "--activations-checkpoint-method"
ULYSSES = "--ds-sequence-parallel-size"
MOCK_INSTEAD = "--mock-data is used instead"
DATA = (
    "data.data_path",
    "data.split",
    "data.train_data_path",
    "data.valid_data_path",
    "data.test_data_path",
    "data.data_args_path",
    "data.per_split_data_args_path",
    "data.blend_weights",
)
TOKENIZER_FILES = ("data.vocab_file", "data.merge_file", "data.tokenizer_model")
BARE = "NullTokenizer"  # of ids without text
GPT2_TOKENS = 50_256  # plus the end-of-document token, which NullTokenizer adds


CAPACITY = (
    "model.moe_expert_capacity_factor",
    "model.moe_eval_capacity_factor",
    "model.moe_min_capacity",
    "model.moe_token_drop_policy",
    "model.moe_capacity_scope",
)


def _with_layout(config: RunConfig) -> RunConfig:
    """Return the layers of each stage, where options other than --pipeline-layout state them."""
    if config.parallel.pipeline_layout is not None:
        return config
    if all(map(config.is_default, (*COUNTS, *ACCOUNTS))):
        return config
    from ..rules.uneven_stages import uneven_layout

    layout = uneven_layout(config)
    if layout is None:
        return config
    return _derived(
        config, "parallel.pipeline_layout", layout, "the layers of the stages"
    )


def _with_tokenizer(config: RunConfig) -> RunConfig:
    """Return the tokenizer of Megatron's entry scripts, if files of it are given without its type."""
    # PAI's tokenizer lies in the folder of the weights.
    data = config.data
    source = config.sources.get("data.tokenizer_type")
    if (
        source is not None
        and source.name == PAI_TOKENIZER
        and data.tokenizer_model is None
    ):
        return _derived(
            config,
            "data.tokenizer_model",
            config.checkpoint.load,
            "the folder of --load",
        )
    # The files name the type.
    if data.tokenizer_type is not None or data.mock_data or not data.vocab_file:
        return config
    if data.merge_file:
        return _derived(
            config,
            "data.tokenizer_type",
            "GPT2BPETokenizer",
            "--vocab-file and --merge-file",
        )
    return config


def _with_mock_data(config: RunConfig) -> RunConfig:
    """Leave out the corpus of a file if --mock-data is a flag, and with --vocab-size its tokenizer, unless
    the size is that of a checkpoint; in a file it is an error beside a corpus. Mock tokens need a vocabulary
    size, but no tokenizer.
    """
    # The flag replaces what a file names.
    source = config.sources.get("data.mock_data")
    if source is not None and source.kind == "flag":
        config = without(config, DATA, MOCK_INSTEAD)
        size = config.sources.get("model.vocab_size")
        if (
            config.data.tokenizer_type not in (None, BARE)
            and size
            and size.kind != "script"
        ):
            config = without(
                config,
                ("data.tokenizer_type", *TOKENIZER_FILES),
                "mock data needs no tokenizer",
            )
    # Without a tokenizer the ids are bare.
    if config.data.tokenizer_type is not None:
        return config
    config = _derived(config, "data.tokenizer_type", BARE, "for --mock-data")
    has_files = bool(config.data.vocab_file or config.data.merge_file)
    config = without(config, TOKENIZER_FILES, "mock data needs no tokenizer")
    # Files of a vocabulary stand for GPT-2's size.
    if has_files and config.model.vocab_size is None:
        config = _derived(
            config,
            "model.vocab_size",
            GPT2_TOKENS,
            "GPT-2's vocabulary, for --mock-data",
        )
    return config


def _with_rows(config: RunConfig, files: Sequence[Setting]) -> RunConfig:
    """Return the --vocab-size by which the model of a run.json keeps its rows, of which NullTokenizer does not
    count one.
    """
    size = "model.vocab_size"
    source = config.sources.get(size)
    if source is None or source.kind != RUN:
        return config
    saved = [s.value for s in files if s.path == "data.tokenizer_type"]
    more = (BARE in saved) - (config.data.tokenizer_type == BARE)
    rows = config.model.vocab_size
    if not more or rows is None:
        return config
    return _derived(config, size, rows + more, f"{source} and {BARE}")


def _with_experts(config: RunConfig) -> RunConfig:
    """One expert is a dense model, as in Megatron-DeepSpeed, whose dense recipes have such options too."""
    model = config.model
    if model.num_experts is None:  # `rules.moe` lists the other options
        return config
    if model.num_experts == (1,):
        return without(config, MOE_PATHS, "one expert is a dense model")
    if not model.moe_token_dropping:
        config = without(config, CAPACITY, "no token is dropped")
    if model.moe_router_score_function == "sigmoid":
        config = without(
            config,
            ("model.moe_router_pre_softmax",),
            "scores are sigmoids, without a softmax",
        )
    if (
        model.moe_input_jitter_eps is not None
        and "model.moe_router_noise" not in config.sources
    ):
        config = _derived(
            config, "model.moe_router_noise", "jitter", "--moe-input-jitter-eps"
        )
    return config


def _with_recomputation(config: RunConfig) -> RunConfig:
    """Megatron's older name of the method recomputes whole layers; groups of one layer are the default."""
    source = config.sources.get("train.recompute_method")
    has_old_name = source is not None and source.name == OLD_METHOD
    if has_old_name and config.train.recompute_granularity is None:
        config = _derived(config, "train.recompute_granularity", "full", OLD_METHOD)
    train = config.train
    if train.recompute_method == "uniform" and train.recompute_num_layers == 1:
        config = replace(config, train=replace(train, recompute_num_layers=None))
    return config
