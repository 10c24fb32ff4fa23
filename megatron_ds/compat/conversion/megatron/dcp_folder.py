"""A plain folder of torch.distributed.checkpoint, written by one process, one chunk in memory at a time.

Checkpoints of training have checksums and more (`storage.py`). This is for programs that read such folders.
"""

import io
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ....checkpoint.folder import INDEX_FILE


@dataclass(frozen=True)
class DcpChunk:
    """A rectangle of a tensor. shape: of the tensor; offset, sizes: of the rectangle; read: its values."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def write_dcp_folder(
    path: Path,
    chunks: Iterable[DcpChunk],
    objects: Mapping[str, object],
    most_bytes: int,
) -> None:
    """Write files of about `most_bytes`, then the index. objects: key → value, pickled by torch.save.

    Each chunk is read when it is written. Raises OSError.
    """
    tensors: dict[str, list[DcpChunk]] = {}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    file = _Files(path, most_bytes)
    try:
        # Tensors first, each released before the next is read.
        for chunk in chunks:
            values = chunk.read().detach().to("cpu", chunk.dtype).contiguous()
            assert tuple(values.shape) == chunk.sizes, (
                chunk.key,
                tuple(values.shape),
                chunk.sizes,
            )
            if values.untyped_storage().nbytes() != values.nbytes:
                values = values.clone()  # torch.save writes the whole storage of a view
            mine = tensors.setdefault(chunk.key, [])
            index = dcp.MetadataIndex(chunk.key, torch.Size(chunk.offset), len(mine))
            places[index] = file.add(partial(torch.save, values))
            mine.append(chunk)
        for key, value in objects.items():
            content = io.BytesIO()
            torch.save(value, content)
            places[dcp.MetadataIndex(key)] = file.add(partial(_append, content))
    finally:
        file.close()
    # The index is last: a folder without it is not complete.
    described: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {
        **{key: _described(found) for key, found in tensors.items()},
        **{key: dcp.BytesStorageMetadata() for key in objects},
    }
    with open(path / INDEX_FILE, "wb") as stream:
        pickle.dump(dcp.Metadata(described, None, places, dcp.StorageMeta()), stream)
        stream.flush()
        os.fsync(stream.fileno())


def _append(content: io.BytesIO, stream: io.BufferedWriter) -> None:
    stream.write(content.getvalue())


def _described(chunks: list[DcpChunk]) -> dcp.TensorStorageMetadata:
    boxes = [
        dcp.ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.sizes))
        for chunk in chunks
    ]
    return dcp.TensorStorageMetadata(
        dcp.TensorProperties(dtype=chunks[0].dtype), torch.Size(chunks[0].shape), boxes
    )


class _Files:
    """The files __0_0.distcp, __0_1.distcp, …: the next one begins when one has `most_bytes`."""

    def __init__(self, path: Path, most_bytes: int):
        self._path = path
        self._most = most_bytes
        self._number = 0
        self._stream: io.BufferedWriter | None = None

    def add(self, write: Callable[[io.BufferedWriter], object]) -> _StorageInfo:
        if self._stream is not None and self._stream.tell() >= self._most:
            self.close()
        if self._stream is None:
            self._stream = open(self._path / f"__0_{self._number}.distcp", "wb")
        start = self._stream.tell()
        name = Path(self._stream.name).name
        write(self._stream)
        return _StorageInfo(name, start, self._stream.tell() - start)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._stream = None
            self._number = self._number + 1
