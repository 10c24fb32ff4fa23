"""Checkpoints of a training run: values saved with the tensors, and those that must agree when it is loaded.

    iter_0000123/run.json    config (re-runs the job), progress, identity of model, tokenizer and data,
                             optimizer scalars
"""

import logging
import time
from pathlib import Path

from .. import __version__
from ..checkpoint.disk_space import bytes_in, size
from ..checkpoint.load import check_same_model, load
from ..checkpoint.pieces import WEIGHT, Piece
from ..checkpoint.run_file import progress_of, require
from ..checkpoint.save import save
from ..config import RunConfig, Source
from ..config.config_text import to_dict
from ..config.data_efficiency_options import order_identity
from ..config.data_rules import FIM
from ..config.training_options import CheckpointConfig
from ..data.loading.blend import parse_split, read_sources
from ..data.loading.datasets import identify
from ..data.tokenizers import Tokenizer
from ..errors import CheckpointError
from ..models import MODELS
from ..ramps import Progress
from .build import Engine
from .run_start import Start

logger = logging.getLogger(__name__)

# Model fields that determine shapes or meaning of the weights; a checkpoint is refused if one differs.
MODEL_FIELDS = (
    "model", "num_layers", "hidden_size", "ffn_size", "num_attention_heads", "query_groups", "head_dim",
    "activation", "normalization", "norm_epsilon", "position_embedding_type", "positions", "rotary_base",
    "rotary_percent", "add_bias_linear", "untie_embeddings_and_output_weights", "vocab_size",
)

# The same of models with experts.
MOE_FIELDS = ("expert_ffn_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "mlp_type",
              "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax",
              "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk",
              "moe_router_enable_expert_bias")


def describe_run(config: RunConfig, as_given: RunConfig, tokenizer: Tokenizer, run_id: str) -> dict:
    """The values of run.json that all checkpoints of a run share: how to start it, and its identity.

    as_given: the config as the user wrote it; `config` also has the size of the tokenizer's vocabulary.
    --overwrite-save is left out: it is a permission for one start, not for later ones with run.json as
    --config.
    """
    once = as_given.with_values({"checkpoint.overwrite_save": False}, Source("derived", "for one start only"))
    return {"version": __version__, "run_id": run_id, "identity": _identity(config, tokenizer),
            "config": to_dict(once if as_given.checkpoint.overwrite_save else as_given),
            "world_size": config.world_size}


def _identity(config: RunConfig, tokenizer: Tokenizer) -> dict:
    """{"model": …, "tokenizer": …, "data": …}, plain values; a checkpoint of another identity is refused."""
    names = (*MODEL_FIELDS, *MODELS[config.model.model].fields)
    model = {name: getattr(config.model, name) for name in names}
    if any(config.model.experts):
        model |= {"experts": config.model.experts} | {name: getattr(config.model, name) for name in MOE_FIELDS}
    return {"model": model, "tokenizer": {"fingerprint": tokenizer.fingerprint},
            "data": _data_identity(config)}


def _data_identity(config: RunConfig) -> dict:
    """The values that determine the training samples and their order.

    Corpora are identified by content, since they may be moved, or the same split written differently.
    Validation data is left out: it may change between starts.
    """
    data, sources = config.data, read_sources(config.data)
    whole = sources.whole.values if sources.whole else ()
    train = sources.parts[0].values if sources.parts else ()
    identity = {"data_path": identify(whole), "train_data_path": identify(train),
                "split": list(parse_split(data.splits)) if whole else None, "mock_data": data.mock_data,
                "dataloader_type": data.dataloader_type, "seq_length": config.model.seq_length,
                "seed": config.train.seed}
    if data.blend_weights != "samples":
        identity["blend_weights"] = data.blend_weights
    if config.curriculum.curriculum_metrics:
        identity["curriculum"] = order_identity(config.curriculum)
    if data.fim_data:
        identity["fill_in_the_middle"] = [getattr(data, path.partition(".")[2]) for path in FIM]
    return identity | MODELS[config.model.model].data.identity(config)


def save_run(engine: Engine, progress: Progress, description: dict) -> None:
    """Write a checkpoint under `config.checkpoint.save`. Collective over the world."""
    config, mesh, begin = engine.config, engine.mesh, time.perf_counter()
    run = description | {"progress": progress.to_dict(), "optimizer": engine.optimizer.extra_state()}
    path = save(Path(config.checkpoint.save), progress.step, saved_pieces(engine),
                coordinates=mesh.coordinates, world=mesh.group("world"), run=run,
                limit=config.checkpoint.save_total_limit)
    if mesh.rank == 0:
        logger.info("saved %s in %.1f s (%s)", path, time.perf_counter() - begin, size(bytes_in(path)))


def saved_pieces(engine: Engine) -> list[Piece]:
    """This rank's pieces of a checkpoint."""
    weights_only = engine.config.checkpoint.no_save_optim
    return [piece for piece in all_pieces(engine) if piece.kind == WEIGHT or not weights_only]


def all_pieces(engine: Engine) -> list[Piece]:
    """This rank's weights, optimizer state, and what layers remember from step to step."""
    return [*engine.optimizer.pieces(), *engine.step_state.pieces()]


def load_run(engine: Engine, start: Start) -> Progress:
    """Fill weights and optimizer from `config.checkpoint.load`.

    Returns the progress. Collective over the world.
    """
    checkpoint, mesh, begin = engine.config.checkpoint, engine.mesh, time.perf_counter()
    if start.step is None:
        return Progress()
    with_optimizer = not (checkpoint.finetune or checkpoint.no_load_optim)
    load(checkpoint.load, start.step, all_pieces(engine), coordinates=mesh.coordinates,
         world=mesh.group("world"), kinds=None if with_optimizer else (WEIGHT,))
    if with_optimizer:
        engine.optimizer.load_extra_state(start.run["optimizer"])
    engine.optimizer.after_load()
    progress = Progress() if checkpoint.finetune else progress_of(start.run)
    if mesh.rank == 0:
        logger.info("loaded %s, iteration %d%s, in %.1f s", checkpoint.load, start.step,
                    "" if with_optimizer else " (weights only)", time.perf_counter() - begin)
    return progress


def check_same_run(saved: dict, current: dict, wanted: CheckpointConfig) -> None:
    """Raises CheckpointError if the saved run differs from this one in a value that matters for loading.

    saved: the values of run.json; current: of `describe_run`; wanted: which parts to load.
    """
    directory = wanted.load
    if "engine" in saved:
        raise CheckpointError(f"--load {directory} was saved by an engine (megatron_ds.initialize), not by a "
                              "training script: its tensors have other names. Load it with "
                              "engine.load_checkpoint.")
    parts = ("model", "tokenizer") if wanted.finetune else ("model", "tokenizer", "data")
    require(saved, directory, *(f"identity.{part}" for part in parts), "config.optimizer.optimizer",
            "progress", "optimizer")
    theirs, ours = saved["identity"], current["identity"]
    try:
        check_same_model({p: theirs[p] for p in parts}, {p: ours[p] for p in parts})
    except CheckpointError as error:
        only_data = all(theirs[p] == ours[p] for p in parts[:2])
        advice = " Use --finetune to train its weights on other data, from step 0." if only_data else ""
        raise CheckpointError(f"--load {directory}: {error}{advice}") from None
    before, now = (about["config"]["optimizer"]["optimizer"] for about in (saved, current))
    if before != now and not (wanted.finetune or wanted.no_load_optim):
        raise CheckpointError(f"--load {directory} holds the state of --optimizer {before}, which "
                              f"--optimizer {now} cannot use. Use --optimizer {before}, or give "
                              f"--no-load-optim to start {now} without state.")
