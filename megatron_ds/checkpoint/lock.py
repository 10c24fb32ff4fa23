"""The lock of a save folder: one live job writes there at a time, on file systems that several machines share too.

    folder/.lock    {"token": …, "host": …, "pid": …, "machine": …, "born": …, "since": …, "job": …}

Rank 0 writes the file under another name and links it to this one, which is atomic on NFS too, and fails where there is a
lock. (flock is not used: it may not reach other machines, and forked workers keep it when their parent was killed.) While the
lock is held, a thread renews the file's modification time, the *beat*. A lock left behind is taken over

    same machine    at once, when no process has that pid and start time; never while there is one
    another one     when the beat did not change for STALE seconds, watched here, so that clocks need not agree

A holder that was suspended and lost its lock finds another token in the file, and publishes nothing (`SaveLock.check`).
"""

import contextlib
import json
import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path

from ..errors import CheckpointError
from ..mpu.agree import on_one_rank
from ..mpu.group import Group
from .folder import read_regular

logger = logging.getLogger(__name__)

LOCK = ".lock"
BEAT = 10.0        # seconds between two renewals
STALE = 60.0       # seconds without a renewal, after which a process on another machine counts as gone
OLD = 10           # a beat older than so many times STALE, by the file system's clock, is not watched first
HIDDEN = -1        # "start time" of a process that /proc does not show to this user
JOB_VARIABLES = {"SLURM_JOB_ID": "Slurm job", "PBS_JOBID": "PBS job", "LSB_JOBID": "LSF job", "JOB_ID": "job"}


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock.

    token     random, of this lock
    machine   boot id and process namespace: where `pid` means a process
    born      start time of the process, in clock ticks since boot; with `pid` it names one process only
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
    job = next((f"{name} {env[key]}" for key, name in JOB_VARIABLES.items() if env.get(key)), "")
    return Owner(secrets.token_hex(8), platform.node(), os.getpid(), _machine(), _born(os.getpid()) or 0,
                 f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}", job)


class SaveLock:
    """The lock of one folder, in the process of rank 0."""

    def __init__(self, folder: Path, beat: float = BEAT, stale: float = STALE):
        """beat, stale: seconds between renewals, and seconds without one after which the owner counts as gone."""
        self.folder, self.path, self.mine = folder, folder / LOCK, this_process()
        self._beat, self._stale = beat, stale
        self._seen: tuple[tuple, float] | None = None       # (what the file was, when it was first seen so)
        self._lost: Owner | None = None
        self._warned = False
        self._stop, self._renewing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._renew_regularly, daemon=True, name="save folder lock")

    def try_acquire(self) -> str | None:
        """None when the lock is held now; else its owner, which may be gone: try again in a second.

        Raises CheckpointError when a live process holds it, OSError when the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        while not self._create():
            found = self._read()
            if found is None:
                if self.path.is_symlink():
                    raise CheckpointError(f"{self.path} is a link that leads nowhere. Delete it.")
                continue                                    # released meanwhile
            owner, beat = found
            if owner == self.mine:                          # the file server did what it then reported as failed
                break
            if _is_alive(owner) or self._has_moved(owner, beat):
                raise CheckpointError(
                    f"it is in use by {owner}. Two jobs in one folder would overwrite each other's checkpoints. Wait for that "
                    f"job, stop it, or give another folder. If you are sure that it is gone, delete {self.path}.")
            if _is_gone(owner) or self._is_silent(owner, beat):
                why = "which is gone" if _is_gone(owner) else f"which did not renew it for {self._stale:.0f} seconds"
                logger.warning("%s: taking over the lock of %s, %s", self.folder, owner or "an unknown process", why)
                self._remove(owner)
            else:
                return str(owner or "an unknown process")
        self._thread.start()
        return None

    def check(self) -> None:
        """Raises CheckpointError when another process has taken the lock over."""
        self._renew()
        if self._lost:
            raise CheckpointError(f"the folder was taken over by {self._lost}, while this process ({self.mine}) was suspended "
                                  "or cut off from the file system. Nothing more is written there. Stop one of the two jobs.")

    def release(self) -> None:
        """Remove the file, if it is this lock's; also of a lock that was not acquired."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(OSError, CheckpointError):
            if (found := self._read()) and found[0] == self.mine:
                self.path.unlink()

    # ---- the file
    def _create(self) -> bool:
        """Whether the lock is this process's now; False when there is a lock already."""
        text, beside = json.dumps(asdict(self.mine)), self.folder / f"{LOCK}.{self.mine.token}"
        _write_new(beside, text)
        try:
            os.link(beside, self.path)
        except FileExistsError:
            return False
        except OSError:                                     # a file system without links
            return _write_new(self.path, text)
        finally:
            beside.unlink()
        return True

    def _read(self) -> tuple[Owner | None, int] | None:
        """None without a file; else see `_read`."""
        try:
            return _read(self.path)
        except FileNotFoundError:
            return None

    def _remove(self, owner: Owner | None) -> None:
        """Remove the lock that `owner` left. Renamed first: another job may have taken it over a moment ago."""
        aside = self.folder / f"{LOCK}.{self.mine.token}.old"
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, aside)
            if _read(aside)[0] != owner:
                with contextlib.suppress(OSError):          # its owner makes it anew at its next beat
                    os.link(aside, self.path)
            aside.unlink()
        self._seen = None

    # ---- whether its owner lives
    def _has_moved(self, owner: Owner | None, beat: int) -> bool:
        """Whether the beat changed since it was first seen."""
        if self._seen is None:
            self._seen = (owner, beat), time.monotonic()
        return self._seen[0] != (owner, beat) and owner is not None

    def _is_silent(self, owner: Owner | None, beat: int) -> bool:
        if self._has_moved(owner, beat):
            return False
        return time.monotonic() - self._seen[1] >= self._stale or self._now() - beat > OLD * self._stale * 1e9

    def _now(self) -> int:
        """The clock that stamps files of this folder, in ns: that of the file server."""
        probe = self.folder / f"{LOCK}.{self.mine.token}.now"
        probe.touch()
        try:
            return probe.stat().st_mtime_ns
        finally:
            probe.unlink()

    # ---- the beat
    def _renew_regularly(self) -> None:
        while not self._stop.wait(self._beat):
            with contextlib.suppress(OSError, CheckpointError):     # the next beat, or the next save, tries again
                self._renew()

    def _renew(self) -> None:
        with self._renewing:
            self._renew_alone()

    def _renew_alone(self) -> None:
        if not self.folder.is_dir():
            if not self._warned:
                logger.warning("%s was removed while this run saves there: its checkpoints and metrics are gone. The next "
                               "save makes the folder anew.", self.folder)
            self._warned = True
            return
        if not (found := self._read()):
            self._create()
            found = self._read()
        if found and found[0] == self.mine:
            os.utime(self.path)
        elif found and found[0]:
            self._lost = found[0]


def _read(path: Path) -> tuple[Owner | None, int]:
    """(owner of a lock, its time of modification in ns); no owner where the file does not name one."""
    text, beat = read_regular(path), path.stat().st_mtime_ns
    try:
        values = json.loads(text)
        owner = Owner(**{field.name: field.type(values[field.name]) for field in fields(Owner)})
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None, beat
    return owner if 0 < owner.pid < 2**31 else None, beat


def _write_new(path: Path, text: str) -> bool:
    """Make a file; False when there is one."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o644)
    except FileExistsError:
        return False
    with open(handle, "w") as file:
        file.write(text)
    return True


_held: dict[tuple[int, str], SaveLock] = {}      # of this process: a run holds its folder's lock, and each of its saves asks


@contextlib.contextmanager
def locked(folder: Path, world: Group, *, beat: float = BEAT, stale: float = STALE,
           poll: float = 1.0) -> Iterator[SaveLock | None]:
    """Hold the lock of `folder`; the lock, on rank 0. A lock that this process holds already is used, and kept.

    Collective over `world`: a gather of results every `poll` seconds while the owner is watched, so that no rank waits in a
    collective for long. beat, stale: of `SaveLock`. Raises CheckpointError on all ranks while a live process holds the lock.
    """
    place, held, lock = (os.getpid(), os.path.realpath(folder)), None, None
    if world.rank == 0:
        held = _held.get(place)
        lock = held or SaveLock(folder, beat, stale)
    acquire = held.check if held else lock and lock.try_acquire
    try:
        waiting = False
        while owner := on_one_rank(world, acquire, doing=f"cannot save in {folder}", kind=CheckpointError):
            if lock and not waiting:
                logger.warning("%s is locked by %s, which may be gone: waiting for a sign of life, at most %.0f seconds",
                               folder, owner, stale)
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
    """Of one boot of one machine, and of one namespace of processes; empty where this is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _born(pid: int) -> int | None:
    """Start time of a process of this machine: None when it is not there or has ended, HIDDEN when /proc does not show it."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None if _is_unknown(pid) else HIDDEN
    return None if state in "ZX" else int(rest[18])


def _is_unknown(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass                                                # of another user: it is there
    return False


def _is_here(owner: Owner | None) -> bool:
    return owner is not None and owner.pid > 0 and owner.machine != "" and owner.machine == _machine()


def _is_gone(owner: Owner | None) -> bool:
    return _is_here(owner) and _born(owner.pid) not in (owner.born, HIDDEN)


def _is_alive(owner: Owner | None) -> bool:
    return _is_here(owner) and _born(owner.pid) == owner.born
