"""`--dry-run`: print the plan of a run and exit. No GPU, no other process, no data; nothing is written.

A launch would meet the same errors, in the same words and with the same exit code: the rules over the configuration have been
checked before; the cut, the schedule and the layers are checked here.
"""

import gc
import logging
from collections.abc import Sequence

from ..config import RunConfig
from ..config.flags import read_flags
from ..mpu.launch import Launch
from .dry_run_text import plan_text
from .world_plan import plan_world, with_vocabulary

logger = logging.getLogger(__name__)


def names_its_world(argv: Sequence[str]) -> bool:
    """--dry-run with a --world-size: what launcher there is, if any, does not matter."""
    given = {setting.path: setting.value for setting in read_flags(argv).settings}
    return given.get("plan.dry_run", "off") != "off" and "plan.world_size" in given


def dry_run(as_given: RunConfig, launch: Launch) -> int:
    """Print the plan on rank 0; returns the exit code."""
    if launch.rank:
        return 0
    gc.freeze()             # a schedule is many small objects: leave those of the imports out of every collection
    config, unchecked = with_vocabulary(as_given)
    plan = plan_world(config, config.plan.rank, config.plan.dry_run)
    logger.info("%s", plan_text(plan, [*unchecked, *_unchecked(config)]))
    return 0


def _unchecked(config: RunConfig) -> list[str]:
    """What a launch would check and a plan does not, one line each."""
    data, zero, checkpoint = config.data, config.zero, config.checkpoint
    given = data.data_path or data.train_data_path or [*filter(None, (data.data_args_path, data.per_split_data_args_path))]
    files = f"the data in {' '.join(given)}" if given else "" if data.mock_data else "the data: none are given"
    folders = [f"write access to {folder}" for folder in (checkpoint.save, *dict.fromkeys(zero.disk_folders().values()))
               if folder]
    loads = [f"the checkpoint in {checkpoint.load}"] if checkpoint.load else []
    pins = ["--zero3-pin-stage auto, which depends on the memory of the devices; planned as off"] \
        if zero.stage == 3 and zero.zero3_pin_stage == "auto" else []
    cuts = ["the times of layers, which --pipeline-cut measured needs; cut by FLOPs in this plan"] \
        if config.parallel.pipeline_cut == "measured" else []
    devices = "memory and speed of the devices, the network between them, and memory that libraries and allocators take"
    return [*filter(None, [files]), *folders, *loads, *pins, *cuts, devices]
