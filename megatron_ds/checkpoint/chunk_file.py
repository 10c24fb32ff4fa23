"""Files of chunks: checksums computed while a file is written, and the verified read of one chunk.

    __3_0.distcp      |  chunk  |  chunk  |  chunk  |      each chunk is an archive (chunk_archive.py)
    running CRC-32    0         a         b         c      of the file up to this byte

For each chunk, the index keeps the CRC-32 of the file before and after the chunk. A chunk is intact if
CRC-32, continued from the value before it, gives the value after it. The value at the end of the file is the
checksum of the whole file, which run.json keeps. One pass over the bytes therefore verifies both the chunk
and the file. Up to 63 zeros before a chunk align its values in memory when it is read.

CRC-32 finds damage and mixed-up files. It does not protect against a forged checkpoint, whose author can
compute checksums too. Therefore an archive may contain only what torch.save writes for a tensor.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import singledispatch
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from ..errors import CheckpointError
from ..host.checksum import crc32
from ..host.direct_file import read_range
from .chunk_archive import Checksummed, ChecksummedFile, read_archive, write_archive

ALIGNMENT = 64  # bytes, of archives; torch aligns the values inside by as much


@singledispatch
def new_file(path: Path) -> Checksummed:
    """Return the file, opened to be written from start to end."""
    return ChecksummedFile(path)


class ChecksummedFiles(FileSystem):
    """DCP's file system, write only. It records the CRC-32 of each file at its end and at each chunk border.

    Writers call `tell()` at the start and end of a chunk; these positions are the borders.
    """

    def __init__(self) -> None:
        super().__init__()
        self._written: dict[str, Checksummed] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike, mode: str
    ) -> Iterator[Checksummed]:
        """Open a file for writing. DCP calls this."""
        assert mode == "wb", (
            f"{path} is opened with mode {mode}: this file system only writes"
        )
        with self.create(Path(path)) as file:
            yield file

    @contextmanager
    def create(self, path: Path) -> Iterator[Checksummed]:
        """Open a file for writing."""
        with new_file(path) as file:
            self._written[path.name] = file
            yield file

    def crc32_around(self, place: _StorageInfo) -> tuple[int, int]:
        """CRC-32 of the file before and after the chunk written at `place`."""
        borders = self._written[place.relative_path].crc32_at
        assert {place.offset, place.offset + place.length} <= borders.keys(), (
            "the writer did not query the position at a chunk border"
        )
        return borders[place.offset], borders[place.offset + place.length]

    def crc32_of(self, name: str) -> int:
        """CRC-32 of a whole written file."""
        return self._written[name].crc32


def write_chunk(
    file: Checksummed, name: str, values: torch.Tensor, dtype: torch.dtype
) -> _StorageInfo:
    """Append the values, cast to `dtype`. Returns their place. name: of the file, in the index."""
    file.write(bytes(-file.tell() % ALIGNMENT))
    start = file.tell()
    write_archive(file, values, dtype)
    return _StorageInfo(name, start, file.tell() - start)


def read_chunk(
    path: Path,
    name: str,
    place: _StorageInfo,
    chunk: ChunkStorageMetadata,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the chunk of tensor `name` at `place` of file `path`, on the CPU.

    Raises CheckpointError naming file, tensor and byte, unless the bytes are the saved ones and the tensor
    has the size and dtype that the index records.
    """
    try:
        content = _read(path, place)
        tensor = read_archive(content, with_checksums=saved_crc32(place) is None)
        _check_tensor(tensor, chunk, dtype)
        return tensor
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}"
        ) from error
    except Exception as error:  # torch.load raises almost anything on a damaged archive
        raise CheckpointError(
            f"{path} is damaged: {name} at byte {place.offset}: {error}"
        ) from error


def _read(path: Path, place: _StorageInfo) -> torch.Tensor:
    content = read_range(path, place.offset, place.length)
    if len(content) != place.length:
        raise ValueError(f"it ends after {len(content)} of {place.length} bytes")
    if (around := saved_crc32(place)) is not None:
        before, after = around
        if (found := crc32(content.numpy(), before)) != after:
            raise ValueError(
                f"its CRC-32 is {found:08x} and was {after:08x} when it was saved. Either bytes "
                "have changed, or the file is that of another save or another rank"
            )
    return content


def saved_crc32(place: _StorageInfo) -> tuple[int, int] | None:
    """CRC-32 of the file before and after the chunk; None in checkpoints of format 1."""
    return vars(place).get("crc32")


def _check_tensor(
    tensor: torch.Tensor, chunk: ChunkStorageMetadata, dtype: torch.dtype
) -> None:
    if (
        not isinstance(tensor, torch.Tensor)
        or tensor.layout != torch.strided
        or tensor.device.type != "cpu"
    ):
        raise ValueError(f"it holds no plain tensor, but a {type(tensor).__name__}")
    if tensor.shape != chunk.sizes or tensor.dtype != dtype:
        raise ValueError(
            f"it holds a tensor of shape {list(tensor.shape)} and {tensor.dtype}, and the index "
            f"records {list(chunk.sizes)} and {dtype}"
        )
