"""Copies of the same files on several hosts: a hash of each block, for the comparison of ranks.

copies                       what a rank reads before training
one file for all ranks       nothing: no rank can read other bytes
copies, up to READ_BYTES     every byte of all files
more than that               that many bytes, in blocks that are spread evenly over the files
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..errors import DataError
from ..host.regular_file import open_regular
from ..mpu.agree import gather_from_all_ranks
from ..mpu.group import Group

BLOCK_BYTES = 1 << 20
# About a second of a modern processor with its own instructions for SHA-256.
READ_BYTES = 2 << 30
THREADS = 4  # hashlib and reads release the interpreter lock

# what a file is → its path on this rank
Files = Mapping[str, Path]


def copies_of(files: Files, world: Group) -> list[str]:
    """For each rank, what identifies its copy of the files. Collective over the world.

    A copy has an inode and a time of change of its own, which no program sets. So ranks that see equal ones read
    the same file, of one host or of a shared file system.
    """
    return gather_from_all_ranks(world, lambda: _states(files))


def are_read_in_full(files: Files) -> bool:
    """Return whether `hashes_of_blocks` reads all bytes of the files."""
    blocks = [-(-_stat(path).st_size // BLOCK_BYTES) for path in files.values()]
    return sum(blocks) <= READ_BYTES // BLOCK_BYTES


def _states(files: Files) -> str:
    """Return a hash of what the file systems record of the files."""
    found = {}
    for what, path in files.items():
        state = _stat(path)
        times = (state.st_mtime_ns, state.st_ctime_ns)
        found[what] = (state.st_ino, state.st_size, *times)
    text = repr(found)
    digest = hashlib.sha256(text.encode())
    return digest.hexdigest()


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


def hashes_of_blocks(files: Files) -> dict[str, tuple[str, str]]:
    """ "WHAT, bytes FIRST to LAST" → (hash, path), for blocks of all files, up to READ_BYTES together."""
    blocks = []
    sizes = [_stat(path).st_size for path in files.values()]
    chosen = spread_blocks(sizes, READ_BYTES // BLOCK_BYTES)
    for (what, path), size, numbers in zip(files.items(), sizes, chosen):
        for number in numbers:
            first = number * BLOCK_BYTES
            last = min(first + BLOCK_BYTES, size) - 1
            blocks.append((f"{what}, bytes {first:,} to {last:,}", path, first))
    # Files that several parts of the data share are read once.
    places = {(path, first) for _, path, first in blocks}
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(_hash, places)
        hashes = dict(zip(places, found))
    facts = {}
    for name, path, first in blocks:
        value = f"hash {hashes[path, first]}"
        facts[name] = (value, str(path))
    return facts


def spread_blocks(sizes: Sequence[int], most: int) -> list[Iterable[int]]:
    """For each file of a size in bytes, the numbers of the blocks to read, about `most` together.

    All blocks if they are not more than that; else each file's share of them, evenly spaced, with its last block.
    """
    counts = [-(-size // BLOCK_BYTES) for size in sizes]
    total = sum(counts)
    if total <= most:
        return [range(count) for count in counts]
    # A share of each, in proportion to its size.
    chosen: list[Iterable[int]] = []
    for count in counts:
        share = -(-count * most // total)
        blocks = [place * count // share - 1 for place in range(1, share + 1)]
        chosen.append(blocks)
    return chosen


def _hash(place: tuple[Path, int]) -> str:
    path, first = place
    try:
        with open_regular(path, DataError) as file:
            file.seek(first)
            block = file.read(BLOCK_BYTES)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read at byte {first:,}: {error.strerror}."
        ) from None
    return hashlib.sha256(block).hexdigest()[:16]
