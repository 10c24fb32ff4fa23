"""The archive of a chunk: what torch.save writes for one tensor, written and read without copies of it.

    local headers, data.pkl, …   |   bytes of the tensor   |   descriptor, central directory
    torch.save without values        cast into the file        with the CRC-32 of the bytes

torch.save needs the tensor contiguous and computes a checksum of its own; torch.load copies the tensor.

An archive may contain only what torch.save writes for a tensor: uncompressed records, and a pickle that names
only the constructor of a tensor and the storage types. (`weights_only` alone would accept
`bytearray(2**40)`.)
"""

import io
import math
import pickletools
import struct
import sys
import zipfile
from collections.abc import Sequence
from typing import IO, Any, cast

import torch
from torch.serialization import skip_data

from ..host.checksum import crc32, crc32_of_rest
from ..host.direct_file import BlockFile, DirectFile

LEAST = 2**20  # bytes: a smaller tensor is saved and loaded by torch, with copies
MOST_BYTES_OF_PICKLE = 2**16  # of the description of one tensor; 500 are usual
STORAGES = (
    "Double",
    "Float",
    "Half",
    "BFloat16",
    "Long",
    "Int",
    "Short",
    "Char",
    "Byte",
    "Bool",
)
NAMES = {
    "torch._utils _rebuild_tensor_v2",
    "collections OrderedDict",
    *(f"torch {name}Storage" for name in STORAGES),
}
# records
VALUES = "archive/data/0"
BYTE_ORDER = "archive/byteorder"
# The signature, and the lengths of the name and of the extra field.
LOCAL_HEADER = struct.Struct("<4s22xHH")
CENTRAL_HEADER = 46  # bytes before the name
# offsets of the CRC-32 in the descriptor and in the central header
CRC_OF_DESCRIPTOR = 4
CRC_OF_CENTRAL = 16


class Checksummed(BlockFile):
    """A file with its running CRC-32, and that at each position that `tell` has returned."""

    def __init__(self, *place: Any):
        super().__init__(*place)
        self.crc32 = 0
        self.crc32_at: dict[int, int] = {}

    def appended(self, content: memoryview) -> None:
        """Continue the checksum."""
        self.crc32 = crc32(content, self.crc32)

    def tell(self) -> int:
        """Number of bytes written; records the checksum of them."""
        at = super().tell()
        self.crc32_at[at] = self.crc32
        return at


class ChecksummedFile(Checksummed, DirectFile):
    """A checksummed file of a file system."""


# ------------------------------------------------------------------ writing
def write_archive(file: Checksummed, values: torch.Tensor, dtype: torch.dtype) -> None:
    """Append the archive of the values, cast to `dtype`. They may be a view of a larger tensor."""
    nbytes = values.numel() * dtype.itemsize
    if nbytes < LEAST:
        content = io.BytesIO()
        # A copy, since torch.save writes the whole storage of a view.
        torch.save(values.to(dtype, copy=True).contiguous(), content)
        file.write(content.getbuffer())
        return
    before, after = _around(values.shape, dtype)
    file.write(before)
    start = file.crc32
    file.write_tensor(values, dtype)
    crc = crc32_of_rest(start, file.crc32, nbytes).to_bytes(4, "little")
    central = after.rindex(VALUES.encode()) - CENTRAL_HEADER
    for at in (CRC_OF_DESCRIPTOR, central + CRC_OF_CENTRAL):
        after[at : at + 4] = crc
    file.write(after)


def _around(shape: Sequence[int], dtype: torch.dtype) -> tuple[bytes, bytearray]:
    """Return the bytes of the archive before and after those of the tensor, whose CRC-32 is 0 there."""
    parts = _Parts()
    with skip_data():
        # Its memory is not touched.
        torch.save(torch.empty(tuple(shape), dtype=dtype), cast(IO[bytes], parts))
    before, after = parts.content
    assert parts.skipped == [math.prod(shape) * dtype.itemsize], (
        f"torch.save skipped {parts.skipped} bytes"
    )
    return bytes(before), after


class _Parts(io.RawIOBase):
    """Collects what is written before and after a seek."""

    def __init__(self) -> None:
        super().__init__()
        self.content = [bytearray()]
        self.skipped: list[int] = []

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        self.content[-1] += data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_CUR, f"torch.save seeks from {whence}"
        self.skipped.append(offset)
        self.content.append(bytearray())
        return offset


# ------------------------------------------------------------------ reading
def read_archive(content: torch.Tensor, with_checksums: bool) -> Any:
    """Return what the archive holds, a tensor if it is that of a chunk. A large tensor is a view of `content`.

    content: uint8. with_checksums: compare the checksums of the records, if `content` was not checked before

    Raises ValueError for records or names that no tensor needs, and what torch.load raises.
    """
    stream = _Bytes(content)
    archive = zipfile.ZipFile(stream)
    records = archive.infolist()
    for record in records:
        if (
            record.compress_type != zipfile.ZIP_STORED
            or record.file_size != record.compress_size
        ):
            raise ValueError(
                f"its record {record.filename} is compressed; this package writes uncompressed "
                "records only"
            )
        if record.filename.endswith("data.pkl"):
            _check_pickle(archive, record)
    # torch.load does not compare them.
    if with_checksums and (damaged := archive.testzip()):
        raise ValueError(f"the checksum of {damaged} is not the one that was saved")
    largest = max((record.file_size for record in records), default=0)
    if largest >= LEAST and (found := _view(content, stream, archive)) is not None:
        return found
    found = _load(stream)
    # torch.load takes the storage size from the archive's pickle and does not compare it with the record.
    if (
        isinstance(found, torch.Tensor)
        and (size := found.untyped_storage().nbytes()) > largest
    ):
        raise ValueError(
            f"its tensor takes {size} bytes, and its largest record has {largest}"
        )
    return found


def _load(stream: "_Bytes") -> Any:
    stream.seek(0)
    file = cast(IO[bytes], stream)
    return torch.load(file, map_location="cpu", weights_only=True)


def _view(
    content: torch.Tensor, stream: "_Bytes", archive: zipfile.ZipFile
) -> torch.Tensor | None:
    """Return the tensor in the bytes of the archive; None if only torch.load can read it."""
    # Only an archive of one contiguous tensor, in the byte order of this machine, can be mapped.
    records = {record.filename: record for record in archive.infolist()}
    if (
        len(records) < len(archive.infolist())
        or not {VALUES, BYTE_ORDER} <= records.keys()
        or (archive.read(BYTE_ORDER).decode() != sys.byteorder)
    ):
        return None
    record = records[VALUES]
    # Shape and dtype come from the pickle, without the values.
    with skip_data():
        blank = _load(stream)  # shape and dtype; its memory is not touched
    whole = (
        isinstance(blank, torch.Tensor)
        and blank.is_contiguous()
        and not blank.storage_offset()
    )
    if (
        not whole
        or not blank.nbytes == blank.untyped_storage().nbytes() == record.file_size
    ):
        return None
    # The values begin after the local header, whose names and extra fields vary in length.
    at = record.header_offset
    _, *lengths = LOCAL_HEADER.unpack(
        content[at : at + LOCAL_HEADER.size].numpy().tobytes()
    )
    start = at + LOCAL_HEADER.size + sum(lengths)
    flat = content[start : start + record.file_size]
    if len(flat) < record.file_size:
        raise ValueError(
            f"its record {VALUES} ends after {len(flat)} of {record.file_size} bytes"
        )
    # Earlier versions did not align the values in a file.
    if flat.storage_offset() % blank.dtype.itemsize:
        flat = flat.clone()
    return flat.view(blank.dtype).view(blank.shape)


def _check_pickle(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    if record.file_size > MOST_BYTES_OF_PICKLE:
        raise ValueError(
            f"its {record.filename} has {record.file_size} bytes, more than a tensor needs"
        )
    for opcode, name, _ in pickletools.genops(archive.read(record)):
        if (
            opcode.name == "STACK_GLOBAL"
            or opcode.name == "GLOBAL"
            and name not in NAMES
        ):
            raise ValueError(
                f"its pickle names {name or 'a computed name'}, which no tensor needs"
            )


class _Bytes(io.RawIOBase):
    """A file object of a uint8 tensor; io.BytesIO would copy it."""

    def __init__(self, content: torch.Tensor):
        super().__init__()
        self._content = content.numpy().data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, target) -> int:
        found = self._content[self._at : self._at + len(target)]
        target[: len(found)] = found
        self._at += len(found)
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {
            io.SEEK_SET: 0,
            io.SEEK_CUR: self._at,
            io.SEEK_END: len(self._content),
        }[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at
