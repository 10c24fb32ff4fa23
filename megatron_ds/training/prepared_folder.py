"""The folder of --save: what is checked and kept there before the first step, and what it holds at the end."""

import logging

from ..checkpoint.disk_space import check_room
from ..checkpoint.folder import find
from ..checkpoint.lock import SaveLock
from ..checkpoint.place import place_of
from ..checkpoint.tokenizer_files import keep_tokenizer_files
from ..cli import StopRequest
from ..config.options.training import CheckpointConfig
from ..mpu.agree import on_one_rank
from ..mpu.mesh import Mesh
from ..planning.training_length import make_length
from ..progress.ramps import Progress
from .build import Replica
from .run_checkpoint import largest_pieces
from .start import known_folder
from .start_folder import clear_save_folder
from .trainer import Trainer

logger = logging.getLogger(__name__)


def name_last_checkpoint(trainer: Trainer, mesh: Mesh) -> None:
    """Log on rank 0 the path of the newest checkpoint, if there is one."""
    if mesh.rank:
        return
    save = known_folder(trainer.config.checkpoint.save)
    if path := find(place_of(save), trainer.saves.step):
        logger.info("the last checkpoint is %s", path)


def prepare_saves(
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
