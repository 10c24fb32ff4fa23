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

POINTER = b"version https://git-lfs.github.com"  # the beginning of the text that Git has for a file of LFS
DTYPES = {code: dtype for dtype, code in CODES.items()} | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Name → tensor of all files of a folder. Raises CheckpointError when a file is missing or damaged."""
    if (folder / INDEX).is_file():
        return _read_sharded(folder)
    single = folder / SINGLE
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


def _read_sharded(folder: Path) -> dict[str, StoredTensor]:
    """Name → tensor of the files that the folder's index names."""
    # The index must name files in this folder and nothing else.
    places = read_json(folder / INDEX).get("weight_map")
    is_table = isinstance(places, dict) and bool(places)
    if not is_table or not all(map(_is_file_name, places.values())):
        raise CheckpointError(
            f"{folder / INDEX} is damaged: weight_map is not a table of file names."
        )
    # All files must be present before any is read.
    files = sorted({*places.values()})
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{folder} lacks {len(absent)} of {len(files)} files that {INDEX} "
            f"names, first {absent[0]}. Complete the download."
        )
    # Each file must hold exactly the tensors that the index assigns to it.
    found: dict[str, StoredTensor] = {}
    for file in files:
        tensors = read_file(folder / file)
        expected = {name for name, place in places.items() if place == file}
        if differing := sorted(expected ^ tensors.keys()):
            name = differing[0]
            where = "is not in" if name in expected else "is in"
            raise CheckpointError(
                f"{folder / file} does not belong to {INDEX}: {name} {where} the "
                f"file, and so {len(differing) - 1} others. Files are swapped, or of "
                "another model."
            )
        found |= tensors
    return {name: found[name] for name in places}


def _is_file_name(text: object) -> bool:
    """Whether it names a file without a folder."""
    return isinstance(text, str) and Path(text).name == text


def read_file(path: Path) -> dict[str, StoredTensor]:
    """Name → tensor of one file. Raises CheckpointError when it is damaged."""
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
    """What to do about a file that cannot be read."""
    start = b""
    with suppress(OSError):
        with open(path, "rb") as file:
            start = file.read(len(POINTER))
    # Git has a short text in place of a file that was not fetched.
    if start != POINTER:
        return "Download or save it again."
    return (
        "It is a pointer of Git LFS, not the file itself: run git lfs pull in its "
        "folder."
    )


def _described(path: Path, name: str, stored: Any) -> StoredTensor:
    """A tensor that nothing reads yet. stored: of the library."""
    code = stored.get_dtype()
    if code not in DTYPES:
        known = ", ".join(DTYPES)
        raise CheckpointError(
            f"{path}: {name} has the dtype {code}, and {known} are known."
        )
    # Its reader is set when its place in the file is known.
    shape = tuple(stored.get_shape())
    return StoredTensor(shape, DTYPES[code], lambda: None, f"{path}: {name}")


def _read(path: Path, name: str, offset: int, stored: StoredTensor) -> torch.Tensor:
    """The tensor at this byte of the file. Raises CheckpointError if the file has become shorter."""
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
    """The object in a JSON file. Raises CheckpointError."""
    try:
        content = json.loads(read_regular(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a JSON file: {error}.") from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} is not a JSON object.")
    return dict(content)
