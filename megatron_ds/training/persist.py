"""A run on disk: what is saved beside the tensors, what must agree when it is loaded again.

    iter_0000123/run.json    config (re-runs the job), progress, identity of model, tokenizer and data, scaler state
"""

import logging
from pathlib import Path

from .. import __version__
from ..checkpoint.load import check_same_model, latest, load, read_run
from ..checkpoint.run_file import progress_of, require
from ..checkpoint.save import save
from ..config import RunConfig
from ..config.curriculum import order_identity
from ..config.dump import to_dict
from ..config.rules_samples import FIM
from ..config.train import CheckpointConfig
from ..data.datasets import identify
from ..data.sources import read_sources
from ..data.split import parse_split
from ..errors import CheckpointError
from ..models import MODELS
from ..mpu.mesh import Mesh
from ..progress import Progress
from .build import Engine
from .together import together

logger = logging.getLogger(__name__)

# Fields of every model that decide shapes or meaning of the weights; a checkpoint is refused when one differs.
MODEL_FIELDS = (
    "model", "num_layers", "hidden_size", "ffn_size", "num_attention_heads", "query_groups", "head_dim", "activation",
    "normalization", "norm_epsilon", "position_embedding_type", "positions", "rotary_base", "rotary_percent",
    "add_bias_linear", "untie_embeddings_and_output_weights", "vocab_size",
)


def describe_run(config: RunConfig, as_given: RunConfig, tokenizer) -> dict:
    """What every checkpoint of a run says of it: how to start it again, and what it is a checkpoint *of*.

    as_given: the config as the user wrote it, from which the tokenizer was made; `config` knows the vocabulary besides.
    """
    return {"version": __version__, "config": to_dict(as_given), "identity": _identity(config, tokenizer),
            "world_size": config.world_size}


def _identity(config: RunConfig, tokenizer) -> dict:
    """{"model": …, "tokenizer": …, "data": …}, plain values; a checkpoint of another identity is refused."""
    names = (*MODEL_FIELDS, *MODELS[config.model.model].fields)
    model = {name: getattr(config.model, name) for name in names}
    return {"model": model, "tokenizer": {"fingerprint": tokenizer.fingerprint}, "data": _data_identity(config)}


def _data_identity(config: RunConfig) -> dict:
    """What decides the training samples and their order. Corpora count by content: they may lie elsewhere, or be split in
    other words; and a run may go on with another validation set."""
    data, sources = config.data, read_sources(config.data)
    whole, train = sources.whole.words if sources.whole else (), sources.parts[0].words if sources.parts else ()
    return {"data_path": identify(whole), "train_data_path": identify(train),
            "split": list(parse_split(data.splits)) if whole else None, "mock_data": data.mock_data,
            "dataloader_type": data.dataloader_type, "seq_length": config.model.seq_length, "seed": config.train.seed,
            **({"blend_weights": data.blend_weights} if data.blend_weights != "samples" else {}),
            **({"curriculum": order_identity(config.curriculum)} if config.curriculum.curriculum_metrics else {}),
            **({"fill_in_the_middle": [getattr(data, path.partition(".")[2]) for path in FIM]} if data.fim_data else {}),
            **MODELS[config.model.model].data.identity(config)}


def save_run(engine: Engine, progress: Progress, description: dict) -> None:
    """Write a checkpoint under `config.checkpoint.save`. Collective over the world."""
    config, mesh = engine.config, engine.mesh
    run = description | {"progress": progress.to_dict(), "optimizer": engine.optimizer.extra_state()}
    pieces = [p for p in engine.optimizer.pieces() if p.kind == "weight" or not config.checkpoint.no_save_optim]
    save(Path(config.checkpoint.save), progress.step, pieces, tp=mesh.group("tp"), world=mesh.group("world"),
         run=run, limit=config.checkpoint.save_total_limit)


def load_run(engine: Engine, description: dict) -> Progress:
    """Fill weights and optimizer from `config.checkpoint.load`; where training stands then. Collective over the world."""
    checkpoint, mesh = engine.config.checkpoint, engine.mesh
    if not checkpoint.load:
        return Progress()
    directory = Path(checkpoint.load)
    step, run = _find(directory, engine.config, mesh, description)
    if step is None:
        if mesh.rank == 0:
            logger.warning("no checkpoint in %s yet: starting from the initial weights", directory)
        return Progress()
    with_optimizer = not (checkpoint.finetune or checkpoint.no_load_optim)
    load(directory, step, list(engine.optimizer.pieces()), tp=mesh.group("tp"), world=mesh.group("world"),
         kinds=None if with_optimizer else ("weight",))
    if with_optimizer:
        engine.optimizer.load_extra_state(run["optimizer"])
    engine.optimizer.after_load()
    progress = Progress() if checkpoint.finetune else progress_of(run)
    if mesh.rank == 0:
        logger.info("loaded %s, iteration %d%s", directory, step, " (weights only)" if not with_optimizer else "")
    return progress


def _find(directory: Path, config: RunConfig, mesh: Mesh, description: dict) -> tuple[int | None, dict]:
    """(step to load, what its checkpoint says of its run), as rank 0 sees the folder; (None, {}) where there is none yet."""
    def look() -> tuple[int | None, dict]:
        step = latest(directory)
        if step is None:
            if config.checkpoint.exit_on_missing_checkpoint:
                raise CheckpointError(f"--load {directory}: no complete checkpoint there, and --exit-on-missing-checkpoint is "
                                      "given. Check the path, or drop the flag to start afresh.")
            return None, {}
        run = read_run(directory, step)
        _check_same_run(directory, run, description, config.checkpoint)
        return step, run

    return together(mesh.group("world"), look, only=0)


def _check_same_run(directory: Path, saved: dict, current: dict, wanted: CheckpointConfig) -> None:
    """Raises CheckpointError where this run is not the one that was saved, or not enough of it to take that much."""
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
