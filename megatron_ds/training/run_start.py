"""Where a run starts, and the lock of its folder."""

from contextlib import AbstractContextManager, nullcontext

from ..config.options.training import CheckpointConfig
from ..mpu.agree import on_one_rank
from ..mpu.group import Group
from .start import Start, new_run_id


def save_folder(checkpoint: CheckpointConfig, world: Group) -> AbstractContextManager:
    """Return the lock of the --save folder, if any. Collective. Raises CheckpointError when another job holds it."""
    if checkpoint.save is None:
        return nullcontext()
    from ..checkpoint.lock import locked
    from ..checkpoint.place import place_of

    return locked(place_of(checkpoint.save), world)


def find_start(
    checkpoint: CheckpointConfig, world: Group, given: CheckpointConfig | None = None
) -> Start:
    """Return the start that rank 0 finds in the folders, on all ranks. Collective; called inside `save_folder`.

    given: the options of the user, where `checkpoint` has --pretrained-checkpoint as --load
    Raises CheckpointError when there is nothing to load, or when --save holds another run.
    """

    given = given or checkpoint

    def look() -> Start:
        # A run without folders loads nothing that reads them.
        if checkpoint.load is None and given.save is None:
            return Start(None, {}, new_run_id())
        from .start_folder import check_save_folder, start_in

        start = start_in(checkpoint)
        check_save_folder(given, start)
        return start

    return on_one_rank(world, look)
