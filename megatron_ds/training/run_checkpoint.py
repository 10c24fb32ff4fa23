"""Checkpoints of a training run: where it starts, values saved with the tensors, and those that must agree.

    iter_0000123/run.json    config (re-runs the job), progress, identity of model, tokenizer and data,
                             optimizer scalars

    --load D, D has a checkpoint       that run continues under its run id (with --finetune: a new run)
    --load D --save D, D has none      a new run: the same command starts and resumes
    --load D, D has none               an error: a misspelt folder must not start a run from scratch
    no --load                          a new run

A *run id* is random. A start from scratch creates it, and run.json of each checkpoint of the run has it.
"""

import difflib
import logging
import math
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .. import __version__
from ..checkpoint.disk_space import bytes_in, size
from ..checkpoint.load import check_same_model, differences, latest, load, read_run
from ..checkpoint.lock import locked
from ..checkpoint.pieces import WEIGHT, Piece
from ..checkpoint.place import is_store, place_of
from ..checkpoint.run_file import progress_of, require, unloadable
from ..checkpoint.save import Saving
from ..checkpoint.save_folder import check_vacant, move_aside, run_id_of
from ..config import RunConfig, Source
from ..config.options.training import CheckpointConfig
from ..config.saved_values import to_dict
from ..data.loading.datasets import identify
from ..data.loading.sources import parse_split, read_sources
from ..data.tokenizers import Tokenizer
from ..errors import CheckpointError, ConfigError, MismatchError
from ..features import changed_samples, record
from ..launch_env import run_in
from ..models.identity import (
    MOE_FIELDS,
    model_identity,
    why_positions_differ,
    with_positions_of,
)
from ..mpu.agree import on_one_rank
from ..mpu.collectives import all_gather_object
from ..mpu.group import Group
from ..mpu.host_reads import wait_for_work
from ..planning.run_model import data_kind
from ..progress.ramps import Progress
from ..zero.settings import ZeroSettings
from .build import Replica
from .foreign_checkpoints import foreign_checkpoints, has_checkpoint

logger = logging.getLogger(__name__)


# ------------------------------------------------------------------ where a run starts
@dataclass(frozen=True)
class Start:
    """step, run: of the checkpoint to load, and its run.json; None and {} for a start from scratch.

    foreign: format of the checkpoint, if another program wrote it; step and run are then None and {}
    """

    step: int | None
    run: dict
    run_id: str
    foreign: str | None = None


def save_folder(checkpoint: CheckpointConfig, world: Group) -> AbstractContextManager:
    """Return the lock of the --save folder, if any. Collective. Raises CheckpointError when another job holds it."""
    return (
        nullcontext()
        if checkpoint.save is None
        else locked(place_of(checkpoint.save), world)
    )


def find_start(
    checkpoint: CheckpointConfig, world: Group, given: CheckpointConfig | None = None
) -> Start:
    """Return the start that rank 0 finds in the folders, on all ranks. Collective; called inside `save_folder`.

    given: the options of the user, where `checkpoint` has --pretrained-checkpoint as --load
    Raises CheckpointError when there is nothing to load, or when --save holds another run.
    """

    def look() -> Start:
        start = _look(checkpoint)
        _check_save_folder(given or checkpoint, start)
        return start

    return on_one_rank(world, look)


def find_weights(checkpoint: CheckpointConfig) -> Start:
    """Return the checkpoint in the --load folder, whose weights are taken. Raises CheckpointError if there is
    none.
    """
    folder = checkpoint.load
    if not has_checkpoint(folder, checkpoint.load_format):
        raise CheckpointError(
            f"--pretrained-checkpoint {folder}: no complete checkpoint there. Give the folder that was --save of the "
            "run that trained the weights, or a folder of another program's checkpoint."
        )
    start = _look(checkpoint)
    # The identifier of the run that trained them.
    return replace(start, run_id=run_id_of(start.run) or "")


def known_folder(folder: str | None) -> str:
    """Return the --save or --load folder of a caller that needs it, and has looked whether it is given."""
    assert folder is not None, "the caller has looked"
    return folder


def clear_save_folder(given: CheckpointConfig, world: Group) -> None:
    """Move another run in the folder into a subfolder if --overwrite-save is given. Collective; after the
    load. given: the options of the user"""
    if given.overwrite_save and not _continues_in_place(given):
        on_one_rank(world, lambda: _move_aside(known_folder(given.save)))


def _move_aside(save: str) -> None:
    if is_store(save):
        raise CheckpointError(
            f"--save {save} --overwrite-save: a store cannot rename the checkpoints that are there. Give another "
            "--save, or move them with the tools of the store."
        )
    move_aside(Path(save))


def _look(checkpoint: CheckpointConfig) -> Start:
    run_id = run_in(os.environ) or secrets.token_hex(4)
    if checkpoint.load is None:
        return Start(None, {}, run_id)
    of_others = foreign_checkpoints(checkpoint.load)
    if foreign := of_others.format_of_folder(checkpoint.load, checkpoint.load_format):
        return Start(None, {}, run_id, foreign)
    step = latest(checkpoint.load)
    if step is None:
        check_may_start(checkpoint)
        logger.info("%s holds no checkpoint: starting from scratch", checkpoint.load)
        return Start(None, {}, run_id)
    run = read_run(checkpoint.load, step)
    return Start(step, run, run_id if checkpoint.finetune else run_id_of(run) or run_id)


def check_may_start(checkpoint: CheckpointConfig) -> None:
    """Raises MismatchError unless the --load folder, which holds no checkpoint, is also --save."""
    folder = place_of(known_folder(checkpoint.load))
    if checkpoint.exit_on_missing_checkpoint:
        raise MismatchError(
            f"--load {folder}: no complete checkpoint there, and "
            "--exit-on-missing-checkpoint is given. Check the path, or remove the flag to "
            "start from scratch."
        )
    if checkpoint.save and _same_folder(folder, place_of(checkpoint.save)):
        return
    # The names of folders beside it may show a misspelling.
    what = "holds no checkpoint" if folder.is_dir() else "does not exist"
    names = (
        [path.name for path in folder.parent.iterdir() if path.is_dir()]
        if folder.parent.is_dir()
        else []
    )
    close = [
        str(folder.parent / name)
        for name in difflib.get_close_matches(folder.name, names)
    ]
    hint = (
        f" Did you mean {' or '.join(close)}?" if close and not folder.is_dir() else ""
    )
    raise MismatchError(
        f"--load {folder}: the folder {what}, and a start from scratch would look like a "
        f"resumed run.{hint} Correct the path, or omit --load to start from scratch. To "
        "start and resume with one command, give the same folder to --save and --load."
    )


def _check_save_folder(given: CheckpointConfig, start: Start) -> None:
    if given.save is None or given.overwrite_save or _continues_in_place(given):
        return
    to_continue, to_begin = _advice_of_save_folder(given)
    check_vacant(
        place_of(given.save), start.run_id, start.step or 0, to_continue, to_begin
    )


def _advice_of_save_folder(given: CheckpointConfig) -> tuple[str, str]:
    """Return how to continue the run in the --save folder, and how to begin it again if it has no checkpoint."""
    save = known_folder(given.save)
    load = given.load
    is_same = load and _same_folder(place_of(load), place_of(save))
    change = f"Add --load {save}"
    if is_same:
        change = "Remove --finetune"
    elif load:
        change = f"Use --load {save}"
    to_begin = f"{change} to start that run again from scratch, as it has no checkpoint"
    if load and given.finetune and not is_same:
        change += " without --finetune"
        to_begin = (
            f"Use --pretrained-checkpoint {load} --load {save} in place of --load {load} --finetune to start that "
            "run again from these weights, as it has no checkpoint"
        )
    return f"{change} to continue that run", to_begin


def _continues_in_place(checkpoint: CheckpointConfig) -> bool:
    return bool(
        checkpoint.load
        and checkpoint.save
        and not checkpoint.finetune
        and _same_folder(place_of(checkpoint.load), place_of(checkpoint.save))
    )


def _same_folder(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return one.samefile(other)
    return os.path.realpath(one) == os.path.realpath(other)


# ------------------------------------------------------------------ saving and loading
def describe_run(
    config: RunConfig, as_given: RunConfig, tokenizer: Tokenizer, run_id: str
) -> dict:
    """Return the values of run.json that all checkpoints of a run share: how to start it, and its identity.

    as_given: the config as the user wrote it; `config` also has the size of the tokenizer's vocabulary.
    --overwrite-save is left out: it permits one start, not later ones with run.json as --config.
    """
    once = as_given.with_values(
        {"checkpoint.overwrite_save": False}, Source("derived", "for one start only")
    )
    identity = {
        "model": model_identity(config.model),
        "tokenizer": {"fingerprint": tokenizer.fingerprint},
        "data": _data_identity(config),
    }
    added = config.added_weights
    if added is not None:
        identity[added.noun] = dict(added.identity)
    return {
        "version": __version__,
        "run_id": run_id,
        "identity": identity,
        "config": to_dict(once if as_given.checkpoint.overwrite_save else as_given),
        "world_size": config.world_size,
        "features": record(),
    }


def _data_identity(config: RunConfig) -> dict:
    """Return the values that determine the training samples and their order.

    Corpora are identified by content, since they may be moved, or the same split written differently.
    Validation data is left out: it may change between starts.
    """
    data = config.data
    sources = read_sources(config.data)
    whole = sources.whole.values if sources.whole else ()
    train = sources.parts[0].values if sources.parts else ()
    identity = {
        "data_path": identify(whole),
        "train_data_path": identify(train),
        "split": list(parse_split(data.splits)) if whole else None,
        "mock_data": data.mock_data,
        "dataloader_type": data.dataloader_type,
        "seq_length": config.model.seq_length,
        "seed": config.train.seed,
    }
    if data.blend_weights != "samples":
        identity["blend_weights"] = data.blend_weights
    if config.sample_order is not None:
        identity |= config.sample_order.identity
    for changed in changed_samples(config):
        identity |= changed.identity(config)
    return identity | data_kind(config).identity(config)


def save_run(replica: Replica, progress: Progress, description: dict) -> bool:
    """Write a checkpoint under `config.checkpoint.save`. Collective over the world.

    Returns False where the state has a value that is not finite. No training recovers from one, so nothing is
    written then: the last good checkpoint stays, and stays the one that a restart loads.
    """
    begin = time.perf_counter()
    pieces = saved_pieces(replica)
    world = replica.mesh.group("world")
    # The reads of a GPU from here on wait for no other rank.
    wait_for_work(replica.mesh.device, world)
    found = all_gather_object(not_finite(pieces), world)
    if not is_finite(found, progress, replica):
        return False
    saving = new_saving(replica, progress)
    saving.begin(pieces, run_values(replica, progress, description))
    parts = saving.collect(lambda: saving.write(saving.own(pieces)))
    path = saving.complete(parts)
    if replica.mesh.rank == 0:
        log_saved(path, begin)
    return True


def new_saving(replica: Replica, progress: Progress) -> Saving:
    """Return a save of this run that has not begun."""
    checkpoint = replica.config.checkpoint
    return Saving(
        place_of(known_folder(checkpoint.save)),
        progress.step,
        replica.mesh.coordinates,
        replica.mesh.group("world"),
        checkpoint.save_total_limit,
        checkpoint.save_retain_interval,
    )


def check_states(replica: Replica, description: Mapping) -> None:
    """Raises ConfigError where an observer keeps state under a name that run.json has for something else."""
    own = {*description, "progress", "optimizer"}
    for name in sorted(own & replica.states.keys()):
        raise ConfigError(
            f"an observer keeps its state under {name!r}, which run.json has for something else. Use another name in "
            "`replica.states`."
        )


def run_values(replica: Replica, progress: Progress, description: dict) -> dict:
    """Return the values of run.json at this moment: the tensors are in other files."""
    of_observers = {name: kept.state() for name, kept in replica.states.items()}
    own = {
        "progress": progress.to_dict(),
        "optimizer": replica.optimizer.extra_state(),
    }
    return description | own | of_observers


def log_saved(path: Path, begin: float, stall: float | None = None) -> None:
    """Log that a checkpoint is complete. begin: perf_counter at its start; stall: seconds that steps waited."""
    logger.info(
        "saved %s in %.1f s%s (%s)",
        path,
        time.perf_counter() - begin,
        "" if stall is None else f", of which training waited {stall:.1f} s",
        size(bytes_in(path)),
    )


def is_finite(
    found: Sequence[str | None], progress: Progress, replica: Replica
) -> bool:
    """Return whether no rank has a value that is not finite; logs the first one.

    found: of each rank, what `not_finite` returned
    """
    if not any(found):
        return True
    rank = next(rank for rank, name in enumerate(found) if name)
    if replica.mesh.rank == 0:
        logger.warning(
            "iteration %d is not saved: %s has values that are not finite (on rank %d), and "
            "no training recovers from them. Earlier checkpoints in %s are kept. Stop this "
            "run, and continue from the last of them with other data or a lower learning rate",
            progress.step,
            found[rank],
            rank,
            place_of(known_folder(replica.config.checkpoint.save)),
        )
    return False


def not_finite(pieces: Iterable[Piece]) -> str | None:
    """Return the name of the first tensor of weights or optimizer state with a NaN or an infinity; None without one.

    The smallest and the largest value are NaN if any is, so no mask of the size of the tensor is made.
    """
    for piece in pieces:
        tensor = piece.tensor
        if (
            tensor.is_floating_point()
            and tensor.numel()
            and not all(math.isfinite(bound.item()) for bound in torch.aminmax(tensor))
        ):
            return f"{piece.kind} of {piece.spec.name}"
    return None


def saved_pieces(replica: Replica) -> list[Piece]:
    """Return the pieces of a checkpoint that is written now. Collective over the world."""
    weights_only = replica.config.checkpoint.no_save_optim
    state = replica.optimizer.pieces(saving=not weights_only)
    return [
        piece
        for piece in _without_frozen(replica, (*state, *replica.step_state.pieces()))
        if piece.kind == WEIGHT or not weights_only
    ]


def largest_pieces(replica: Replica) -> list[Piece]:
    """Pieces with the bytes of the largest checkpoint of the run."""
    weights_only = replica.config.checkpoint.no_save_optim
    return [
        piece
        for piece in (*all_pieces(replica), *replica.optimizer.pieces_of_worker())
        if piece.kind == WEIGHT or not weights_only
    ]


def all_pieces(
    replica: Replica, saved: Mapping[str, float] | None = None
) -> list[Piece]:
    """Return this rank's weights, optimizer state, and what layers remember from step to step, without frozen
    weights. saved: see `ZeroOptimizer.pieces`."""
    pieces: list[Piece] = [
        *replica.optimizer.pieces(saved=saved),
        *replica.step_state.pieces(),
    ]
    return _without_frozen(replica, pieces)


def frozen_pieces(replica: Replica) -> list[Piece]:
    """Return this rank's weights below added ones, and what their layers remember from step to step."""
    frozen = replica.frozen
    weights = [p for p in replica.optimizer.pieces() if p.spec.name in frozen]
    encoded = replica.optimizer.encoded_pieces()
    return [*weights, *encoded, *replica.step_state.pieces()]


def _without_frozen(replica: Replica, pieces: Iterable[Piece]) -> list[Piece]:
    frozen = replica.frozen
    return [piece for piece in pieces if piece.spec.name not in frozen]


def load_run(replica: Replica, start: Start) -> Progress:
    """Fill weights and optimizer from the --load folder. Returns the progress. Collective over the world."""
    checkpoint = replica.config.checkpoint
    mesh = replica.mesh
    begin = time.perf_counter()
    if start.step is None:
        return Progress()
    # Finetuning, and --no-load-optim, take the weights alone.
    with_optimizer = not (checkpoint.finetune or checkpoint.no_load_optim)
    pieces = all_pieces(replica, start.run.get("optimizer"))
    load(
        known_folder(checkpoint.load),
        start.step,
        pieces,
        coordinates=mesh.coordinates,
        world=mesh.group("world"),
        kinds=None if with_optimizer else (WEIGHT,),
        exact=with_optimizer,  # weights that are not trained have no fp32 copies
    )
    if with_optimizer:
        replica.optimizer.load_extra_state(start.run["optimizer"])
        for name, kept in replica.states.items():
            kept.load_state(start.run.get(name, {}))
    replica.optimizer.after_load()
    progress = Progress() if checkpoint.finetune else progress_of(start.run)
    # Differences that are allowed are logged.
    if mesh.rank == 0:
        if with_optimizer:
            log_other_workers(start.run.get("config", {}), replica.config)
        log_positions(
            start.run["identity"]["model"], model_identity(replica.config.model)
        )
        logger.info(
            "loaded %s, iteration %d%s, in %.1f s",
            checkpoint.load,
            start.step,
            "" if with_optimizer else " (weights only)",
            time.perf_counter() - begin,
        )
    return progress


def log_other_workers(saved: Mapping, config: RunConfig) -> None:
    """Log that ranks have other tokens than before, if each keeps the gradient of its own."""
    before = tuple(saved.get("parallel", {}).get("cp_comm_type", ()))
    now = config.parallel.cp_comm_type
    ranks = config.parallel.context_parallel_size
    splits = {set(kinds) == {"a2a"} for kinds in (before, now)}
    if (
        before
        and len(splits) > 1
        and ranks > 1
        and ZeroSettings.from_config(config).update_rule.keeps_gradients
    ):
        logger.warning(
            "--cp-comm-type was %s and is %s: with --optimizer %s each context-parallel rank "
            "keeps the gradient of its own tokens, which are others now. The run is not the "
            "one that was saved; use --cp-comm-type %s to continue that.",
            " ".join(before),
            " ".join(now),
            config.optimizer.optimizer,
            " ".join(before),
        )


def log_positions(theirs: Mapping, ours: Mapping) -> None:
    """Log how the positions of this run's model differ from those of the checkpoint, if they do."""
    if changed := differences(theirs, {**theirs, **with_positions_of(ours, theirs)}):
        logger.info(
            "positions are others than those of the checkpoint: %s", "; ".join(changed)
        )


def _with_experts_alike(*identities: dict) -> list[dict]:
    """Identities that differ in `experts` alone if one model has experts and the other has none."""
    if len({"experts" in identity["model"] for identity in identities}) == 1:
        return list(identities)
    return [
        identity | {"model": _without_moe_fields(identity["model"])}
        for identity in identities
    ]


def _without_moe_fields(model: dict) -> dict:
    none = [0] * model["num_layers"]
    return {"experts": none} | {
        name: value for name, value in model.items() if name not in MOE_FIELDS
    }


def check_same_run(saved: dict, current: dict, wanted: CheckpointConfig) -> None:
    """Raises MismatchError if the saved run differs from this one in a value that matters for loading.

    saved: the values of run.json; current: of `describe_run`; wanted: which parts to load.
    """
    directory = known_folder(wanted.load)
    if "engine" in saved:
        raise MismatchError(
            f"--load {directory} was saved by an engine (megatron_ds.initialize), not by a "
            "training script: its tensors have other names. Load it with "
            "engine.load_checkpoint."
        )
    for why in unloadable(saved.get("identity", {}), current["identity"], directory):
        raise MismatchError(why)
    # The parts that must be equal: other data are allowed in finetuning.
    parts: tuple[str, ...] = (
        ("model", "tokenizer") if wanted.finetune else ("model", "tokenizer", "data")
    )
    # Other programs do not record the identity of their data.
    if "converted_from" in saved:
        parts = tuple(part for part in parts if part in saved["identity"])
    require(
        saved,
        directory,
        *(f"identity.{part}" for part in parts),
        "config.optimizer.optimizer",
        "progress",
        "optimizer",
    )
    # Differences of the model or the data, with what would allow them.
    theirs, ours = _with_experts_alike(saved["identity"], current["identity"])
    fitting = (
        with_positions_of(ours["model"], theirs["model"])
        if wanted.finetune
        else theirs["model"]
    )
    try:
        check_same_model(
            {**{p: theirs[p] for p in parts}, "model": fitting},
            {p: ours[p] for p in parts},
        )
    except CheckpointError as error:
        advice = _advice({**theirs, "model": fitting}, ours, parts, directory)
        raise MismatchError(f"--load {directory}: {error}{advice}") from None
    # The optimizer must be the same only where its state is loaded.
    before, now = (
        about["config"]["optimizer"]["optimizer"] for about in (saved, current)
    )
    if before != now and not (wanted.finetune or wanted.no_load_optim):
        raise MismatchError(
            f"--load {directory} holds the state of --optimizer {before}, which "
            f"--optimizer {now} cannot use. Use --optimizer {before}, or give "
            f"--no-load-optim to start {now} without state."
        )


def _advice(
    theirs: Mapping, ours: Mapping, parts: Sequence[str], directory: str
) -> str:
    """Return what the user can do about an identity that differs in one of the parts, for the error."""
    has_experts = any(ours["model"].get("experts", ()))
    if has_experts and not any(theirs["model"]["experts"]):
        return (
            f" To give the dense model experts, run megatron-ds upcycle --load {directory} "
            "--save DIR --num-experts N, and load DIR with --finetune."
        )
    if all(theirs[p] == ours[p] for p in parts[:2]):
        return " Use --finetune to train its weights on other data, from step 0."
    return why_positions_differ(ours["model"], theirs["model"])
