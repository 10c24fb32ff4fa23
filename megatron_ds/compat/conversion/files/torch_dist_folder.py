"""The tensors and objects of a `torch_dist` folder, read without megatron-core.

    .metadata       a pickle of torch.distributed.checkpoint: key → shape and chunks, and where each chunk is
    __0_0.distcp …  chunks, each an archive of torch.save
    common.pt       what is not sharded; newer versions store it as the object common_state

Chunks of a tensor must cover it exactly once, and lie inside the files.
"""

import gc
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from ....checkpoint.folder import INDEX_FILE, read_regular
from ....checkpoint.pickle_guards import MOST_DIMENSIONS, reason_of
from ....errors import CheckpointError
from .foreign_pickle import ForeignObject, fields_of, unpickled
from .stored_tensor import StoredTensor
from .tensor_views import StoredBox, assembled, changed
from .torch_file import read_torch_file

COMMON_FILE = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
METADATA_FILE = "metadata.json"
_Place = tuple[str, int, int]  # file, first byte, number of bytes


@dataclass(frozen=True)
class Sharded:
    """A tensor of the index. boxes: its chunks."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[StoredBox, ...]

    def whole(self) -> StoredTensor:
        """Return the tensor. Raises CheckpointError unless its chunks cover it once."""
        return assembled(self.shape, self.dtype, self.boxes, self.key)

    def rows(self) -> list[StoredTensor]:
        """Return the tensors along the first dimension, of which only the chunks that they need are read."""
        self.whole()
        found: list[list[StoredBox]] = [[] for _ in range(self.shape[0])]
        for box in self.boxes:
            for row in range(box.offset[0], box.offset[0] + box.tensor.shape[0]):
                part = changed(
                    box.tensor,
                    box.tensor.shape[1:],
                    itemgetter(row - box.offset[0]),
                )
                found[row].append(StoredBox(box.offset[1:], part))
        return [
            assembled(self.shape[1:], self.dtype, boxes, f"{self.key}[{row}]")
            for row, boxes in enumerate(found)
        ]


@dataclass(frozen=True)
class TorchDistFolder:
    """tensors: key → tensor; objects: key → place; common: what is not sharded."""

    path: Path
    tensors: Mapping[str, Sharded]
    objects: Mapping[str, _Place]
    common: Mapping[str, Any]
    ignored: tuple[str, ...]

    def object(self, key: str) -> Any:
        """Return the content of a stored object. Raises CheckpointError."""
        name, start, length = self.objects[key]
        content = read_torch_file(self.path / name, start, length).content
        return (
            content[0] if isinstance(content, list) and len(content) == 1 else content
        )


def is_torch_dist(path: Path) -> bool:
    """Return whether the folder of one iteration has the files of this format."""
    return (path / INDEX_FILE).is_file() and (path / METADATA_FILE).is_file()


def read_torch_dist(path: Path) -> TorchDistFolder:
    """Return the verified index of the folder. Raises CheckpointError naming the file and the problem."""
    # The index gives the file and the bytes of each tensor and object.
    _check_backend(path)
    index = _index_of(path)
    try:
        places = {
            _key(key): _place(path, value)
            for key, value in index["storage_data"].items()
        }
        _check_files(path, places.values())
        tensors = {}
        objects = {}
        for key, about in index["state_dict_metadata"].items():
            if _is(about, "TensorStorageMetadata"):
                tensors[key] = _sharded(path, key, fields_of(about), places)
            else:
                objects[key] = places[key, None]
    except CheckpointError:
        raise
    except Exception as error:  # its parts may have any type
        raise CheckpointError(
            f"{path / INDEX_FILE} is malformed ({type(error).__name__}: {error})."
        ) from error
    # The common values are in a file of their own or, in newer versions, in an object.
    folder = TorchDistFolder(path, tensors, objects, {}, ())
    if (path / COMMON_FILE).exists():
        found = read_torch_file(path / COMMON_FILE)
        common = found.content
        ignored = found.ignored
    elif COMMON_OBJECT in objects:
        common = folder.object(COMMON_OBJECT)
        ignored = ()
    else:
        raise CheckpointError(
            f"{path} has neither {COMMON_FILE} nor an object {COMMON_OBJECT}, which hold "
            "the arguments of the model: it is incomplete."
        )
    if not isinstance(common, Mapping):
        raise CheckpointError(f"{path}: {COMMON_FILE} holds no table of values.")
    return TorchDistFolder(path, tensors, objects, common, ignored)


def _check_backend(path: Path) -> None:
    try:
        about = json.loads(read_regular(path / METADATA_FILE))
        backend = about["sharded_backend"], about["sharded_backend_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path / METADATA_FILE} cannot be read: {error}. The checkpoint is "
            "incomplete."
        ) from error
    if backend != ("torch_dist", 1):
        raise CheckpointError(
            f"{path} is of the format {backend[0]} version {backend[1]}; this version "
            "reads torch_dist version 1. Convert it with Megatron-LM."
        )


def _index_of(path: Path) -> Mapping[str, Any]:
    enabled = gc.isenabled()
    gc.disable()  # with it, large indices take five times as long
    # Errors of the pickle are reported with the name of the file.
    try:
        content, _ = unpickled(read_regular(path / INDEX_FILE))
    except OSError as error:
        raise CheckpointError(
            f"{path / INDEX_FILE} cannot be read: {error.strerror or error}."
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises almost anything
        raise CheckpointError(
            f"{path / INDEX_FILE} is refused or damaged: {reason_of(error)}."
        ) from error
    finally:
        if enabled:
            gc.enable()
    # The index must have both tables before their entries are used.
    index = fields_of(content)
    if not all(
        isinstance(index.get(name), Mapping)
        for name in ("state_dict_metadata", "storage_data")
    ):
        raise CheckpointError(
            f"{path / INDEX_FILE} is not an index of torch.distributed.checkpoint."
        )
    return index


def _is(value: Any, name: str) -> bool:
    return isinstance(value, ForeignObject) and value.foreign_name.endswith(f".{name}")


def _key(index: Any) -> tuple[str, tuple[int, ...] | None]:
    found = fields_of(index)
    offset = found.get("offset")
    if not isinstance(found["fqn"], str):
        raise TypeError(f"a tensor is named by a {type(found['fqn']).__name__}")
    return found["fqn"], None if offset is None else _numbers(offset)


def _numbers(value: Any) -> tuple[int, ...]:
    """Return a shape or a position. Raises TypeError."""
    if not (
        isinstance(value, tuple | list)
        and len(value) <= MOST_DIMENSIONS
        and all(type(n) is int and n >= 0 for n in value)
    ):
        raise TypeError(
            f"a shape or position is no tuple of at most {MOST_DIMENSIONS} numbers from 0 on"
        )
    return tuple(value)


def _place(path: Path, info: Any) -> _Place:
    found = fields_of(info)
    name = found["relative_path"]
    start = found["offset"]
    length = found["length"]
    if (
        not isinstance(name, str)
        or os.path.basename(name) != name
        or name in ("", os.curdir, os.pardir)
        or found.get("transform_descriptors")
    ):
        raise CheckpointError(
            f"{path / INDEX_FILE} stores tensors in {name!r}, which is not a plain file in "
            "its folder."
        )
    if type(start) is not int or type(length) is not int or start < 0 or length < 0:
        raise CheckpointError(
            f"{path / INDEX_FILE} has the invalid place {start}, {length}."
        )
    return name, start, length


def _sharded(
    path: Path, key: str, about: Mapping[str, Any], places: Mapping
) -> Sharded:
    shape = _numbers(about["size"])
    dtype = _dtype_of(about["properties"])
    boxes = []
    for chunk in about["chunks"]:
        offset, sizes = (
            _numbers(fields_of(chunk)[name]) for name in ("offsets", "sizes")
        )
        name, start, length = places[key, offset]
        if math.prod(sizes) * dtype.itemsize > length:
            raise CheckpointError(
                f"{path}: {key} has a chunk of {list(sizes)}, for which {name} has "
                f"{length} bytes."
            )
        boxes.append(
            StoredBox(offset, _chunk(path, key, (name, start, length), sizes, dtype))
        )
    return Sharded(key, shape, dtype, tuple(boxes))


def _dtype_of(properties: Any) -> torch.dtype:
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else fields_of(properties)["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"a tensor of dtype {dtype!r}")
    return dtype


def _check_files(path: Path, places: Iterable[_Place]) -> None:
    """Raises CheckpointError for a file that is missing or ends before its last part, and for parts that
    share bytes: a small file could otherwise describe tensors of any size.
    """
    ends: dict[str, int] = {}
    for name, start, length in sorted(places):
        if start < ends.get(name, 0):
            raise CheckpointError(
                f"{path / INDEX_FILE}: two parts share byte {start} of {name}."
            )
        ends[name] = start + length
    for name, end in sorted(ends.items()):
        try:
            size = os.stat(path / name).st_size
        except OSError as error:
            raise CheckpointError(
                f"{path / name} cannot be read: {error.strerror or error}. All ranks' "
                "files belong into one folder."
            ) from error
        if end > size:
            raise CheckpointError(
                f"{path / name} has {size} bytes, and its index needs {end}: it is "
                "truncated."
            )


def _chunk(
    path: Path, key: str, place: _Place, sizes: tuple[int, ...], dtype: torch.dtype
) -> StoredTensor:
    name, start, length = place

    def read() -> torch.Tensor:
        found = read_torch_file(path / name, start, length).content
        if not isinstance(found, StoredTensor) or (found.shape, found.dtype) != (
            sizes,
            dtype,
        ):
            what = (
                f"{found.dtype} {list(found.shape)}"
                if isinstance(found, StoredTensor)
                else type(found)
            )
            raise CheckpointError(
                f"{path / name}: byte {start} holds {what}, and the index records {dtype} "
                f"{list(sizes)} of {key}. The file is of another save or another rank."
            )
        return found.read()

    return StoredTensor(sizes, dtype, read, f"{path / name}, {key}")
