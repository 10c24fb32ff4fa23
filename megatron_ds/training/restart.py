"""A run that the launcher has started again continues from the newest checkpoint in its --save folder, or begins again.

The launcher gives its runs an identifier, which is the same in all starts: by it a checkpoint of an earlier start is
known, and that of another run in the folder is not loaded.
"""

import logging
from collections.abc import Mapping

from ..config import RunConfig, Source
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
    from .restarted_run import has_begun, own_step

    run_id = run_in(environ)
    source = Source("derived", f"restart {restarts}")
    step = on_one_rank(world, lambda: own_step(checkpoint, save, run_id))
    if step is None:
        is_begun = on_one_rank(world, lambda: has_begun(save, run_id))
        kept = {"checkpoint.overwrite_save": False} if is_begun else {}
        return config.with_values(kept, source)
    if world.rank == 0:
        logger.info(
            "restart %d: continuing from iteration %d in %s",
            restarts,
            step,
            checkpoint.save,
        )
    return config.with_values({**FROM_SAVE, "checkpoint.load": checkpoint.save}, source)
