"""The lock of a save folder: one live job at a time writes there, also on a shared file system.

    folder/.lock    {"token": …, "host": …, "pid": …, "machine": …, "born": …, "since": …, "job": …}

Rank 0 creates the file (`lock_file.py`), which fails if there is one. While the lock is held, a
thread renews its modification time, the *beat*. An abandoned lock is taken over

    same machine       at once, if no process has that pid and start time; never while such a process exists
    another machine    if the beat did not change for STALE seconds by the local clock; clocks need not agree

A process that was suspended and lost its lock finds another token in the file, or, where the other job has
ended, no file. Either way the lock is lost: it is never created a second time, and the process publishes
nothing (`SaveLock.check`).
"""

import contextlib
import json
import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import get_type_hints

from ..errors import CheckpointError
from ..mpu.agree import on_one_rank
from ..mpu.group import Group
from . import folder as folders
from .known_saves import KnownSaves
from .lock_file import lock_file

logger = logging.getLogger(__name__)

BEAT = 10.0  # seconds between two renewals
STALE = 60.0  # seconds without a renewal after which a process on another machine counts as ended
OLD = 10  # a beat older than OLD * STALE by the file server's clock is stale at once
ABSENT = 1.0  # seconds for which a lock is missing before it is lost: `_remove` renames it for a moment
HIDDEN = -1  # "start time" of a process that /proc does not show to this user
JOB_VARIABLES = {
    "SLURM_JOB_ID": "Slurm job",
    "PBS_JOBID": "PBS job",
    "LSB_JOBID": "LSF job",
    "JOB_ID": "job",
}


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock.

    token     random identifier of this lock
    machine   boot id and process namespace, within which `pid` is valid
    born      start time of the process in clock ticks since boot; with `pid` it identifies one process
    since     when the lock was acquired, as text
    job       of the queue, as text; "" if unknown
    """

    token: str
    host: str
    pid: int
    machine: str
    born: int
    since: str
    job: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}{f' ({self.job})' if self.job else ''}, since {self.since}"


def this_process(env: Mapping[str, str] = os.environ) -> Owner:
    """This process as the owner of a new lock. env: where job queues put their job id."""
    job = next(
        (f"{name} {env[key]}" for key, name in JOB_VARIABLES.items() if env.get(key)),
        "",
    )
    return Owner(
        secrets.token_hex(8),
        platform.node(),
        os.getpid(),
        _machine(),
        _born(os.getpid()) or HIDDEN,
        f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
        job,
    )


class SaveLock:
    """The lock of one folder, in the process of rank 0. beat, stale: as BEAT and STALE.

    saves     the checkpoints that the holder knows
    on_lost   is called once, from another thread or from `check`, when the lock was lost
    """

    def __init__(self, folder: Path, beat: float = BEAT, stale: float = STALE):
        self.folder = folder
        self.mine = this_process()
        self._file = lock_file(folder, self.mine.token)
        self.path = self._file.path
        self.saves = KnownSaves()
        self.on_lost = lambda: None
        self._beat = beat
        self._stale = stale
        # (owner, beat), and when they were first read.
        self._seen: tuple[tuple, float] | None = None
        self._lost = ""  # how the lock was lost
        self._warned = False
        self._stop = threading.Event()
        self._renewing = threading.Lock()
        self._thread = threading.Thread(
            target=self._renew_regularly, daemon=True, name="save folder lock"
        )

    def try_acquire(self) -> str | None:
        """None when the lock was acquired; else its owner, which may have ended: try again in a second.

        Raises CheckpointError when a live process holds it, OSError when the folder cannot be written.
        """
        folders.make(self.folder)
        while not self._create():
            found = self._read()
            if found is None:
                self._file.check()
                continue  # released in the meantime
            # The file exists. It is released, ours, in use, or its owner has ended.
            owner, beat = found
            if owner == self.mine:  # the link succeeded although an error was reported
                break
            if self._seen is None:
                self._seen = found, time.monotonic()
            first, since = self._seen
            runs = _runs_here(owner)
            if runs or owner is not None and found != first:
                raise CheckpointError(
                    f"it is in use by {owner}. Two jobs in one folder would overwrite each other's "
                    "checkpoints. Wait for that job, stop it, or give another folder. If that job has ended, "
                    f"delete {self.path}."
                )
            name = owner or "an unknown process"
            why = "which has ended"
            # Whether a process of another machine runs is unknown: only the age of its last beat decides.
            if runs is None:
                if (
                    time.monotonic() - since < self._stale
                    and self._file.now() - beat <= OLD * self._stale * 1e9
                ):
                    return str(name)
                why = f"which did not renew it for {self._stale:.0f} seconds"
            logger.warning("%s: taking over the lock of %s, %s", self.folder, name, why)
            self._remove(owner)
        # The lock is ours: renew it in the background until it is released. First remove what an earlier holder was
        # writing, so that no checkpoint can appear after the look that this holder does not know.
        self._thread.start()
        folders.clear(self.folder)
        self.saves.look(self.folder)
        return None

    def check(self) -> None:
        """Renew the lock, and create the folder again if it was removed.

        Raises CheckpointError when the lock was lost, or another job has saved there.
        """
        with self._renewing:
            if not self.folder.is_dir():
                self._warn_of_removal()
                folders.make(self.folder)
                self._create()
        self._renew()
        if self._lost:
            raise CheckpointError(
                f"{self._lost}, while this process ({self.mine}) was suspended or cut off "
                "from the file system. Nothing more is written there. Stop one of the two "
                "jobs if both run, and continue from the newest checkpoint with --load."
            )
        self.saves.check(self.folder)

    def release(self) -> None:
        """Stop renewing, and remove the file if it is still that of this lock."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(OSError, CheckpointError):
            if (found := self._read()) and found[0] == self.mine:
                self._file.delete()

    # ---- the file
    def _create(self) -> bool:
        """Create the lock file. False when there is one already."""
        return self._file.create(json.dumps(asdict(self.mine)))

    def _read(self) -> tuple[Owner | None, int] | None:
        """(owner, None if not valid; time of the last beat in ns); None when there is no lock."""
        found = self._file.read()
        return found and (_owner_in(found[0]), found[1])

    def _remove(self, owner: Owner | None) -> None:
        """Remove the lock that `owner` abandoned."""
        self._file.take_away(lambda content: _owner_in(content) == owner)
        self._seen = None

    # ---- the beat
    def _renew_regularly(self) -> None:
        while not self._stop.wait(self._beat):
            # The next beat or save tries again.
            with contextlib.suppress(OSError, CheckpointError):
                self._renew()

    def _renew(self) -> None:
        with self._renewing:
            if self._lost:
                return
            if not self.folder.is_dir():
                self._warn_of_removal()
                return
            found = self._found()
            if found and found[0] == self.mine:
                if self._file.touch():
                    return
                found = self._read()  # it was replaced after the first read
            if not found and not self.folder.is_dir():
                self._warn_of_removal()
            elif not found:
                self._lose(
                    f"the lock of {self.folder} was removed, or another job took it over and has "
                    "ended"
                )
            elif found[0] not in (None, self.mine):
                self._lose(f"{self.folder} was taken over by {found[0]}")

    def _found(self) -> tuple[Owner | None, int] | None:
        """Read the lock; if it is missing, look once more after a moment."""
        found = self._read()
        if not found:
            time.sleep(min(ABSENT, self._beat))
            self._file.look_again()
            found = self._read()
        return found

    def _lose(self, how: str) -> None:
        self._lost = how
        self.on_lost()

    def _warn_of_removal(self) -> None:
        if not self._warned:
            logger.warning(
                "%s was removed while this run saves there: its checkpoints and metrics are lost. "
                "The next save creates the folder again.",
                self.folder,
            )
        self._warned = True


def _owner_in(content: bytes) -> Owner | None:
    """Return the owner that a lock file names; None if it is not valid."""
    try:
        values = json.loads(content)
        owner = Owner(
            **{name: kind(values[name]) for name, kind in get_type_hints(Owner).items()}
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return owner if 0 < owner.pid < 2**31 else None


# (pid, real path) → lock held by this process: a run holds the lock of its folder, and each of its saves uses
# it.
_held: dict[tuple[int, str], SaveLock] = {}


@contextlib.contextmanager
def locked(
    folder: Path,
    world: Group,
    *,
    beat: float = BEAT,
    stale: float = STALE,
    poll: float = 1.0,
) -> Iterator[SaveLock | None]:
    """Hold the lock of `folder`, or reuse that of this process; yields it on rank 0, None elsewhere.

    Collective over `world`: while rank 0 watches another owner, one gather of results every `poll` seconds,
    so that no rank waits in a collective for long. beat, stale: see `SaveLock`. Raises CheckpointError on all
    ranks while a live process holds the lock.
    """
    # A save inside a run that holds the lock already reuses it.
    place = (os.getpid(), str(folder.resolve()))
    held: SaveLock | None = None
    lock: SaveLock | None = None
    acquire: Callable[[], str | None] = lambda: None
    if world.rank == 0:
        held = _held.get(place)
        lock = held or SaveLock(folder, beat, stale)
        acquire = held.check if held else lock.try_acquire
    try:
        # All ranks learn the result together: rank 0 asks, the others wait in a short collective.
        waiting = False
        while owner := on_one_rank(
            world, acquire, doing=f"cannot save in {folder}", kind=CheckpointError
        ):
            if lock and not waiting:
                logger.warning(
                    "%s is locked by %s, which may have ended: waiting at most %.0f seconds for a "
                    "renewal",
                    folder,
                    owner,
                    stale,
                )
            waiting = True
            time.sleep(poll)
        if lock:
            _held[place] = lock
        yield lock
    finally:
        if lock and not held:
            _held.pop(place, None)
            lock.release()


# ---- processes of this machine


def _machine() -> str:
    """Identifier of this boot of this machine and of this process namespace; empty when it cannot be read."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _born(pid: int) -> int | None:
    """Start time of a process of this machine; None when it has ended, HIDDEN when /proc hides it."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except OSError:  # exists, and belongs to another user
            pass
        return HIDDEN
    return None if state in "ZX" else int(rest[18])


def _runs_here(owner: Owner | None) -> bool | None:
    """Return whether the owner is alive; None unless it is a process of this machine that this user can see."""
    if owner is None or not owner.machine or owner.machine != _machine():
        return None
    born = _born(owner.pid)
    if born is None:
        return False
    # The owner may not have found its own start time either, which then equals no other.
    if HIDDEN in (born, owner.born):
        return None
    return born == owner.born
