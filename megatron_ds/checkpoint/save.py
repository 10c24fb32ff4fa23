"""Save a checkpoint: all ranks write chunks into a hidden directory, which rank 0 then publishes.

    begin    all      agree on the bytes; rank 0 makes     .iter_0000200.writing-5f0c2a91/
    write    all      own chunks, sync                     .iter_0000200.writing-5f0c2a91/__{rank}_0.distcp
    publish  rank 0   index, run.json, sync                .iter_0000200.writing-5f0c2a91/.metadata, run.json
                      rename; tracker                      iter_0000200/, latest_checkpointed_iteration.txt
    prune    rank 0   delete old checkpoints

A crash at any point leaves the checkpoint that the tracker named before (see `folder.py`). Rank 0 holds the
lock of the folder during a save (`lock.py`); a training run holds it from start to end.

`save` goes through the stages at once. `Saving` has them one by one: `write`, `publish` and `prune` do not
communicate, so another thread may do them while training goes on (`background_save.py`).
"""

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CheckpointError
from ..host.pace import Pace
from ..mpu.agree import FailureWords, gather_from_all_ranks, on_one_rank
from ..mpu.group import Group
from ..mpu.param_spec import Coordinates
from . import folder as folders
from .disk_space import bytes_written_here, explained, free_bytes
from .folder import prune
from .lock import SaveLock, locked
from .pieces import Piece, written_here
from .place import place_of
from .run_file import plain, write_run_file

T = TypeVar("T")
logger = logging.getLogger(__name__)


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
    pieces = list(pieces)
    saving = Saving(directory, step, coordinates, world, limit, retain)
    saving.begin(pieces, run)
    return saving.complete(saving.collect(lambda: saving.write(saving.own(pieces))))


class Saving:
    """The save of one step, stage by stage. Arguments as of `save`.

    In order: `begin`, `write`, `collect`, `publish`, `agree`, `prune`, `close`.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        step: int,
        coordinates: Coordinates,
        world: Group,
        limit: int | None = None,
        retain: int | None = None,
    ):
        self.folder = place_of(directory)
        self.step = step
        self._save_id = secrets.token_hex(16)
        self._coordinates = coordinates
        self._world = world
        self._kept = (limit, retain)
        self._failing: FailureWords = {
            "doing": f"could not save iteration {step} to {directory}",
            "kind": CheckpointError,
        }
        self._held = ExitStack()  # the lock of the folder

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank writes the index, publishes and prunes."""
        return self._world.rank == 0

    def own(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return the pieces that this rank writes."""
        return written_here(pieces, self._coordinates)

    def begin(self, pieces: Iterable[Piece], run: Mapping) -> None:
        """Agree on the save, and make the hidden directory. Collective over the world."""
        # Values that are not JSON are an error before anything is written.
        self._values = on_one_rank(self._world, lambda: plain(run), **self._failing)
        share = bytes_written_here(list(pieces), self._coordinates)
        self._lock = self._held.enter_context(locked(self.folder, self._world))

        def prepare() -> tuple[int, int | None, Path | None]:
            """Return the bytes that this rank will write. Rank 0 removes leftovers and makes the hidden directory."""
            if self._lock is None:
                return share, None, None
            self._lock.check()
            writing = folders.begin(self.folder, self.step)
            return share, free_bytes(self.folder), writing

        try:
            begun = gather_from_all_ranks(self._world, prepare, **self._failing)
        except BaseException:
            self._held.close()
            raise
        needed = sum(share for share, *_ in begun)
        _, free, writing = begun[0]
        assert writing is not None  # of rank 0
        self._writing = writing
        self._numbers = (needed, free, share)

    @property
    def _own_lock(self) -> SaveLock:
        assert self._lock is not None, "rank 0 alone publishes and prunes"
        return self._lock

    def write(self, pieces: Iterable[Piece], pace: Pace | None = None) -> Any:
        """Write and sync this rank's own pieces. Return its part of the index. Not collective.

        pace: of a thread that writes beside a computation
        """
        # The import takes 0.8 s; only processes that save need it.
        from .storage import write_pieces

        write = lambda: write_pieces(
            self._writing,
            pieces,
            self._coordinates,
            self._world.rank,
            pace or Pace(),
        )
        return self._guarded(write)

    def collect(self, written: Callable[[], Any]) -> list:
        """Return what `written` returned on each rank, when all have written. Collective over the world.

        Raises CheckpointError on all ranks if it raises on any; the save is then abandoned.
        """
        with self._abandoned_on_error():
            return gather_from_all_ranks(self._world, written, **self._failing)

    def publish(self, parts: list) -> Path:
        """Write and sync the index and run.json, and make the checkpoint visible. On rank 0; not collective.

        parts: what `write` returned on each rank
        Returns the path of the checkpoint.
        """
        from .storage import write_index

        def write() -> None:
            index = write_index(self._writing, parts, self._save_id)
            write_run_file(self._writing, self.step, self._values, self._save_id, index)

        self._guarded(write)
        self._own_lock.check()
        # Before the publication, which may fail after the checkpoint has become visible.
        self._own_lock.saves.wrote(self.folder, self.step, self._save_id)
        publish = lambda: folders.publish(self.folder, self.step, self._writing)
        return self._guarded(publish)

    def agree(self, published: Callable[[], Path]) -> Path:
        """Return the path of the checkpoint on all ranks. Collective over the world.

        published: called on rank 0, it waits for `publish`, and raises its error
        """
        with self._abandoned_on_error():
            return on_one_rank(self._world, published, **self._failing)

    def prune(self) -> None:
        """Delete old checkpoints, if the folder is still that of this job. On rank 0; not collective."""
        try:
            self._own_lock.check()
        except Exception as error:  # of a file system, or of a store's own kind
            logger.warning("old checkpoints are kept: %s", error)
            return
        prune(self.folder, self.step, *self._kept)

    def close(self) -> None:
        """Release the folder. Not collective; for all ranks."""
        self._held.close()

    def complete(self, parts: list) -> Path:
        """Call `publish`, `agree`, `prune` and `close`. Collective over the world."""
        path = self.agree(lambda: self.publish(parts))
        if self.is_first_rank:
            self.prune()
        self.close()
        return path

    def abandon(self) -> None:
        """Remove the hidden directory, and release the folder. Not collective; for all ranks."""
        if self.is_first_rank:
            folders.abandon(self._writing)
        self.close()

    @contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def _guarded(self, action: Callable[[], T]) -> T:
        """Return `action()`; explain its error when the disk is full (`disk_space.explained`).

        If another job has taken over and removed what this one was writing, the lost lock is the error.
        """
        try:
            return action()
        except (OSError, RuntimeError, CheckpointError) as error:
            if self._lock is not None:
                self._lock.check()
            if isinstance(error, CheckpointError):
                raise
            raise explained(error, self.folder, *self._numbers) from error
