"""Tensors in safetensors files, read one at a time.

The safetensors library reads the header, and compares all sizes in it with the file. The tensors themselves are
read by offset: the library maps the whole file, whose pages would then count as memory of this process.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ....checkpoint.folder import read_regular
from ....checkpoint.safetensors_folder import CODES, INDEX, SINGLE
from ....errors import CheckpointError
from ....host.direct_file import read_range
from .stored_tensor import StoredTensor

POINTER = b"version https://git-lfs.github.com"  # the beginning of the text that Git keeps in place of a file of LFS
DTYPES = {code: dtype for dtype, code in CODES.items()} | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Return name → tensor of all files of a folder. Raises CheckpointError when a file is missing or damaged, and
    for two sets of weights."""
    index = folder / INDEX
    single = folder / SINGLE
    if index.is_file():
        places = _places_in(index)
        if single.is_file():
            _check_one_set(folder, places)
        return _read_sharded(folder, places)
    if single.is_file():
        return read_file(single)
    # Pickles of torch.save are named in the message, and not read.
    pickles = (*folder.glob("pytorch_model*.bin"), *folder.glob("*.pth"))
    old = sorted(path.name for path in pickles)
    advice = " Complete the download."
    if old:
        advice = (
            f" It has {old[0]}, a pickle: save it with save_pretrained(DIR) of "
            "transformers first, which writes safetensors."
        )
    raise CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}.{advice}")


def _places_in(index: Path) -> dict[str, str]:
    """Return name of a tensor → its file, in the folder of the index and nowhere else. Raises CheckpointError."""
    places = read_json(index).get("weight_map")
    is_table = isinstance(places, dict) and all(map(_is_file_name, places.values()))
    if not is_table or not places:
        raise CheckpointError(
            f"{index} is damaged: weight_map is not a table of file names."
        )
    return places


def _check_one_set(folder: Path, places: Mapping[str, str]) -> None:
    """Raises CheckpointError unless the index names the single file: programs differ in which of two they read."""
    others = sorted({*places.values()} - {SINGLE})
    if not others:
        return
    raise CheckpointError(
        f"{folder} holds the weights of two models, or one twice: {SINGLE}, which transformers reads, and {INDEX} with "
        f"{len(others)} files, first {others[0]}, which others read, such as vLLM. Move one of the two to another "
        "folder; the older one is likely left from an earlier save."
    )


def _read_sharded(folder: Path, places: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Return the mapping name → tensor of the files that the folder's index names."""
    # All files must be present before any is read.
    files = sorted({*places.values()})
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{folder} lacks {len(absent)} of {len(files)} files that {INDEX} "
            f"names, first {absent[0]}. Complete the download."
        )
    # Each file must hold the tensors that the index assigns to it, and may hold copies of others.
    held = {file: read_file(folder / file) for file in files}
    for file, tensors in held.items():
        assigned = {name for name, place in places.items() if place == file}
        absent = sorted(assigned - tensors.keys())
        strange = sorted(tensors.keys() - places.keys())
        where = "is not in" if absent else "is in"
        differing = absent or strange
        if differing:
            raise CheckpointError(
                f"{folder / file} does not belong to {INDEX}: {differing[0]} {where} the "
                f"file, and so {len(differing) - 1} others. Files are swapped, or of "
                "another model."
            )
    found = {name: held[file][name] for name, file in places.items()}
    for file, tensors in held.items():
        for name in sorted(tensors):
            if places[name] != file:
                _check_copy(tensors[name], found[name], places[name])
    return found


def _check_copy(copy: StoredTensor, named: StoredTensor, file: str) -> None:
    """Raises CheckpointError if a second copy of a tensor, in a file that the index does not name for it, has
    other values."""
    is_alike = copy.shape == named.shape and copy.dtype == named.dtype
    if not is_alike or not torch.equal(_bytes_of(copy), _bytes_of(named)):
        raise CheckpointError(
            f"{copy.place} differs from the tensor of that name in {file}, the file that {INDEX} names for it. Save "
            "the model again, or download it again."
        )


def _bytes_of(tensor: StoredTensor) -> torch.Tensor:
    values = tensor.read()
    flat = values.reshape(-1)
    return flat.view(torch.uint8)


def _is_file_name(text: object) -> bool:
    """Return whether it names a file without a folder."""
    return isinstance(text, str) and Path(text).name == text


def read_file(path: Path) -> dict[str, StoredTensor]:
    """Return the mapping name → tensor of one file. Raises CheckpointError when it is damaged."""
    # The library checks that the entries of the header cover the file, without gaps or overlaps.
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
        size = path.stat().st_size
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is damaged or no safetensors file: {error}. {_advice(path)}"
        ) from error

    # Offsets are those of the header's order, from the end of the file.
    tensors = {name: _described(path, name, stored) for name, stored in slices.items()}
    at = size - sum(tensor.nbytes for tensor in tensors.values())
    found = {}
    for name, tensor in tensors.items():
        found[name] = replace(tensor, read=partial(_read, path, name, at, tensor))
        at += tensor.nbytes
    return found


def _advice(path: Path) -> str:
    """Return what to do about a file that cannot be read."""
    start = b""
    with suppress(OSError):
        with open(path, "rb") as file:
            start = file.read(len(POINTER))
    # Git keeps a short text in place of a file that was not fetched.
    if start != POINTER:
        return "Download or save it again."
    return (
        "It is a pointer of Git LFS, not the file itself: run git lfs pull in its "
        "folder."
    )


def _described(path: Path, name: str, stored: Any) -> StoredTensor:
    """Return a tensor that cannot be read yet. stored: the entry that the library has read."""
    code = stored.get_dtype()
    if code not in DTYPES:
        known = ", ".join(DTYPES)
        raise CheckpointError(
            f"{path}: {name} has the dtype {code}, and {known} are known."
        )
    # Its reader is set when its place in the file is known.
    shape = tuple(stored.get_shape())
    return StoredTensor(shape, DTYPES[code], _not_placed, f"{path}: {name}")


def _not_placed() -> torch.Tensor:
    raise AssertionError("the place of the tensor in its file is not known yet")


def _read(path: Path, name: str, offset: int, stored: StoredTensor) -> torch.Tensor:
    """Return the tensor at this byte of the file. Raises CheckpointError if the file has become shorter."""
    try:
        flat = read_range(path, offset, stored.nbytes)
        if len(flat) < stored.nbytes:
            end = offset + len(flat)
            raise OSError(f"it ends at byte {end}")
    except OSError as error:
        raise CheckpointError(f"{path}: {name} cannot be read: {error}.") from error
    # A view as another dtype needs its alignment.
    if flat.storage_offset() % stored.dtype.itemsize:
        flat = flat.clone()
    return flat.view(stored.dtype).view(stored.shape)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CheckpointError."""
    try:
        content = json.loads(read_regular(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a JSON file: {error}.") from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} is not a JSON object.")
    return dict(content)
