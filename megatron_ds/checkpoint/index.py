"""The index of a checkpoint, `.metadata`: the chunks (boxes of logical tensors) and the file of each.

The index is compared with its checksum in run.json, then unpickled by a guarded unpickler
(`index_pickle.py`), then checked against itself (chunks cover each element of a tensor once) and against the
files (sizes and checksums).
"""

import gc
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch.distributed.checkpoint import metadata as dcp

from ..errors import CheckpointError
from .chunk_file import saved_crc32
from .cover import covers_once
from .folder import INDEX_FILE, read_regular
from .index_pickle import unpickled
from .pickle_guards import reason_of
from .run_file import check_crc32, read_run_file

COMPILED = "_orig_mod"  # part of the names in a module that torch.compile has wrapped
MOST_DIMENSIONS = 8  # 2**8 corners of a box


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector: with it, 640,000 chunks take 19 s instead of 4 s."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def without_compiled_names(index: dcp.Metadata) -> dcp.Metadata:
    """Return the index with the names of modules that torch.compile has not wrapped.

    Engines once saved the names of the wrapped module, weight/_orig_mod.head.bias. If one of the new names is
    taken, all names stay.
    """
    new = {
        name: ".".join(part for part in name.split(".") if part != COMPILED).replace(
            f"/{COMPILED}.", "/"
        )
        for name in index.state_dict_metadata
        if COMPILED in name
    }
    taken = [
        *new.values(),
        *(name for name in index.state_dict_metadata if name not in new),
    ]
    if not new or len(set(taken)) < len(taken):
        return index
    places = {
        replace(at, fqn=new.get(at.fqn, at.fqn)): place
        for at, place in index.storage_data.items()
    }
    tensors = {
        new.get(name, name): tensor
        for name, tensor in index.state_dict_metadata.items()
    }
    return replace(index, state_dict_metadata=tensors, storage_data=places)


def save_id_in(index: dcp.Metadata) -> str | None:
    """Return the identifier of the save that the index records; None in format 1."""
    assert index.storage_meta is not None, "it records nothing about the save"
    return index.storage_meta.save_id


def tensors_in(index: dcp.Metadata) -> dict[str, dcp.TensorStorageMetadata]:
    """Return the entries by name: checkpoints of this package hold tensors alone."""
    return cast(dict[str, dcp.TensorStorageMetadata], index.state_dict_metadata)


def read_index(path: Path) -> dcp.Metadata:
    """Return the verified index of the checkpoint at `path`. Also validates run.json.

    Raises CheckpointError naming the file and the problem.
    """
    run = read_run_file(path)
    return index_of(path, run.get("save_id"), run.get("files"))


@_without_garbage_collection()
def index_of(
    path: Path, save_id: str | None, files: Mapping[str, Mapping] | None
) -> dcp.Metadata:
    """Return the index of the checkpoint at `path`, which must belong to the save `save_id` and list these files.

    files    {name: {"bytes": size, "crc32": checksum}}; None for a checkpoint of format 1 (no save_id)
    """
    file_name = path / INDEX_FILE
    try:
        content = read_regular(file_name)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} has no {INDEX_FILE}: it is incomplete."
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{file_name} cannot be read: {error.strerror or error}."
        ) from error
    # Only bytes with the saved checksum are unpickled.
    try:
        if files is not None:
            check_crc32(content, files[INDEX_FILE])
        index = unpickled(content)
    except Exception as error:  # a damaged pickle raises almost anything
        raise CheckpointError(f"{file_name} is damaged: {reason_of(error)}") from error
    # An index that can be read may still contradict the files.
    try:
        problem = next(_problems(path, index, save_id, files), None)
    except Exception as error:  # its parts may have any type
        problem = f"its index is malformed ({type(error).__name__}: {reason_of(error)})"
    if problem:
        raise CheckpointError(f"{path} is not a complete checkpoint: {problem}.")
    return index


def _problems(
    path: Path,
    index: dcp.Metadata,
    save_id: str | None,
    files: Mapping[str, Mapping] | None,
) -> Iterator[str]:
    found = save_id_in(index)
    if found != save_id:
        yield (
            f"{INDEX_FILE} is of the save {found}, and run.json of the save "
            f"{save_id}: one of them comes from another checkpoint"
        )
    sizes: dict[str, int] = {}
    for name in sorted({place.relative_path for place in index.storage_data.values()}):
        yield from _file_problems(path, name, files)
        sizes[name] = (path / name).stat().st_size
    if files is not None and files.keys() != sizes.keys() | {INDEX_FILE}:
        yield f"the index stores tensors in {sorted(sizes)}, and run.json lists {sorted(files)}"
    for name, tensor in tensors_in(index).items():
        yield from _tensor_problems(
            name, tensor, index.storage_data, sizes, files is not None
        )
    yield from _overlaps(index.storage_data)


def _file_problems(
    path: Path, name: str, files: Mapping[str, Mapping] | None
) -> Iterator[str]:
    if os.path.basename(name) != name or name in ("", os.curdir, os.pardir):
        yield f"the index stores tensors in {name!r}, which is not a file name in its directory"
    try:
        found = (path / name).stat()
    except FileNotFoundError:
        yield (
            f"{name} is missing; all ranks must save to one shared file system, and a copy of a "
            "checkpoint needs every file"
        )
        return
    except OSError as error:
        yield f"{name} cannot be read: {error.strerror or error}"
        return
    if not stat.S_ISREG(found.st_mode):
        yield f"{name} is not a regular file"
    if files is not None and name in files and found.st_size != files[name]["bytes"]:
        yield f"{name} has {found.st_size} bytes, and {files[name]['bytes']} were saved"


def _tensor_problems(
    name: str,
    tensor: dcp.TensorStorageMetadata,
    storage: Mapping,
    sizes: Mapping[str, int],
    with_checksums: bool,
) -> Iterator[str]:
    shape = tensor.size
    itemsize = tensor.properties.dtype.itemsize
    if (
        not isinstance(name, str)
        or type(shape) is not torch.Size
        or len(shape) > MOST_DIMENSIONS
    ):
        yield f"{name!r} has the invalid shape {shape}"
    # The sizes of a chunk decide how much memory it takes, so they are compared with its bytes.
    for chunk in tensor.chunks:
        place = storage[dcp.MetadataIndex(name, chunk.offsets)]
        if not _inside(chunk, shape):
            yield (
                f"{name}, of shape {list(shape)}, has a chunk of {list(chunk.sizes)} at "
                f"{list(chunk.offsets)}"
            )
        if (
            not 0
            <= place.offset
            <= place.offset + place.length
            <= sizes[place.relative_path]
        ):
            yield (
                f"{place.relative_path} has {sizes[place.relative_path]} bytes, and {name} is to be read "
                f"from bytes {place.offset} to {place.offset + place.length}"
            )
        if math.prod(chunk.sizes) * itemsize > place.length:
            yield (
                f"{name} has a chunk of {list(chunk.sizes)}, {math.prod(chunk.sizes) * itemsize} bytes, "
                f"for which {place.relative_path} has {place.length}"
            )
        if with_checksums != (saved_crc32(place) is not None):
            yield (
                f"a chunk of {name} has {'no' if with_checksums else 'a'} checksum, unlike the rest of "
                "the checkpoint"
            )
    if not covers_once(shape, tensor.chunks):
        held = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        yield (
            f"the {len(tensor.chunks)} chunks of {name} overlap or leave holes: they have {held} "
            f"elements, and its shape {list(shape)} has {math.prod(shape)}"
        )


def _overlaps(storage: Mapping) -> Iterator[str]:
    """Find chunks that share bytes: with them a small file could describe tensors of any size."""
    extents = sorted(
        (place.relative_path, place.offset, place.length) for place in storage.values()
    )
    for (name, at, length), (next_name, next_at, _) in zip(extents, extents[1:]):
        if name == next_name and at + length > next_at:
            yield f"two chunks share byte {next_at} of {name}"


def _inside(chunk: dcp.ChunkStorageMetadata, shape: Sequence[int]) -> bool:
    if not type(chunk.offsets) is type(chunk.sizes) is torch.Size:
        return False
    return len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
        0 <= at <= at + n <= total
        for at, n, total in zip(chunk.offsets, chunk.sizes, shape)
    )
