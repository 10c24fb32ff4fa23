"""Disk space: bytes that a checkpoint needs, bytes that are free, and the error of a failed write."""

import errno
import logging
import os
import resource
from collections.abc import Iterable
from functools import singledispatch
from pathlib import Path

from ..errors import CheckpointError
from ..mpu.agree import FailureWords, gather_from_all_ranks, on_all_ranks
from ..mpu.group import Group
from ..mpu.param_spec import Coordinates
from .folder import probe
from .pieces import Piece, written_here

logger = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
HEADER = 1500  # least number of bytes that torch.save adds to a tensor (measured: 1513 to 1577)
PROBE = 1 << 20  # bytes written to find out whether a disk is full


def bytes_written_here(pieces: Iterable[Piece], coordinates: Coordinates) -> int:
    """Lower bound of the size of the file that this rank writes."""
    written = written_here(pieces, coordinates)
    return sum(
        piece.tensor.numel() * piece.tensor.element_size() + HEADER for piece in written
    )


@singledispatch
def free_bytes(folder: Path) -> int | None:
    """Bytes that this user may write in the file system of `folder`; None when it does not report them."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def file_limit() -> int | None:
    """Size in bytes of the largest file that this process may write (`ulimit -f`); None for no limit."""
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def check_room(
    folder: Path,
    pieces: Iterable[Piece],
    *,
    coordinates: Coordinates,
    world: Group,
    saves: int,
    limit: int | None,
) -> None:
    """Warn when not all checkpoints of a run fit on the disk. Collective over `world`.

    saves   how many checkpoints the run will write
    limit   how many it keeps, not counting the one being written

    Raises CheckpointError on all ranks when not even one checkpoint fits.
    """
    share = bytes_written_here(pieces, coordinates)

    def look() -> tuple[int, int | None]:
        if (most := file_limit()) is not None and share > most:
            raise CheckpointError(
                f"a file of the checkpoint needs {share:,} bytes, and this process may "
                f"write files of {most:,} bytes (ulimit -f). Raise the limit."
            )
        return share, free_bytes(folder) if world.rank == 0 else None

    # Every rank knows its own share; rank 0 alone looks at the disk.
    failing: FailureWords = {"doing": f"--save {folder}", "kind": CheckpointError}
    found = gather_from_all_ranks(world, look, **failing)
    needed = sum(share for share, _ in found)
    free = found[0][1]
    kept = saves if limit is None else min(saves, limit + 1)
    if free is None or not saves:
        return
    # Less than one checkpoint is an error, less than all that are kept a warning.
    if free < needed:

        def refuse() -> None:
            raise CheckpointError(
                f"no space left for a checkpoint: {needed:,} bytes needed, {free:,} free. "
                "Free some, give a folder on another disk, or save less: --no-save-optim "
                "writes weights only."
            )

        on_all_ranks(world, refuse, **failing)
    if free < kept * needed and world.rank == 0:
        logger.warning(
            "--save %s: checkpoints that fit: %d (%s each, %s free), and this run keeps up to %d "
            "at a time. %s",
            folder,
            free // needed,
            size(needed),
            size(free),
            kept,
            "Free some, or keep fewer with --save-total-limit."
            if kept > 2
            else "Free some.",
        )


def explained(
    error: Exception, folder: Path, needed: int, free: int | None, share: int
) -> Exception:
    """Return the error to raise for a failed write: a CheckpointError with numbers if a full disk caused it.

    needed: bytes of the checkpoint. share: of this rank. free: when the save began; None if unknown
    """
    most = file_limit()
    code = _errno_of(error) or _errno_of_probe(folder)
    if code == errno.EFBIG or code is None and most is not None and share > most:
        allowed = "fewer" if most is None else f"{most:,}"
        return CheckpointError(
            f"File too large: a file of about {share:,} bytes needed, and this process "
            f"may write files of {allowed} bytes (ulimit -f). Raise the limit."
        )
    if (
        code in FULL
        or isinstance(error, RuntimeError)
        and free is not None
        and free < needed
    ):
        words = (
            "Disk quota exceeded" if code == errno.EDQUOT else "No space left on device"
        )
        return CheckpointError(
            f"{words}: about {needed:,} bytes needed, {_counted(free)} free in {folder} when the save began and "
            f"{_counted(_free_now(folder))} now. Free some, or keep fewer checkpoints with --save-total-limit."
        )
    return error


def _counted(count: int | None) -> str:
    return "an unknown number" if count is None else f"{count:,}"


def _free_now(folder: Path) -> int | None:
    try:
        return free_bytes(folder)
    except OSError:
        return None


def bytes_in(folder: Path) -> int:
    """Total size of the files in a folder, for the log; 0 when they cannot be read."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except OSError:
        return 0


def size(count: int) -> str:
    """Return a number of bytes as text: "33.6 MB"."""
    for unit, value in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= value:
            return f"{count / value:.1f} {unit}"
    return f"{count} bytes"


def _errno_of(error: BaseException | None) -> int | None:
    """errno of the first OSError in the chain of causes of `error`."""
    while error is not None:
        if isinstance(error, OSError):
            return error.errno
        error = error.__cause__ or error.__context__
    return None


def _errno_of_probe(folder: Path) -> int | None:
    """errno of a small write into `folder`, since torch's writer hides why its own failed; None: it works."""
    try:
        probe(folder, PROBE)
    except OSError as error:
        return error.errno
    return None
