"""Files of chunks: checksums computed while a file is written, and the verified read of one chunk.

    __3_0.distcp      |  chunk  |  chunk  |  chunk  |      each chunk is an archive that torch.save wrote
    running CRC-32    0         a         b         c      of the file up to this byte

For each chunk, the index keeps the CRC-32 of the file before and after the chunk. A chunk is intact if
CRC-32, continued from the value before it, gives the value after it. The value at the end of the file is the
checksum of the whole file, which run.json keeps. One pass over the bytes therefore verifies both the chunk
and the file.

CRC-32 finds damage and mixed-up files. It does not protect against a forged checkpoint, whose author can
compute checksums too. Therefore the archive of a chunk may contain only what torch.save writes for a tensor:
uncompressed records, and a pickle that names only the constructor of a tensor and the storage types.
(`weights_only` alone would accept `bytearray(2**40)`.)
"""

import io
import pickletools
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from ..errors import CheckpointError
from ..host.direct_file import DirectFile, read_range

MOST_BYTES_OF_PICKLE = 2**16        # of the description of one tensor; 500 are usual
STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
NAMES = {"torch._utils _rebuild_tensor_v2", "collections OrderedDict",
         *(f"torch {name}Storage" for name in STORAGES)}


class ChecksummedFiles(FileSystem):
    """DCP's file system, write only. It records the CRC-32 of each file at its end and at each chunk border.

    Writers call `tell()` at the start and end of a chunk; these positions are the borders.
    """

    def __init__(self):
        super().__init__()
        self._written: dict[str, _ChecksummedFile] = {}

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator["_ChecksummedFile"]:
        """Open a file for writing. DCP calls this."""
        assert mode == "wb", f"{path} is opened with mode {mode}: this file system only writes"
        with _ChecksummedFile(DirectFile(path)) as file:
            self._written[Path(path).name] = file
            yield file

    def crc32_around(self, place: _StorageInfo) -> tuple[int, int]:
        """CRC-32 of the file before and after the chunk written at `place`."""
        borders = self._written[place.relative_path].crc32_at
        assert {place.offset, place.offset + place.length} <= borders.keys(), (
            "the writer did not query the position at a chunk border")
        return borders[place.offset], borders[place.offset + place.length]

    def crc32_of(self, name: str) -> int:
        """CRC-32 of a whole written file."""
        return self._written[name].crc32


class _ChecksummedFile(io.BufferedWriter):
    def __init__(self, raw: io.RawIOBase):
        super().__init__(raw)
        self.crc32 = 0
        self.crc32_at: dict[int, int] = {}

    def write(self, data) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return super().write(data)

    def flush(self) -> None:
        """Also of the raw file, which collects bytes and which BufferedWriter does not flush."""
        super().flush()
        self.raw.flush()

    def tell(self) -> int:
        at = super().tell()
        self.crc32_at[at] = self.crc32
        return at


def read_chunk(path: Path, name: str, place: _StorageInfo, chunk: ChunkStorageMetadata,
               dtype: torch.dtype) -> torch.Tensor:
    """The chunk of tensor `name` at `place` of file `path`, on the CPU.

    Raises CheckpointError naming file, tensor and byte, unless the bytes are the saved ones and the tensor
    has the size and dtype that the index records.
    """
    try:
        content = _read(path, place)
        largest = _check_archive(content, with_checksums=saved_crc32(place) is None)
        tensor = torch.load(content, map_location="cpu", weights_only=True)
        _check_tensor(tensor, chunk, dtype, largest)
        return tensor
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:      # torch.load raises almost anything on a damaged archive
        raise CheckpointError(f"{path} is damaged: {name} at byte {place.offset}: {error}") from error


class _Bytes(io.RawIOBase):
    """A file object of a uint8 tensor; io.BytesIO would copy it."""

    def __init__(self, content: torch.Tensor):
        super().__init__()
        self._content, self._at = memoryview(content.numpy()), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, target) -> int:
        found = self._content[self._at:self._at + len(target)]
        target[:len(found)] = found
        self._at += len(found)
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._content)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at


def _read(path: Path, place: _StorageInfo) -> _Bytes:
    content = read_range(path, place.offset, place.length)
    if len(content) != place.length:
        raise ValueError(f"it ends after {len(content)} of {place.length} bytes")
    if (around := saved_crc32(place)) is not None:
        before, after = around
        if (found := zlib.crc32(content.numpy(), before)) != after:
            raise ValueError(f"its CRC-32 is {found:08x} and was {after:08x} when it was saved. Either bytes "
                             "have changed, or the file is that of another save or another rank")
    return _Bytes(content)


def saved_crc32(place: _StorageInfo) -> tuple[int, int] | None:
    """CRC-32 of the file before and after the chunk; None in checkpoints of format 1."""
    return vars(place).get("crc32")


def _check_archive(content: _Bytes, with_checksums: bool) -> int:
    """Size of the largest record. Refuses compressed records, which may inflate a thousandfold."""
    archive = zipfile.ZipFile(content)
    for record in archive.infolist():
        if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
            raise ValueError(f"its record {record.filename} is compressed; this package writes uncompressed "
                             "records only")
        if record.filename.endswith("data.pkl"):
            _check_pickle(archive, record)
    if with_checksums and (damaged := archive.testzip()):       # torch.load does not compare them
        raise ValueError(f"the checksum of {damaged} is not the one that was saved")
    content.seek(0)
    return max((record.file_size for record in archive.infolist()), default=0)


def _check_pickle(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    if record.file_size > MOST_BYTES_OF_PICKLE:
        raise ValueError(f"its {record.filename} has {record.file_size} bytes, more than a tensor needs")
    for opcode, name, _ in pickletools.genops(archive.read(record)):
        if opcode.name == "STACK_GLOBAL" or opcode.name == "GLOBAL" and name not in NAMES:
            raise ValueError(f"its pickle names {name or 'a computed name'}, which no tensor needs")


def _check_tensor(tensor: torch.Tensor, chunk: ChunkStorageMetadata, dtype: torch.dtype,
                  largest: int) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise ValueError(f"it holds no plain tensor, but a {type(tensor).__name__}")
    if tensor.shape != chunk.sizes or tensor.dtype != dtype:
        raise ValueError(f"it holds a tensor of shape {list(tensor.shape)} and {tensor.dtype}, and the index "
                         f"records {list(chunk.sizes)} and {dtype}")
    # torch.load takes the storage size from the archive's pickle and does not compare it with the record.
    if tensor.untyped_storage().nbytes() > largest:
        raise ValueError(f"its tensor takes {tensor.untyped_storage().nbytes()} bytes, and its largest "
                         f"record has {largest}")
