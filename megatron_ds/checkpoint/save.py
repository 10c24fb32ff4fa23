"""Save a checkpoint: all ranks write chunks into a hidden directory, which rank 0 then publishes.

    all     write own chunks, sync                          .iter_0000200.writing-5f0c2a91/__{rank}_0.distcp
    rank 0  index, run.json, sync; rename; tracker          iter_0000200/, latest_checkpointed_iteration.txt
            delete old checkpoints

A crash at any point leaves the checkpoint that the tracker named before (see `folder.py`). Rank 0 holds the
lock of the folder during a save (`lock.py`); a training run holds it from start to end.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from ..errors import CheckpointError
from ..mpu.agree import gather_from_all_ranks, on_one_rank
from ..mpu.group import Group
from ..mpu.param_spec import Coordinates
from . import folder as folders
from .disk_space import bytes_written_here, explained, free_bytes
from .folder import prune
from .lock import locked
from .pieces import Piece, written_here
from .run_file import plain, write_run_file

T = TypeVar("T")


def save(
    directory: str | os.PathLike,
    step: int,
    pieces: Iterable[Piece],
    *,
    coordinates: Coordinates,
    world: Group,
    run: Mapping,
    limit: int | None = None,
    retain: int | None = None,
) -> Path:
    """Write the checkpoint of `step`. Returns its path when it is complete, durable and named by the tracker.

    pieces   all state of this rank; one rank writes content that several hold
    run      plain JSON values for run.json, from rank 0; `load.read_run` returns them
    limit    how many checkpoints to keep in `directory`; None keeps all
    retain   of earlier checkpoints keep only steps that are multiples of this; None keeps all

    Collective over `world`. Raises CheckpointError on all ranks when any rank failed, or when another live
    job saves into the folder; the previous checkpoint is then unchanged.
    """
    from .storage import (  # imports take 0.8 s; only processes that save need them
        write_index,
        write_pieces,
    )

    folder = Path(directory)
    pieces = list(pieces)
    failing = {
        "doing": f"could not save iteration {step} to {directory}",
        "kind": CheckpointError,
    }
    # Values that are not JSON are an error before anything is written.
    values = on_one_rank(world, lambda: plain(run), **failing)
    share = bytes_written_here(pieces, coordinates)
    with locked(folder, world) as lock:

        def prepare() -> tuple[int, int | None, Path | None]:
            """Every rank: bytes it will write. Rank 0: remove leftovers, make the hidden directory."""
            if world.rank:
                return share, None, None
            lock.check()
            writing = folders.begin(folder, step)
            return share, free_bytes(folder), writing

        def finish() -> None:
            """Rank 0: index and run.json, then publish, then delete old checkpoints."""
            save_id = secrets.token_hex(16)
            write_run_file(
                writing, step, values, save_id, write_index(writing, parts, save_id)
            )
            lock.check()
            folders.publish(folder, step, writing)
            lock.saves.look(folder)
            prune(folder, step, limit, retain)

        # A step in three parts: prepare, write, publish. All ranks finish one before the next.
        begun = gather_from_all_ranks(world, prepare, **failing)
        needed, (_, free, writing) = sum(share for share, *_ in begun), begun[0]
        guarded = lambda action: _explaining(action, folder, needed, free, share)
        try:
            write = lambda: write_pieces(
                writing, written_here(pieces, coordinates), coordinates, world.rank
            )
            parts = gather_from_all_ranks(world, lambda: guarded(write), **failing)
            on_one_rank(world, lambda: guarded(finish), **failing)
        # The hidden directory of a failed save is removed.
        except BaseException:
            if world.rank == 0:
                shutil.rmtree(writing, ignore_errors=True)
            raise
    return folder / folders.name_of(step)


def _explaining(action: Callable[[], T], folder: Path, *numbers: int | None) -> T:
    """`action()`, with an explained error when the disk is full (`disk_space.explained`)."""
    try:
        return action()
    except (OSError, RuntimeError) as error:
        raise explained(error, folder, *numbers) from error
