"""The configuration of a teacher: the model of its checkpoint, in the layout of the student's run."""

import logging
from dataclasses import replace
from functools import lru_cache

from ...config import RunConfig, Source
from ...config.options.model import ModelConfig
from ...config.options.parallel import ParallelConfig, ZeroConfig
from ...config.options.training import (
    CheckpointConfig,
    OptimizerConfig,
    TrainConfig,
)
from ...config.parse import check
from ...data.tokenizers import Tokenizer
from ...errors import CheckpointError, ConfigError
from ...mpu.launch_facts import Launch
from ...planning.run_plan import RULES, pipeline_shape
from ...training.run_tokenizer import with_tokenizer
from ..evaluation.checkpoint_model import evaluation_config
from .options import DistillationConfig

logger = logging.getLogger(__name__)
TEACHER = Source("script", "the checkpoint of --distill-from")
MOST_OTHER = 0.1  # of the teacher's tokens
# Chunks of the head of a teacher whose hidden states are kept: any number above 1 leaves its product to the loss.
NOT_COMPUTED = 2
# Lengths of the data and of the padded vocabulary, which are those of the run.
OF_ROWS = ("seq_length", "make_vocab_size_divisible_by")
# What of a training a forward has, too.
OF_TRAINING = (
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "train_samples",
    "train_tokens",
    "calculate_per_token_loss",
    "seed",
    "kernels",
    "tiled_mlp",
)


def teacher_config(config: RunConfig) -> RunConfig:
    """Return the configuration of the teacher of a run. config: must have the size of the vocabulary.

    Reads the folder; not collective. Raises CheckpointError and ConfigError where it has no model, one with another
    vocabulary, or one that the layout cannot hold.
    """
    folder = config.of(DistillationConfig).folder
    try:
        model = saved_model(folder)
    except (CheckpointError, ConfigError) as error:
        raise of_teacher(error, folder) from None
    rows = config.model.vocab_size
    assert rows is not None, "the tokenizer has given it"
    if model.vocab_size != rows:
        raise ConfigError(
            f"--distill-from {folder}: the teacher has a vocabulary of {model.vocab_size} tokens, and this run has "
            f"{rows}. Their predictions can be compared for the same tokens alone: train with the teacher's "
            f"tokenizer, and with --vocab-size {model.vocab_size} where its model has more rows than tokens."
        )
    # Known with the tokenizer, which may have other tokens than --vocab-size.
    count = config.of(DistillationConfig).distill_top_k
    if count is not None and count >= rows:
        raise ConfigError(
            f"--distill-top-k {count} of a vocabulary of {rows} tokens leaves no other token. Remove it for the whole "
            f"vocabulary, or give at most {rows - 1}."
        )
    teacher = _in_layout_of(config, model)
    try:
        check(teacher, rules=RULES)
    except ConfigError as error:
        raise ConfigError(
            f"--distill-from {folder}: the layout of this run does not suit the teacher. {error}"
        ) from None
    return teacher


def check_tokens(folder: str, ours: Tokenizer) -> None:
    """Raises ConfigError if more of the teacher's tokens have other ids in this run than special ones may, and logs
    where some have. A folder without a tokenizer has no names of tokens."""
    theirs = getattr(_saved(folder)[1], "vocab", {})
    here = getattr(ours, "vocab", theirs)
    others = [token for token, number in theirs.items() if here.get(token) != number]
    if not others:
        return
    first = others[0]
    text = (
        f"--distill-from {folder}: of {len(theirs):,} tokens of the teacher {len(others):,} have other ids in this run,"
        f" such as {first!r}, {theirs[first]} there and {here.get(first)} here: its predictions are of other tokens. "
        "Train with the teacher's tokenizer."
    )
    if len(others) > MOST_OTHER * len(theirs):
        raise ConfigError(text)
    logger.warning("%s", text)


def of_teacher(error: Exception, folder: str) -> CheckpointError:
    """Return the error about the folder of a teacher, which loads as that of --load does."""
    text = str(error).replace(f"--load {folder}", folder)
    text = text.replace("--load takes", "--distill-from takes")
    return CheckpointError(f"--distill-from: {text}")


def saved_model(folder: str) -> ModelConfig:
    """Return the model in a folder, with the size of its vocabulary."""
    return _saved(folder)[0].model


@lru_cache(maxsize=4)
def _saved(folder: str) -> tuple[RunConfig, Tokenizer]:
    return with_tokenizer(evaluation_config(["--load", folder], Launch()))


def _in_layout_of(config: RunConfig, model: ModelConfig) -> RunConfig:
    """Return the model where the layers of the student are."""
    optimizer = config.optimizer
    is_whole = config.of(DistillationConfig).distill_top_k is None
    train = {name: getattr(config.train, name) for name in OF_TRAINING}
    own = {name: getattr(config.model, name) for name in OF_ROWS}
    model = replace(model, **own)
    parallel = _as_many_stages(config, any(model.experts))
    # Messages name the checkpoint for what is the model's, and the options of the run for the rest.
    sources = {f"model.{name}": TEACHER for name in vars(model).keys() - own.keys()}
    of_run = {f"parallel.{name}" for name in vars(parallel)} | {"model.seq_length"}
    sources |= {path: config.sources[path] for path in of_run & config.sources.keys()}
    # Everything else has its default: a forward has no optimizer, and recomputes nothing.
    return RunConfig(
        model=model,
        parallel=parallel,
        zero=_split_alike(config.zero),
        optimizer=OptimizerConfig(
            lr=optimizer.lr, fp16=optimizer.fp16, bf16=optimizer.bf16
        ),
        train=TrainConfig(
            **train, cross_entropy_chunks=NOT_COMPUTED if is_whole else 0
        ),
        data=config.data,
        checkpoint=CheckpointConfig(
            load=config.of(DistillationConfig).distill_from,
            finetune=True,
            no_load_optim=True,
        ),
        world_size=config.world_size,
        sources=sources,
    )


def _as_many_stages(config: RunConfig, has_experts: bool) -> ParallelConfig:
    """Return the layout of the student, whose stages the teacher's layers fill in their own way."""
    chunks = pipeline_shape(config).chunks
    parallel = config.parallel
    return replace(
        parallel,
        expert_model_parallel_size=parallel.expert_model_parallel_size
        if has_experts
        else 1,
        num_virtual_stages_per_pipeline_rank=chunks if chunks > 1 else None,
        num_layers_per_virtual_pipeline_stage=None,
        pipeline_layout=None,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        pipeline_cut="flops",
        pipeline_costs_path=None,
    )


def _split_alike(zero: ZeroConfig) -> ZeroConfig:
    """Weights that stage 3 splits; all of them elsewhere, as there is no other state."""
    return ZeroConfig(
        stage=3 if zero.stage == 3 else 0,
        param_persistence_threshold=zero.param_persistence_threshold,
        prefetch_bucket_size=zero.prefetch_bucket_size,
        reduce_bucket_size=zero.reduce_bucket_size,
        zero3_pin_stage="off",
    )
