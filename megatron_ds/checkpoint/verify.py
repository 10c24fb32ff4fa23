"""Compare all bytes of a checkpoint with the checksums in its run.json, for instance after it was copied.

Loading compares the chunks that it reads; this reads everything, each file once, 16 MiB at a time.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError
from .run_file import read_run_file

BLOCK = 2**24       # bytes read at once


def problems_of(path: Path) -> Iterator[str]:
    """A sentence for each file of the checkpoint at `path` that is not the one that was saved.

    Raises CheckpointError when run.json itself is damaged, or is of format 1, which has no checksums.
    """
    run = read_run_file(path)
    if "files" not in run:
        raise CheckpointError(f"{path} was saved in format {run['format_version']}, without checksums of its files: it cannot "
                              "be verified. A checkpoint that this version saves can.")
    for name, entry in run["files"].items():
        try:
            size, crc32 = size_and_crc32(path / name)
        except OSError as error:
            yield f"{path / name} cannot be read: {error.strerror or error}"
            continue
        if size != entry["bytes"]:
            yield f"{path / name} has {size} bytes, and {entry['bytes']} were saved"
        elif crc32 != entry["crc32"]:
            yield f"{path / name} has the CRC-32 {crc32}, and {entry['crc32']} was saved"


def size_and_crc32(file: Path) -> tuple[int, str]:
    """The size in bytes and the CRC-32, as eight hex digits."""
    size = crc32 = 0
    with open(file, "rb") as stream:
        while block := stream.read(BLOCK):
            size, crc32 = size + len(block), zlib.crc32(block, crc32)
    return size, f"{crc32:08x}"
