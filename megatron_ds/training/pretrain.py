"""`pretrain`: run a pretraining job, from the command line to the exit code. Steps of a run:

parse and check the config        before the process group: all its errors are reported once, exit code 2
--dry-run                         print the plan and exit
launch                            torchrun, Slurm, Open MPI or one rank
save folder                       checked and locked
tokenizer, data, replica           then the checkpoint, if there is one
train                             exit code 0 also after SIGTERM, SIGUSR1 and the first Ctrl-C
"""

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .. import __version__
from ..checkpoint.disk_space import check_room
from ..checkpoint.folder import check_writable, find
from ..checkpoint.lock import SaveLock
from ..checkpoint.place import place_of
from ..checkpoint.tokenizer_files import keep_tokenizer_files
from ..cli import Stopped, StopRequest, before_training, main_guard
from ..config import RunConfig, parse
from ..config.options.training import CheckpointConfig
from ..config.parse import KnownNames
from ..config.sources.combine import MOCK_INSTEAD
from ..config.sources.flags import read_flags
from ..config.sources.named_features import import_named
from ..console import set_up_logging
from ..data.loading.datasets import build_datasets, fit_default_split
from ..data.loading.loader import ORDERS
from ..data.tokenizers import TOKENIZERS, Tokenizer
from ..errors import ConfigError, DeviceMemoryError
from ..features import Provided, features, missing_wings
from ..launch_env import rank_in, size_in, with_local_rank
from ..models import MODELS
from ..mpu import launch as launching
from ..mpu.agree import on_all_ranks, on_one_rank
from ..mpu.collectives import all_gather_object
from ..mpu.launch_facts import Launch
from ..mpu.mesh import Mesh
from ..optim import OPTIMIZERS
from ..pipeline.schedules import SCHEDULES
from ..planning.replica_plan import plan_replica
from ..planning.run_model import data_kind
from ..planning.run_plan import RULES
from ..planning.training_length import make_length
from ..progress.ramps import Progress
from .base_weights import (
    BaseWeights,
    check_same_base,
    check_same_weights,
    find_base,
    load_base,
    started_from_pretrained,
)
from .build import Replica, build_replica
from .distributed import joined
from .foreign_checkpoints import folder_of_model, foreign_checkpoints
from .from_checkpoint import (
    options_of_checkpoint,
    saved_config,
    with_saved_schedule,
)
from .loaders import Loaders
from .objective import Prepare, open_objective
from .observe.log import Log, check_log, open_log
from .observers import observers_of
from .restart import continued
from .run_checkpoint import (
    Start,
    all_pieces,
    check_same_run,
    clear_save_folder,
    describe_run,
    find_start,
    known_folder,
    largest_pieces,
    load_run,
    save_folder,
)
from .run_tokenizer import with_tokenizer
from .samples import (
    build_loaders,
    planned_samples,
    rearranged,
    wanted_samples,
)
from .trainer import Trainer

# Options that name an entry of a registry. config/ lies below the registries and cannot import them.
KNOWN_NAMES: KnownNames = {
    "model.model": MODELS,
    "parallel.pipeline_schedule": SCHEDULES,
    "optimizer.optimizer": OPTIMIZERS,
    "data.tokenizer_type": TOKENIZERS,
    "data.dataloader_type": ORDERS,
}
# (Loaders, the copy of the data that each rank has, Mesh) -> Loaders that compare what ranks read of them.
SECOND_READING: Provided[Any] = Provided("second reading")
logger = logging.getLogger(__name__)


def pretrain(argv: Sequence[str] | None = None, **defaults: object) -> int:
    """Run a pretraining job from flags (default: the command line). Returns the exit code.

    defaults: values of the entry script by option name; flags and files override them.
    """

    def run() -> int:
        stop = StopRequest()
        # If one rank exited alone, the others would wait for it.
        if size_in(os.environ) > 1:
            stop.defer()
        with stop:
            return _pretrain(argv, defaults, stop)

    return main_guard(run)


def _pretrain(
    argv: Sequence[str] | None, defaults: Mapping[str, object], stop: StopRequest
) -> int:
    started = time.monotonic()
    argv = sys.argv[1:] if argv is None else list(argv)
    import_named(argv)
    # Without communication: a dry run ends before a mesh exists.
    alone = Launch(rank_in(os.environ)) if _names_its_world(argv) else None
    with launching.reported_to_others(alone):
        launch, config = _configure(argv, alone, defaults)
    if config.plan.is_dry:
        return _dry_run(config, launch)
    # The run itself, with all ranks joined.
    with (
        deterministic_operations(config.train.deterministic_mode),
        joined(config, launch) as mesh,
    ):
        try:
            reason = train(config, mesh, launch.source, started, stop)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(_what_would_fit(error, mesh)) from error
        if mesh.rank == 0:
            logger.info("training ended: %s", reason)
            _warn_of_mock_data(config)
    return 0


def _warn_of_mock_data(config: RunConfig) -> None:
    """Warn at the end that a run had mock data where its command line names files."""
    left_out = config.without_effect.items()
    named = [name for name, why in left_out if why == MOCK_INSTEAD and "path" in name]
    if named:
        logger.warning(
            "the data were mock, as --mock-data was given: %s had no effect",
            " and ".join(named),
        )


def _names_its_world(argv: Sequence[str]) -> bool:
    """Return whether --dry-run comes with --world-size. Then the launcher, if any, is ignored."""
    given = {setting.path: setting.value for setting in read_flags(argv).settings}
    return given.get("plan.dry_run", "off") != "off" and "plan.world_size" in given


def _dry_run(config: RunConfig, launch: Launch) -> int:
    for feature in features():
        if feature.dry_run is not None:
            return feature.dry_run(config, launch)
    raise ConfigError(f"--dry-run needs megatron_ds.extensions.{missing_wings()}")


def _configure(
    argv: Sequence[str], launch: Launch | None, defaults: Mapping[str, object]
) -> tuple[Launch, RunConfig]:
    """Return the launch, by default that of the environment, and the checked configuration for it.

    Raises ConfigError with all problems.
    """
    env = with_local_rank(os.environ, read_flags(argv).local_rank)
    launch = launch or launching.read_launch(env)
    _set_up_logging(launch.rank)
    # Flags alone name a folder whose model gives defaults.
    flags = {setting.path: setting.value for setting in read_flags(argv).settings}
    of_others = foreign_checkpoints(folder_of_model(flags))
    foreign = of_others.defaults(argv)
    saved = () if foreign else options_of_checkpoint(argv)
    config = parse(
        argv,
        world_size=launch.world_size,
        env=os.environ,
        known=KNOWN_NAMES,
        rules=RULES,
        defaults={**foreign, **defaults},
        settings=saved,
    )
    if foreign:
        of_others.log_length(config)
    return launch, config


@dataclass(frozen=True)
class Opened:
    """What a run starts from, before its model is built.

    as_given     the options of the run, with the schedule of the checkpoint
    config       the same with the size of the vocabulary
    description  of the run, for run.json
    start        the checkpoint of this package to load, if any
    base         pretrained weights below added ones, or None
    foreign      the checkpoint of another program to load, or None
    prepare      of the objective, called when weights are loaded
    """

    as_given: RunConfig
    config: RunConfig
    tokenizer: Tokenizer
    loaders: Loaders
    description: dict
    start: Start
    base: BaseWeights | None
    foreign: Any
    prepare: Prepare


def train(
    as_given: RunConfig, mesh: Mesh, source: str, started: float, stop: StopRequest
) -> str:
    """Build all objects of this rank and train. Returns why training ended. Collective over the world.

    source: the launcher; started: time.monotonic() at the start of the process. The save folder is checked
    and locked first, since building may take minutes. Raises `Stopped` on all ranks when one of them received
    a stop signal before the first step.
    """
    world = mesh.group("world")
    as_given = continued(as_given, world, os.environ)
    recorded = as_given
    as_given = started_from_pretrained(as_given, world)
    checkpoint = as_given.checkpoint
    if mesh.rank == 0:
        logger.info(
            "megatron_ds %s on %d rank%s: opening data and building the model",
            __version__,
            world.size,
            ("s" if world.size > 1 else ""),
        )
    _leave_if_stopped(stop, mesh)
    on_all_ranks(world, lambda: _check_outputs(as_given, mesh))
    # Opening, building and loading take long, so stop signals are looked for after each.
    with save_folder(checkpoint, world) as lock:
        opened = _open(as_given, recorded, mesh)
        config = opened.config
        _leave_if_stopped(stop, mesh)
        replica = _build(opened, mesh, source)
        observer = observers_of(config)
        observer.built(replica)
        _leave_if_stopped(stop, mesh)
        progress, description = _load(replica, opened)
        observer.loaded(replica, opened.tokenizer)
        _leave_if_stopped(stop, mesh)
        # The save folder, before the first step: a full disk is an error now, not in hours.
        if checkpoint.save:
            given = recorded.checkpoint
            description |= _prepare_saves(replica, progress, lock, stop, given)
        # Train, then make sure that the folder was ours to the end.
        trainer = Trainer(
            replica,
            opened.loaders,
            _open_log(config, progress, opened, mesh),
            progress,
            description,
            observer,
            started,
            stop,
        )
        reason = trainer.run()
        if checkpoint.save:
            on_one_rank(world, lambda: lock.check())
            _name_last_checkpoint(trainer, mesh)
    was_complete = (
        progress.step
        and make_length(config).is_reached(progress)
        and not config.train.skip_train
    )
    return _nothing_to_do(config, progress) if was_complete else reason


def _open_log(config: RunConfig, progress: Progress, opened: Opened, mesh: Mesh) -> Log:
    """Open the log of rank 0; others have one that writes nothing. Collective over the world."""
    logs: list[Log] = []
    open_here = lambda: logs.append(open_log(config, progress, opened.start.run_id))
    on_one_rank(mesh.group("world"), open_here)
    return logs[0] if logs else Log()


def _open(as_given: RunConfig, recorded: RunConfig, mesh: Mesh) -> Opened:
    """Find what to load and open the data. Collective over the world.

    recorded: the configuration for run.json, with the --load and --save that the user gave
    Raises on all ranks where data, model or weights are not those of the saved run, or differ between ranks.
    """
    world = mesh.group("world")
    checkpoint = as_given.checkpoint
    of_others = foreign_checkpoints(checkpoint.load)
    # The data, under the schedule of the saved run.
    start = find_start(checkpoint, world, recorded.checkpoint)
    as_given = with_saved_schedule(as_given, start.run, checkpoint.load)
    recorded = with_saved_schedule(recorded, start.run, checkpoint.load)
    planned = on_all_ranks(world, lambda: planned_samples(start.run, as_given))
    config, tokenizer, loaders = on_all_ranks(
        world, lambda: _open_data(as_given, planned, mesh)
    )
    description = describe_run(config, recorded, tokenizer, start.run_id)
    description |= {"planned_samples": planned}
    identity = description["identity"]
    copies = None
    if world.size > 1:
        from .data_facts import require_same_data

        copies = require_same_data(config, identity, tokenizer, loaders, world)
    with_second_reading = None if copies is None else SECOND_READING.find()
    if with_second_reading is not None:
        loaders = with_second_reading(loaders, copies, mesh)
    # The weights.
    if start.step is not None:
        is_own = checkpoint.load == recorded.checkpoint.load
        check = check_same_run if is_own else check_same_weights
        on_all_ranks(world, lambda: check(start.run, description, checkpoint))
    base = find_base(config, description, world)
    if start.step is not None:
        on_all_ranks(world, lambda: check_same_base(start.run, base, config))
    if base is not None:
        description |= {"base": base.identity}
    foreign = on_all_ranks(world, lambda: of_others.read(config, start.foreign))
    description |= of_others.origin_of(start.run, foreign, config)
    # What else the objective reads, such as a second model.
    prepare = on_all_ranks(world, lambda: open_objective(config, tokenizer))
    return Opened(
        as_given, config, tokenizer, loaders, description, start, base, foreign, prepare
    )


def _build(opened: Opened, mesh: Mesh, source: str) -> Replica:
    """Build the model and its optimizer, and describe them in the log. Collective over the world."""
    config = opened.config
    replica = build_replica(config, mesh, plan_replica(config, mesh))
    for feature in features():
        if mesh.rank == 0 and feature.described is not None:
            logger.info("%s", feature.described(replica, source, opened.as_given))
    for feature in features():
        prepared = "" if feature.prepared is None else feature.prepared(replica)
        if prepared:
            logger.info("%s", prepared)
    return replica


def _load(replica: Replica, opened: Opened) -> tuple[Progress, dict]:
    """Load the weights and prepare the objective. Returns the progress of the checkpoint, and the description of the
    run. Collective over the world."""
    if opened.base is not None:
        load_base(replica, opened.base)
    if opened.foreign is None:
        progress = load_run(replica, opened.start)
        _log_changes(replica, opened, progress)
    else:
        of_others = foreign_checkpoints(opened.config.checkpoint.load)
        progress = of_others.load(
            replica, opened.foreign, all_pieces(replica), opened.config.checkpoint
        )
    found = opened.prepare(
        replica, opened.loaders, opened.start, opened.description, progress
    )
    return progress, opened.description | found


def _log_changes(replica: Replica, opened: Opened, progress: Progress) -> None:
    """Log on rank 0 what this start changes of the schedules of the run that it continues. Collective."""
    run = opened.start.run
    if not progress.step or "converted_from" in run:
        return

    from .continued_schedule import changes

    def texts() -> list[str]:
        before = saved_config(run, opened.config.checkpoint.load)
        return list(changes(before, opened.config, progress))

    for text in on_one_rank(replica.mesh.group("world"), texts):
        if replica.mesh.rank == 0:
            logger.warning("%s", text)


def _name_last_checkpoint(trainer: Trainer, mesh: Mesh) -> None:
    """Log on rank 0 the path of the newest checkpoint, if there is one."""
    if mesh.rank:
        return
    save = known_folder(trainer.config.checkpoint.save)
    if path := find(place_of(save), trainer.saves.step):
        logger.info("the last checkpoint is %s", path)


def _prepare_saves(
    replica: Replica,
    progress: Progress,
    lock: SaveLock,
    stop: StopRequest,
    given: CheckpointConfig,
) -> dict:
    """Check the save folder and its room, and keep the tokenizer there. Returns what run.json has of its files.

    given: the options of the user
    Collective over the world.
    """
    config = replica.config
    world = replica.mesh.group("world")
    on_one_rank(world, lambda: _stop_when_lost(lock, stop))
    clear_save_folder(given, world)
    _check_room(replica, progress)
    return on_one_rank(world, lambda: keep_tokenizer_files(config))


def _stop_when_lost(lock: SaveLock, stop: StopRequest) -> None:
    """On rank 0. A run that has lost its save folder stops at the next step; its last save raises the error."""
    lock.on_lost = lambda: stop.request(
        "the news that another job has taken over the save folder"
    )
    lock.check()


def _leave_if_stopped(stop: StopRequest, mesh: Mesh) -> None:
    """Raises `Stopped` if any rank received a signal. Collective over the world: one all-gather."""
    received = all_gather_object(stop.received, mesh.group("world"))
    if any(received):
        raise Stopped(before_training(next(filter(None, received))))


def _check_room(replica: Replica, progress: Progress) -> None:
    """Raises CheckpointError when the save folder has no room for one checkpoint. Collective."""
    config = replica.config
    mesh = replica.mesh
    checkpoint = config.checkpoint
    steps = make_length(config).steps_after(progress)
    saves = -(-steps // (checkpoint.save_interval or max(1, steps)))
    check_room(
        place_of(known_folder(checkpoint.save)),
        largest_pieces(replica),
        coordinates=mesh.coordinates,
        world=mesh.group("world"),
        saves=saves,
        limit=checkpoint.save_total_limit,
    )


def _nothing_to_do(config: RunConfig, progress: Progress) -> str:
    train = config.train
    lengths = {
        "--train-iters": train.train_iters,
        "--train-samples": train.train_samples,
        "--train-tokens": train.train_tokens,
    }
    limits = " and ".join(
        f"{name} is {limit}" for name, limit in lengths.items() if limit is not None
    )
    return (
        f"nothing to do: the checkpoint is at iteration {progress.step} ({progress.samples} samples, "
        f"{progress.tokens} tokens) and {limits}"
    )


def _what_would_fit(error: Exception, mesh: Mesh) -> str:
    place = ", ".join(
        f"{axis} {mesh.coordinate(axis)} of {mesh.size(axis)}"
        for axis in ("tp", "pp", "dp")
    )
    text = str(error).split(" If reserved but unallocated")[0].strip()
    return (
        f"out of memory on {mesh.device} of rank {mesh.rank} ({place}). What saves most, in this order: "
        "a smaller --micro-batch-size, --recompute-granularity full, --bf16, "
        "--use-distributed-optimizer, more --tensor-model-parallel-size or "
        f"--pipeline-model-parallel-size. Error of the device: {text}"
    )


def _open_data(
    config: RunConfig, planned: Sequence[int], mesh: Mesh
) -> tuple[RunConfig, Tokenizer, Loaders]:
    """(config with the size of the vocabulary, tokenizer, loaders). Reads files; not collective.

    planned: of `planned_samples`
    """
    config, tokenizer = with_tokenizer(config)
    kind = data_kind(config)
    config = fit_default_split(config, wanted_samples(config), kind)
    datasets = build_datasets(
        config,
        wanted_samples(config),
        tokenizer,
        kind,
        one_epoch=config.sample_order is not None,
        planned=planned,
    )
    return (
        config,
        tokenizer,
        build_loaders(config, rearranged(config, datasets, tokenizer), tokenizer, mesh),
    )


def _check_outputs(config: RunConfig, mesh: Mesh) -> None:
    """Raises ConfigError or CheckpointError when an output file or folder cannot be written."""
    for feature in features():
        if feature.outputs is not None:
            feature.outputs(config, mesh)
    if config.checkpoint.save:
        check_writable(place_of(config.checkpoint.save))
    if mesh.rank == 0:
        check_log(config)


@contextmanager
def deterministic_operations(wanted: bool) -> Iterator[None]:
    """Inside, if wanted, torch uses deterministic algorithms; cuBLAS needs a fixed workspace for them."""
    if not wanted:  # the call below imports torch's compiler, which takes seconds
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _set_up_logging(rank: int) -> None:
    """Log everything on rank 0; on other ranks only warnings, with their rank."""
    level = logging.INFO
    form = "%(message)s"
    if rank:
        level = logging.WARNING
        form = f"[rank {rank}] {form}"
    set_up_logging(level, form)
