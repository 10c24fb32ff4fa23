"""Compiled kernels on disk: one file for each key, which ranks and later runs read instead of compiling.

The folder is $MEGATRON_DS_CACHE/kernels, else $XDG_CACHE_HOME/megatron_ds/kernels, else
~/.cache/megatron_ds/kernels. No lock: each process writes a file of its own and renames it, so a reader finds
a whole file or none, and two that compile the same kernel write the same file twice. A cache that cannot be
written, or a damaged file, costs the time of compiling. The folder may be deleted at any time.
"""

import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ....errors import KernelError
from ....host.regular_file import read_regular

logger = logging.getLogger(__name__)

FORMAT = b"megatron_ds kernel 2\n"
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class CompiledKernel:
    """Machine code (or PTX) of one instantiation, and the name of the function in it."""

    symbol: str
    code: bytes


def cache_folder(env: Mapping[str, str]) -> Path | None:
    """Return the folder by these environment variables; None where the user has no home."""
    if env.get("MEGATRON_DS_CACHE"):
        return Path(env["MEGATRON_DS_CACHE"]).expanduser() / "kernels"
    base = env.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # relative ones are invalid by that standard
        base = os.path.expanduser("~/.cache")
    return Path(base) / "megatron_ds/kernels" if os.path.isabs(base) else None


def cache_key(*parts: object) -> str:
    """Return a name for a compilation with these inputs: all that its result depends on."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


class KernelCache:
    """Reads and writes compiled kernels. folder: None for no cache. No method raises OSError."""

    def __init__(self, folder: Path | None):
        self.folder = folder

    def read(self, key: str) -> CompiledKernel | None:
        """Return the kernel that was written under this key; None if there is none, or if its file is damaged."""
        if self.folder is None:
            return None
        path = self.folder / key
        try:
            content = read_regular(path, KernelError)
        except (OSError, KernelError):  # absent, not readable by this user, or a pipe
            return None
        kernel = _unpacked(content, key)
        if kernel is None:
            logger.warning(
                "the compiled kernel %s is damaged; it is compiled again", path
            )
        return kernel

    def write(self, key: str, kernel: CompiledKernel) -> None:
        """Keep a kernel for later processes. A failure is logged once in a process."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(self.folder / key, _packed(kernel, key))
        except OSError as error:
            _warn_of(self.folder, error.strerror or str(error))


def _packed(kernel: CompiledKernel, key: str) -> bytes:
    payload = kernel.symbol.encode() + b"\0" + kernel.code
    return FORMAT + _digest_of(payload, key) + payload


def _digest_of(payload: bytes, key: str) -> bytes:
    """Return the checksum of the content under this key: a file that was renamed has another."""
    return hashlib.sha256(key.encode() + b"\0" + payload).digest()


def _unpacked(content: bytes, key: str) -> CompiledKernel | None:
    start = len(FORMAT) + _DIGEST
    digest = content[len(FORMAT) : start]
    payload = content[start:]
    if not content.startswith(FORMAT) or _digest_of(payload, key) != digest:
        return None
    symbol, _, code = payload.partition(b"\0")
    try:
        return CompiledKernel(symbol.decode(), code)
    except UnicodeDecodeError:
        return None


def _replace(path: Path, content: bytes) -> None:
    """The file appears whole or not at all; nothing stays where the disk is full."""
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=".unfinished-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


@functools.cache
def _warn_of(folder: Path, reason: str) -> None:
    logger.warning(
        "the kernel cache %s cannot be written (%s): each process compiles its kernels. Set "
        "MEGATRON_DS_CACHE to a folder that can be written.",
        folder,
        reason,
    )
