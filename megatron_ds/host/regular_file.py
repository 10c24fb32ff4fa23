"""Files that another program or user may have placed: opened if they are regular, read up to a bound, created
without following a link.

A pipe would block the reader for ever, a device or a file of many gigabytes would fill the memory, and a link
with the name of a new file would let this process overwrite the link's target.
"""

import contextlib
import errno
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO

from ..errors import MegatronDSError

OPENED = ("/dev/fd/", "/proc/self/fd/")  # paths of the files that this process has open
MOST_TEXT = 64 << 20  # bytes of a text that a user names and that is kept in memory


def open_regular(
    path: Path | str, error: type[MegatronDSError], name: str = ""
) -> BinaryIO:
    """Return the file, opened to read bytes. Raises `error` for a pipe, socket, device or directory, and OSError.

    A pipe that the shell has opened for this process, as `<(command)` does, is read: its other end has a writer.
    name: of the file in messages, such as "--hostfile PATH"; the path by default
    """
    is_given = str(path).startswith(OPENED)
    waiting = 0 if is_given else os.O_NONBLOCK
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | waiting)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode) and not (is_given and stat.S_ISFIFO(mode)):
        os.close(handle)
        raise error(
            f"{name or path} is not a regular file. A pipe would be waited for, and a device may have no end. Restore "
            "the file that belongs there, or give another one."
        )
    return open(handle, "rb")


def read_text(
    path: Path | str,
    error: type[MegatronDSError],
    name: str = "",
    *,
    most: int = MOST_TEXT,
    encoding: str = "utf-8",
) -> str:
    """Return the text of a file that a user names, with line feeds at the ends of lines.

    Arguments as of `open_regular` and `read_regular`. Raises `error`, OSError and UnicodeDecodeError.
    """
    content = io.BytesIO(read_regular(path, error, most, name))
    return io.TextIOWrapper(content, encoding).read()


def read_regular(
    path: Path | str,
    error: type[MegatronDSError],
    most: int | None = None,
    name: str = "",
) -> bytes:
    """Return the bytes of a file, as `open_regular` opens it. most: their largest number; more raise `error`."""
    with open_regular(path, error, name) as file:
        if most is None:
            return file.read()
        content = file.read(most + 1)  # the size of a file can change after a stat
        if len(content) > most:
            size = os.fstat(file.fileno()).st_size
            raise error(
                f"{name or path} has {size:,} bytes, and at most {most:,} are read."
            )
        return content


def open_to_append(path: Path | str, error: type[MegatronDSError]) -> BinaryIO:
    """Open the file to append bytes, and create it if it is absent.

    Raises `error` for a link, a file with several names and anything that is not regular, and OSError.
    """
    flags = (
        os.O_WRONLY
        | os.O_APPEND
        | os.O_CREAT
        | os.O_NOFOLLOW
        | os.O_NONBLOCK
        | os.O_CLOEXEC
    )
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as found:
        # A link; a pipe that no process reads.
        if found.errno not in (
            errno.ELOOP,
            errno.ENXIO,
        ):
            raise
        raise error(f"{path} is a link or a pipe. Remove it.") from None
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(handle)
        raise error(f"{path} is not a regular file with one name. Remove it.")
    return open(handle, "ab")


def write_text(path: Path | str, text: str, error: type[MegatronDSError]) -> None:
    """Write a file that a user names. Raises `error` for an existing path that is not a regular file, and OSError.

    A pipe would be waited for until it has a reader.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    refusal = error(f"{path} is not a regular file. Give the name of another one.")
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as found:
        if found.errno != errno.ENXIO:
            raise
        raise refusal from None
    with open(handle, "w", encoding="utf-8") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise refusal
        file.truncate()
        file.write(text)


def create_again(path: Path | str) -> BinaryIO:
    """Create a file to write bytes in place of the one with this name. A link is removed, not followed."""
    Path(path).unlink(missing_ok=True)
    return open(create_new(path), "wb")


def discard(file: BinaryIO, *paths: Path) -> None:
    """Close a file of which nothing is kept, and remove the paths.

    Closing writes what is still in memory. On a full disk that fails once more, and the error does not matter.
    """
    with contextlib.suppress(OSError):
        file.close()
    for path in paths:
        path.unlink(missing_ok=True)


def create_new(path: Path | str) -> int:
    """Create a file for writing, and return its descriptor. Raises FileExistsError for a name that exists, also
    for a link without a target."""
    return os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
    )
