"""Files of `torch.save`, opened without reading their tensors and without executing anything in them.

Both formats are read: archives (since torch 1.6), of which an interval of a larger file may be one, and
the sequence of pickles before that:

    archive     zip: NAME/data.pkl, NAME/data/0, NAME/data/1, …       uncompressed records
    before      magic number, version, system, content, list of keys: five pickles; then for each key the
                number of elements (int64) and the elements

Tensors in the content are `StoredTensor`, whose `read` maps the bytes. All sizes are compared with the file
first.
"""

import mmap
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....checkpoint.pickle_guards import reason_of
from ....errors import CheckpointError
from ....host.regular_file import open_regular
from .foreign_pickle import OPCODES, Storage, unpickled

MAGIC = 0x1950A86A20F9469CFC6C
MOST_BYTES_OF_PICKLE = 2**30
_LOCAL_HEADER = 30  # bytes of the fixed part of a record's header in a zip file


@dataclass(frozen=True)
class ForeignFile:
    """The content of a file. ignored: names of the classes whose objects became stand-ins."""

    content: Any
    ignored: tuple[str, ...]


def read_torch_file(
    path: str | os.PathLike, start: int = 0, length: int | None = None
) -> ForeignFile:
    """Return the content of the file, or of the archive in bytes [start, start + length).

    Raises CheckpointError naming the file when it is missing, damaged, or names code.
    """
    path = Path(path)
    try:
        # The interval must be inside the file.
        with open_regular(path, CheckpointError) as file:
            total = os.fstat(file.fileno()).st_size
            length = total - start if length is None else length
            if start < 0 or length <= 0 or start + length > total:
                raise ValueError(
                    f"it has {total} bytes, and bytes {start} to {start + length} are wanted"
                )
            # A zip archive begins with PK; the format before torch 1.6 is a sequence of pickles.
            file.seek(start)
            if file.read(2) == b"PK":
                return _archive(path, _Window(file, start, length))
            if length != total:
                raise ValueError(f"at byte {start} there is no archive of torch.save")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _sequence(path, content)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}."
        ) from error
    except Exception as error:  # a damaged pickle or zip raises almost anything
        raise CheckpointError(
            f"{path} is refused or damaged: {reason_of(error)}."
        ) from error


# ---- Archives.


class _Window:
    """An interval of an open file as a file, read only."""

    def __init__(self, file: Any, start: int, length: int):
        self._file = file
        self.start = start
        self._length = length
        self._at = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        bases = {
            os.SEEK_SET: 0,
            os.SEEK_CUR: self._at,
            os.SEEK_END: self._length,
        }
        base = bases[whence]
        if base + offset < 0:
            raise ValueError(
                f"it is asked for the position {base + offset}, before its first byte"
            )
        self._at = base + offset
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        if count is not None and count >= 0:
            left = min(count, left)
        self._file.seek(self.start + self._at)
        found = self._file.read(left)
        self._at += len(found)
        return found


def _archive(path: Path, window: _Window) -> ForeignFile:
    with zipfile.ZipFile(window) as archive:
        # torch.save stores records without compression, which makes them mappable.
        records = {}
        for record in archive.infolist():
            if (
                record.compress_type != zipfile.ZIP_STORED
                or record.file_size != record.compress_size
            ):
                raise ValueError(
                    f"its record {record.filename} is compressed, which torch.save never does"
                )
            records[record.filename.partition("/")[2]] = record
        # Its pickle must be there, in this machine's byte order, and of a size that fits in memory.
        if "data.pkl" not in records:
            raise ValueError("its archive has no data.pkl: torch.save did not write it")
        if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
            raise ValueError(
                "its numbers are big-endian. Save it on a little-endian machine"
            )
        pickled = records["data.pkl"]
        if pickled.file_size > MOST_BYTES_OF_PICKLE:
            raise ValueError(f"its data.pkl has {pickled.file_size} bytes")

        # Storages are mapped when they are read; only their place is checked here.
        def storage_of(dtype: torch.dtype, key: str, numel: int) -> Storage:
            record = records.get(f"data/{key}")
            nbytes = numel * dtype.itemsize
            if record is None or record.file_size < nbytes:
                found = "missing"
                if record is not None:
                    found = f"{record.file_size} bytes long"
                raise ValueError(
                    f"its record data/{key} is {found}, and a tensor needs {nbytes} bytes"
                )
            at = _data_start(window, record)
            if at + nbytes > window.start + window._length:
                raise ValueError(f"its record data/{key} ends beyond the file")
            return Storage(
                dtype, numel, _mapping(path, at, nbytes), f"{path}, data/{key}"
            )

        content, ignored = unpickled(archive.read(pickled), storage_of)
        return ForeignFile(content, ignored)


def _data_start(window: _Window, record: zipfile.ZipInfo) -> int:
    """Return the position in the whole file of the first byte of a record."""
    window.seek(record.header_offset)
    header = window.read(_LOCAL_HEADER)
    if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise ValueError(f"its record {record.filename} has no header")
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return window.start + record.header_offset + _LOCAL_HEADER + name + extra


# ---- The format before torch 1.6.


def _sequence(path: Path, content: mmap.mmap) -> ForeignFile:
    at = 0
    parts = []
    named: dict[str, tuple[torch.dtype, int]] = {}

    def storage_of(dtype: torch.dtype, key: str, numel: int) -> Storage:
        if named.setdefault(key, (dtype, numel)) != (dtype, numel):
            raise ValueError(f"its storage {key} is described twice, differently")
        read = lambda: _mapping(path, starts[key], numel * dtype.itemsize)()
        return Storage(dtype, numel, read, f"{path}, storage {key}")

    # Five pickles precede the storages: magic number, version, system, content and keys.
    for _ in range(5):
        stop = OPCODES.end_of(content, at)
        parts.append(unpickled(content[at:stop], storage_of))
        at = stop
        if parts[0][0] != MAGIC:
            raise ValueError(
                "it is neither an archive nor a sequence of pickles that torch.save wrote"
            )
    # Storages follow in the order of the keys, each after its number of elements.
    starts: dict[str, int] = {}
    keys, _ = parts[4]
    is_list = isinstance(keys, list)
    if not is_list or not all(isinstance(key, str | int) for key in keys):
        raise ValueError("its keys of storages are no list of texts")
    for key in keys:
        dtype, numel = named[str(key)]
        start = at + 8
        stop = start + numel * dtype.itemsize
        found = int.from_bytes(content[at:start], "little")
        if found != numel or stop > len(content):
            raise ValueError(
                f"its storage {key} at byte {at} does not have {numel} elements"
            )
        starts[str(key)] = start
        at = stop
    if missing := named.keys() - starts.keys():
        raise ValueError(f"its storages {sorted(missing)[:3]} are missing")
    return ForeignFile(*parts[3])


def _mapping(path: Path, start: int, nbytes: int) -> Callable[[], torch.Tensor]:
    """Return a function that maps bytes of the file as a private uint8 tensor."""

    def read() -> torch.Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        try:
            mapped = torch.from_numpy(np.memmap(path, np.uint8, "c", start, (nbytes,)))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be read from byte {start} on: {error}."
            ) from error
        return mapped if mapped.data_ptr() % 16 == 0 else mapped.clone()

    return read
