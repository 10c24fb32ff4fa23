"""A recipe's configuration shrunk to a size that this machine trains in seconds.

Kept: the kind of model, the schedules of learning rate and pipeline, optimizer, precision, ZeRO,
recomputation, and each kind of parallelism that has more than one rank, with two ranks, as long as there are
at most RANKS. Shrunk: layers, widths, heads, length, vocabulary, experts, batch, and the length of training.
Replaced: data and tokenizer, by mock data; folders and trackers, by none. What does not fit the small sizes
is left out; the result names it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...config import RunConfig, Source
from ...config.options.layer_pattern import read_layer_pattern
from ...config.run import all_options
from ...config.sources.config_text import to_yaml
from ...config.sources.flags import spellings
from ...config.sources.reading import ConfigProblems
from ...errors import ConfigError

RANKS = 4  # processes that a small machine can start
STEPS = 3
HEADS = 4
HEAD_DIM = 16
LENGTH = 64
VOCABULARY = 250
EXPERTS = 4
WIDTH = HEADS * HEAD_DIM
FIRST_SCALE = 1024.0  # of the loss in fp16
ROUNDS = 8  # of leaving out options that do not fit
SOURCE = Source("yaml", "the tiny run")
# Sections and options that have their defaults in a tiny run.
LEFT_SECTIONS = (
    "services",
    "checkpoint",
    "curriculum",
    "random_ltd",
    "profiler",
    "plan",
    "logging",
)
LEFT_OPTIONS = (
    "data.data_path",
    "data.split",
    "data.train_data_path",
    "data.valid_data_path",
    "data.test_data_path",
    "data.data_args_path",
    "data.per_split_data_args_path",
    "data.blend_weights",
    "data.data_cache_path",
    "data.vocab_file",
    "data.merge_file",
    "data.tokenizer_model",
    "data.pack_documents",
    "data.sft",
    "data.fim_data",
    "data.fim_rate",
    "data.fim_spm_rate",
    "data.fim_split_sample",
    "data.fim_fragment_rate",
    "data.fim_no_prefix",
    "data.data_readers",
    "train.exit_interval",
    "train.exit_duration_in_mins",
    "train.kill_switch_path",
    "train.trigger_path",
    "train.skip_train",
    "train.rampup_batch_size",
    "train.step_batch_size_schedule",
    "train.gradient_accumulation_steps",
    "train.eval_global_batch_size",
    "parallel.num_layers_per_virtual_pipeline_stage",
    "parallel.pipeline_layout",
    "parallel.decoder_first_pipeline_num_layers",
    "parallel.decoder_last_pipeline_num_layers",
    "parallel.account_for_embedding_in_pipeline_split",
    "parallel.account_for_loss_in_pipeline_split",
    "parallel.microbatch_group_size_per_virtual_pipeline_stage",
    "parallel.pipeline_costs_path",
    "parallel.hierarchical_context_parallel_sizes",
    "model.moe_router_num_groups",
    "model.moe_router_group_topk",
    "zero.zero_hpz_partition_size",
)


@dataclass(frozen=True)
class Tiny:
    """A tiny run. text: the YAML for --config; left_out: option → why it is not part of the run."""

    config: RunConfig
    text: str
    ranks: int
    left_out: Mapping[str, str]


def shrunk(
    config: RunConfig, parsed: Callable[[str, int], RunConfig], scratch: str
) -> Tiny:
    """Return the tiny run of a recipe's configuration. Raises ConfigError if it cannot be made.

    parsed   function from (YAML text, ranks) to the configuration; raises ConfigError with its problems
    scratch  folder for offloaded state
    """
    # The values of the tiny run replace those of the recipe.
    sizes = _parallel_sizes(config)
    values = {
        **_defaults(config),
        **sizes,
        **_model(config, sizes),
        **_training(config, sizes),
        **_files(config, scratch),
    }
    ranks = _ranks(sizes)
    left_out = {
        all_options()[path].flag: f"{RANKS} processes are too few"
        for path in SIZES
        if config.get(path) > 1 and sizes[path] == 1
    }
    small = config.with_values(
        {path: value for path, value in values.items() if path != COPIES}, SOURCE
    )
    # Options that do not fit the tiny run return to their defaults, and the result is parsed again.
    for _ in range(ROUNDS):
        text = to_yaml(small)
        try:
            return Tiny(parsed(text, ranks), text, ranks, left_out)
        except ConfigError as error:
            misfits = dict(_misfits(small, error, values))
            if not misfits:
                raise
            left_out |= {all_options()[path].flag: why for path, why in misfits.items()}
            small = small.with_values(
                {path: all_options()[path].default for path in misfits}, SOURCE
            )
    raise ConfigError(
        f"what is left of the recipe still does not fit after {ROUNDS} changes."
    )


def _misfits(
    config: RunConfig, error: ConfigError, fixed: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield (option, problem) for each problem that names an option which the recipe gives and which may change."""
    problems = error.problems if isinstance(error, ConfigProblems) else (str(error),)
    for problem in problems:
        flags = re.findall(r"--[a-zA-Z0-9_-]+", problem)
        for flag in flags:
            spelling = spellings().get(flag)
            if spelling is None:
                continue
            path = spelling.option.path
            if (
                path not in fixed
                and not config.is_default(path)
                and not spelling.option.required
            ):
                yield path, problem.partition(". ")[0][:160]
                break


# --------------------------------------------------------------------------------------------- the parts
SIZES = (
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
    "parallel.context_parallel_size",
    "parallel.expert_model_parallel_size",
)
TENSOR, PIPELINE, CONTEXT, EXPERT = SIZES
COPIES = "data"  # the data-parallel size, which is no option


def _parallel_sizes(config: RunConfig) -> dict[str, int]:
    """Return two ranks for each kind of parallelism that has several, in the order of the list, up to RANKS."""
    has_copies = config.data_parallel_size and config.data_parallel_size > 1
    order = (
        (TENSOR, COPIES, PIPELINE, CONTEXT)
        if config.model.num_experts
        else (TENSOR, PIPELINE, COPIES, CONTEXT)
    )
    sizes = dict.fromkeys((*SIZES, COPIES), 1)
    ranks = 1
    for kind in order:
        several = has_copies if kind == COPIES else config.get(kind) > 1
        if several and 2 * ranks <= RANKS:
            sizes[kind], ranks = 2, 2 * ranks
    # Experts are divided over copies, and over the ranks of a dense layer that do not divide an expert.
    places = (
        sizes[COPIES] * sizes[CONTEXT] * sizes[TENSOR] // _expert_tensor(config, sizes)
    )
    if config.get(EXPERT) > 1 and places > 1:
        sizes[EXPERT] = 2
    return sizes


def _expert_tensor(config: RunConfig, sizes: Mapping[str, int]) -> int:
    """Return the ranks that divide an expert: as many as a dense layer, or fewer if the recipe has fewer."""
    tp = sizes[TENSOR]
    return min(config.parallel.expert_tensor_parallel_size or tp, tp)


def _ranks(sizes: Mapping[str, int]) -> int:
    return sizes[TENSOR] * sizes[PIPELINE] * sizes[CONTEXT] * sizes[COPIES]


def _defaults(config: RunConfig) -> dict[str, Any]:
    """Return the options that take their defaults."""
    paths = [path for path in all_options() if path.partition(".")[0] in LEFT_SECTIONS]
    return {path: all_options()[path].default for path in (*paths, *LEFT_OPTIONS)}


def _model(config: RunConfig, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the sizes of the model. Options that the recipe leaves to their default stay there."""
    # Every chunk of every stage has a layer, and a small pipeline has two.
    model = config.model
    stages = sizes[PIPELINE]
    chunks = 2 if stages > 1 and _has_chunks(config) else 1
    layers = 2 * stages * chunks if stages * chunks < 4 else stages * chunks
    groups = model.num_query_groups
    given = {
        "model.ffn_hidden_size": 2 * WIDTH,
        "model.kv_channels": HEAD_DIM,
        "model.num_query_groups": HEADS
        if groups == model.num_attention_heads
        else min(groups or 1, 2),
        "model.max_position_embeddings": LENGTH,
        "model.original_max_position_embeddings": LENGTH // 2,
        "model.moe_ffn_hidden_size": WIDTH // 2,
        "model.moe_shared_expert_intermediate_size": WIDTH // 2,
        "model.window_size": (LENGTH // 4 - 1, 0),
        "train.recompute_num_layers": 1,
        "parallel.expert_tensor_parallel_size": _expert_tensor(config, sizes),
    }
    # Only options that the recipe sets are shrunk.
    values = {
        path: value for path, value in given.items() if config.get(path) is not None
    }
    # A pattern of layers keeps its last entries.
    patterns = "moe_layer_freq", "window_attn_skip_freq", "no_rope_freq"
    for path in (f"model.{name}" for name in patterns):
        if (text := config.get(path)) and not text.isdecimal():
            pattern = read_layer_pattern(text, all_options()[path].flag)
            values[path] = (
                str(list(pattern)[-layers:]) if not isinstance(pattern, int) else text
            )
    if model.num_experts is not None and model.num_experts != (1,):
        experts = min(min(model.num_experts), EXPERTS)
        values |= {
            "model.num_experts": (experts,),
            "model.moe_router_topk": min(model.moe_router_topk, 2),
        }
    return {
        **values,
        "model.num_layers": layers,
        "model.hidden_size": WIDTH,
        "model.num_attention_heads": HEADS,
        "model.seq_length": LENGTH,
        "model.vocab_size": VOCABULARY,
        "parallel.num_virtual_stages_per_pipeline_rank": chunks if chunks > 1 else None,
    }


def _has_chunks(config: RunConfig) -> bool:
    parallel = config.parallel
    whole = parallel.num_layers_per_virtual_pipeline_stage or 0
    each = (config.model.num_layers or 0) // parallel.pipeline_model_parallel_size
    return (parallel.num_virtual_stages_per_pipeline_rank or 1) > 1 or 0 < whole < each


def _training(config: RunConfig, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the batch and lengths: STEPS steps, whose warm-up and final decay have one each."""
    # The batch has enough micro-batches to fill the pipeline.
    train = config.train
    rate = config.optimizer
    micro = min(train.micro_batch_size or 1, 2)
    accumulation = max(2, 2 * (sizes[PIPELINE] - 1)) if sizes[PIPELINE] > 1 else 2
    batch = micro * sizes[COPIES] * accumulation
    units = {"iters": 1, "samples": batch, "tokens": batch * LENGTH}
    values: dict[str, Any] = {
        "train.micro_batch_size": micro,
        "train.global_batch_size": batch,
        "train.eval_iters": 0,
    }
    # Lengths keep the unit in which the recipe gives them.
    for unit, size in units.items():
        spans = {
            f"train.train_{unit}": STEPS,
            f"optimizer.lr_decay_{unit}": STEPS,
            f"optimizer.lr_warmup_{unit}": 1,
            f"optimizer.lr_wsd_decay_{unit}": 1,
        }
        values |= {
            path: steps * size
            for path, steps in spans.items()
            if path in all_options() and config.get(path)
        }
    # A run without a length or a rate receives one.
    lengths = ("train.train_iters", "train.train_samples", "train.train_tokens")
    if not any(values.get(path) for path in lengths):
        values["train.train_iters"] = STEPS
    if rate.lr is None:
        values["optimizer.lr"] = 1e-4
    if rate.fp16:  # a larger scale would skip all steps
        values["optimizer.initial_loss_scale"] = min(
            rate.initial_loss_scale, FIRST_SCALE
        )
        values["optimizer.min_loss_scale"] = min(rate.min_loss_scale, FIRST_SCALE)
    return values


def _files(config: RunConfig, scratch: str) -> dict[str, Any]:
    """Return mock data, a log of every step, and a folder for what is offloaded to a disk."""
    values = {
        "data.mock_data": True,
        "data.tokenizer_type": "NullTokenizer",
        "data.num_workers": 0,
        "logging.log_interval": 1,
        "logging.progress_bar": False,
        "parallel.distributed_timeout_minutes": 2.0,
    }
    for path in ("zero.offload_nvme_path", "zero.offload_param_nvme_path"):
        if config.get(path) is not None:
            values[path] = scratch
    return values


def changed(config: RunConfig, tiny: Tiny) -> Sequence[str]:
    """Return `--flag value (was value)` of the sizes that differ from the recipe's."""
    shown = (
        "model.num_layers",
        "model.hidden_size",
        "model.seq_length",
        *SIZES,
        "train.global_batch_size",
    )
    pairs = [(path, config.get(path), tiny.config.get(path)) for path in shown]
    return [
        f"{all_options()[path].flag} {after} (was {before})"
        for path, before, after in pairs
        if before != after and before is not None
    ]
