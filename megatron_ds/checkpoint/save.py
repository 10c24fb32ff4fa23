"""Save: every rank writes its share into a hidden directory, rank 0 makes it visible when all of it is on disk.

    all     write own chunks, sync                                 .iter_0000200.writing/__{rank}_0.distcp
    rank 0  index, run.json, sync; rename; tracker; delete old     iter_0000200/, latest_checkpointed_iteration.txt

A crash at any byte leaves the checkpoint that the tracker pointed to before (`folder.py` says why).
"""

import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..mpu.group import Group
from . import folder as folders
from .folder import check_writable
from .pieces import Piece, written_here
from .retain import prune
from .run_file import plain, write_run_file
from .together import together

__all__ = ["save", "check_writable"]


def save(directory: str | os.PathLike, step: int, pieces: Iterable[Piece], *, tp: Group, world: Group, run: Mapping,
         limit: int | None = None) -> Path:
    """Write the checkpoint of `step`; its path, when it is complete, durable and the one that `latest` finds.

    pieces   all that this rank holds; of replicated content one rank writes one copy
    run      plain JSON values about the run, of rank 0; `load.read_run` returns them
    limit    how many checkpoints to keep in `directory`; None keeps all

    Collective over `world`. Raises CheckpointError on all ranks when any failed; the previous checkpoint is then untouched.
    """
    from .storage import write_index, write_pieces  # 0.8 s of imports, for processes that do save

    folder, what = Path(directory), f"could not save iteration {step} to {directory}"
    writing = folders.writing_path(folder, step)

    def prepare() -> dict:
        values = plain(run)
        folders.begin(folder, step)
        return values

    def finish() -> None:
        save_id = secrets.token_hex(16)
        write_run_file(writing, step, values, save_id, write_index(writing, parts, save_id))
        folders.publish(folder, step)
        prune(folder, step, limit)

    values = together(world, what, prepare, only=0)[0]
    try:
        parts = together(world, what, lambda: write_pieces(writing, written_here(pieces, tp), tp, world.rank))
        together(world, what, finish, only=0)
    except BaseException:
        if world.rank == 0:
            folders.abandon(folder, step)
        raise
    return folder / folders.name_of(step)
