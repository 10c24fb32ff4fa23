"""A run that the launcher has started again continues from the newest checkpoint in its --save folder, or begins again.

The launcher gives its runs an identifier, which is the same in all starts: by it a checkpoint of an earlier start is
known, and that of another run in the folder is not loaded.
"""

import logging
from collections.abc import Mapping

from ..checkpoint.load import latest, read_run
from ..checkpoint.place import place_of
from ..checkpoint.save_folder import run_id_of, saved_run_in
from ..config import RunConfig, Source
from ..config.options.training import CheckpointConfig
from ..errors import CheckpointError
from ..launch_env import restarts_in, run_in
from ..mpu.agree import gather_from_all_ranks, on_one_rank
from ..mpu.group import Group

FROM_SAVE = {
    "checkpoint.load_format": None,
    "checkpoint.finetune": False,
    "checkpoint.no_load_optim": False,
    "checkpoint.overwrite_save": False,
}
logger = logging.getLogger(__name__)


def continued(config: RunConfig, world: Group, environ: Mapping[str, str]) -> RunConfig:
    """Return the configuration of this start: after a restart, --load is --save if that holds a checkpoint of this
    run.

    Files of this run without a checkpoint stay where they are, also with --overwrite-save.
    Collective over the world.
    """
    # Launchers of several machines may count differently; what follows is collective.
    restarts = max(gather_from_all_ranks(world, lambda: restarts_in(environ)))
    checkpoint = config.checkpoint
    save = checkpoint.save
    if not restarts or not save:
        return config
    run_id = run_in(environ)
    source = Source("derived", f"restart {restarts}")
    step = on_one_rank(world, lambda: _own_step(checkpoint, save, run_id))
    if step is None:
        has_begun = on_one_rank(world, lambda: _has_begun(save, run_id))
        kept = {"checkpoint.overwrite_save": False} if has_begun else {}
        return config.with_values(kept, source)
    if world.rank == 0:
        logger.info(
            "restart %d: continuing from iteration %d in %s",
            restarts,
            step,
            checkpoint.save,
        )
    return config.with_values({**FROM_SAVE, "checkpoint.load": checkpoint.save}, source)


def _own_step(checkpoint: CheckpointConfig, save: str, run_id: str) -> int | None:
    """Return the newest step of this run in the --save folder."""
    step = latest(save)
    if step is None:
        return None
    own: set[str | None] = {run_id}
    # A run that continues from --load in another folder keeps its identifier.
    if checkpoint.load and not checkpoint.finetune:
        own.add(_run_id(checkpoint.load))
    return step if _run_id(save) in own - {None, ""} else None


def _has_begun(save: str, run_id: str) -> bool:
    """Return whether the --save folder holds files of this run."""
    there = saved_run_in(place_of(save))
    return there is not None and there.run_id == run_id


def _run_id(folder: str) -> str | None:
    """Return the identifier of the newest checkpoint; None where there is none of this package."""
    try:
        step = latest(folder) if place_of(folder).is_dir() else None
        return None if step is None else run_id_of(read_run(folder, step))
    except CheckpointError:
        return None
