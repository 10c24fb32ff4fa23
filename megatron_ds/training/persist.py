"""A run on disk: what is saved beside the tensors, what must agree when it is loaded again.

    iter_0000123/run.json    config (re-runs the job), progress, identity of model, tokenizer and data, scaler state
"""

import logging
import time
from pathlib import Path

from .. import __version__
from ..checkpoint.load import check_same_model, load
from ..checkpoint.run_file import progress_of, require
from ..checkpoint.save import save
from ..checkpoint.space import bytes_in, size
from ..config import RunConfig, Source
from ..config.data_efficiency_options import order_identity
from ..config.data_rules import FIM
from ..config.dump import to_dict
from ..config.training_options import CheckpointConfig
from ..data.loading.data_paths import parse_split, read_sources
from ..data.loading.datasets import identify
from ..errors import CheckpointError
from ..models import MODELS
from ..ramps import Progress
from .build import Engine
from .start import Start

logger = logging.getLogger(__name__)

# Fields of every model that decide shapes or meaning of the weights; a checkpoint is refused when one differs.
MODEL_FIELDS = (
    "model", "num_layers", "hidden_size", "ffn_size", "num_attention_heads", "query_groups", "head_dim", "activation",
    "normalization", "norm_epsilon", "position_embedding_type", "positions", "rotary_base", "rotary_percent",
    "add_bias_linear", "untie_embeddings_and_output_weights", "vocab_size",
)


def describe_run(config: RunConfig, as_given: RunConfig, tokenizer, run_id: str) -> dict:
    """What every checkpoint of a run says of it: how to start it again, and what it is a checkpoint *of*.

    as_given: the config as the user wrote it, from which the tokenizer was made; `config` knows the vocabulary besides.
    --overwrite-save is left out: a permission for one start, not for each that uses run.json as its --config.
    """
    once = as_given.with_values({"checkpoint.overwrite_save": False}, Source("derived", "given for one start only"))
    return {"version": __version__, "run_id": run_id, "identity": _identity(config, tokenizer),
            "config": to_dict(once if as_given.checkpoint.overwrite_save else as_given), "world_size": config.world_size}


def _identity(config: RunConfig, tokenizer) -> dict:
    """{"model": …, "tokenizer": …, "data": …}, plain values; a checkpoint of another identity is refused."""
    names = (*MODEL_FIELDS, *MODELS[config.model.model].fields)
    model = {name: getattr(config.model, name) for name in names}
    return {"model": model, "tokenizer": {"fingerprint": tokenizer.fingerprint}, "data": _data_identity(config)}


def _data_identity(config: RunConfig) -> dict:
    """What decides the training samples and their order. Corpora count by content: they may lie elsewhere, or be split in
    other words; and a run may go on with another validation set."""
    data, sources = config.data, read_sources(config.data)
    whole, train = sources.whole.values if sources.whole else (), sources.parts[0].values if sources.parts else ()
    return {"data_path": identify(whole), "train_data_path": identify(train),
            "split": list(parse_split(data.splits)) if whole else None, "mock_data": data.mock_data,
            "dataloader_type": data.dataloader_type, "seq_length": config.model.seq_length, "seed": config.train.seed,
            **({"blend_weights": data.blend_weights} if data.blend_weights != "samples" else {}),
            **({"curriculum": order_identity(config.curriculum)} if config.curriculum.curriculum_metrics else {}),
            **({"fill_in_the_middle": [getattr(data, path.partition(".")[2]) for path in FIM]} if data.fim_data else {}),
            **MODELS[config.model.model].data.identity(config)}


def save_run(engine: Engine, progress: Progress, description: dict) -> None:
    """Write a checkpoint under `config.checkpoint.save`. Collective over the world."""
    config, mesh, begin = engine.config, engine.mesh, time.perf_counter()
    run = description | {"progress": progress.to_dict(), "optimizer": engine.optimizer.extra_state()}
    path = save(Path(config.checkpoint.save), progress.step, saved_pieces(engine), coordinates=mesh.coordinates,
                world=mesh.group("world"), run=run, limit=config.checkpoint.save_total_limit)
    if mesh.rank == 0:
        logger.info("saved %s in %.1f s (%s)", path, time.perf_counter() - begin, size(bytes_in(path)))


def saved_pieces(engine: Engine) -> list:
    """What this rank has of a checkpoint."""
    return [p for p in engine.optimizer.pieces() if p.kind == "weight" or not engine.config.checkpoint.no_save_optim]


def load_run(engine: Engine, start: Start) -> Progress:
    """Fill weights and optimizer from `config.checkpoint.load`; where training stands then. Collective over the world."""
    checkpoint, mesh, begin = engine.config.checkpoint, engine.mesh, time.perf_counter()
    if start.step is None:
        return Progress()
    with_optimizer = not (checkpoint.finetune or checkpoint.no_load_optim)
    load(checkpoint.load, start.step, list(engine.optimizer.pieces()), coordinates=mesh.coordinates,
         world=mesh.group("world"), kinds=None if with_optimizer else ("weight",))
    if with_optimizer:
        engine.optimizer.load_extra_state(start.run["optimizer"])
    engine.optimizer.after_load()
    progress = Progress() if checkpoint.finetune else progress_of(start.run)
    if mesh.rank == 0:
        logger.info("loaded %s, iteration %d%s, in %.1f s", checkpoint.load, start.step,
                    "" if with_optimizer else " (weights only)", time.perf_counter() - begin)
    return progress


def check_same_run(saved: dict, current: dict, wanted: CheckpointConfig) -> None:
    """Raises CheckpointError where this run is not the one that was saved, or too different from it to load that much.

    saved, current: what `describe_run` returned then and now.
    """
    directory = wanted.load
    if "engine" in saved:
        raise CheckpointError(f"--load {directory} was saved by an engine (megatron_ds.initialize), not by a training script: "
                              "its tensors have other names. Load it with engine.load_checkpoint.")
    parts = ("model", "tokenizer") if wanted.finetune else ("model", "tokenizer", "data")
    require(saved, directory, *(f"identity.{part}" for part in parts), "config.optimizer.optimizer", "progress", "optimizer")
    theirs, ours = saved["identity"], current["identity"]
    try:
        check_same_model({p: theirs[p] for p in parts}, {p: ours[p] for p in parts})
    except CheckpointError as error:
        only_data = all(theirs[p] == ours[p] for p in parts[:2])
        advice = " To take its weights to other data, from step 0: --finetune." if only_data else ""
        raise CheckpointError(f"--load {directory}: {error}{advice}") from None
    before, now = (about["config"]["optimizer"]["optimizer"] for about in (saved, current))
    if before != now and not (wanted.finetune or wanted.no_load_optim):
        raise CheckpointError(f"--load {directory} holds the state of --optimizer {before}, which is of no use to --optimizer "
                              f"{now}. Use --optimizer {before}, or start the new one afresh with --no-load-optim.")
