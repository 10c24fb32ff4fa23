"""The index of a checkpoint, `.metadata`: which chunks (boxes of logical tensors) there are, and in which file.

torch.distributed.checkpoint pickles it, and a pickle may call anything. So that nothing in a checkpoint is executed, it is
read by an unpickler that knows the index's own dataclasses and nothing else, and is checked against the files before use.
"""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.checkpoint import metadata as dcp

from ..errors import CheckpointError
from .folder import INDEX_FILE


def _member(enumeration: type, name: str):
    """What pickles of Python up to 3.11.3 mean by `getattr`: a member of an enumeration, by its name. Nothing else."""
    if enumeration is not dcp._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it asks for an attribute of {enumeration!r}, which no index needs")
    return enumeration[name]


_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_ALLOWED = {
    (dcp.__name__, "Metadata"): dcp.Metadata,
    (dcp.__name__, "MetadataIndex"): dcp.MetadataIndex,
    (dcp.__name__, "TensorStorageMetadata"): dcp.TensorStorageMetadata,
    (dcp.__name__, "ChunkStorageMetadata"): dcp.ChunkStorageMetadata,
    (dcp.__name__, "TensorProperties"): dcp.TensorProperties,
    (dcp.__name__, "StorageMeta"): dcp.StorageMeta,
    (dcp.__name__, "_MEM_FORMAT_ENCODING"): dcp._MEM_FORMAT_ENCODING,
    (dcp_files.__name__, "_StorageInfo"): dcp_files._StorageInfo,
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,      # a look-up in a table
} | {("torch", name): getattr(torch, name) for name in _DTYPES}


def read_index(path: Path) -> dcp.Metadata:
    """The index of the checkpoint at `path`: every chunk lies inside its tensor, and in a file that is long enough.

    Raises CheckpointError naming the file and what is wrong with it.
    """
    file_name = path / INDEX_FILE
    try:
        with open(file_name, "rb") as file:
            index = _Unpickler(file).load()
    except OSError as error:
        raise CheckpointError(f"{file_name} cannot be read: {error.strerror or error}") from error
    except Exception as error:      # a damaged pickle raises almost anything
        raise CheckpointError(f"{file_name} is damaged: {error}") from error
    try:
        problem = next(_problems(path, index), None)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = f"its index is not one ({type(error).__name__}: {error})"
    if problem:
        raise CheckpointError(f"{path} is not a complete checkpoint: {problem}.")
    return index


def is_complete(path: Path) -> bool:
    try:
        read_index(path)
    except CheckpointError:
        return False
    return True


class _Unpickler(pickle.Unpickler):
    """Refuses every name that no index needs, before anything is imported for it."""

    def find_class(self, module: str, name: str):
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index needs")
        return _ALLOWED[module, name]


def _problems(path: Path, index: dcp.Metadata) -> Iterator[str]:
    sizes = {}
    for name in sorted({place.relative_path for place in index.storage_data.values()}):
        if os.path.basename(name) != name:
            yield f"it stores tensors in {name!r}, outside its directory"
        try:
            sizes[name] = os.path.getsize(path / name)
        except OSError as error:
            yield (f"{name}: {error.strerror}; all ranks must save to one file system that all see, and a copy of a "
                   "checkpoint needs every file")
    for name, tensor in index.state_dict_metadata.items():
        for chunk in tensor.chunks:
            place = index.storage_data[dcp.MetadataIndex(name, chunk.offsets)]
            if not _inside(chunk, tensor.size):
                yield f"{name}, of shape {list(tensor.size)}, has a chunk of {list(chunk.sizes)} at {list(chunk.offsets)}"
            if not 0 <= place.offset <= place.offset + place.length <= sizes[place.relative_path]:
                yield (f"{place.relative_path} has {sizes[place.relative_path]} bytes, and {name} is to be read from bytes "
                       f"{place.offset} to {place.offset + place.length}")


def _inside(chunk: dcp.ChunkStorageMetadata, shape: torch.Size) -> bool:
    return len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
        0 <= at <= at + n <= total for at, n, total in zip(chunk.offsets, chunk.sizes, shape))
