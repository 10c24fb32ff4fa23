"""Tensors in safetensors files, read one at a time. All sizes in a header are compared with the file first.

8 bytes   length of the header
header    JSON: name → {"dtype", "shape", "data_offsets": [begin, end]}, offsets from its end
rest      the tensors, without gaps or overlaps
"""

import json
import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ....checkpoint.folder import read_regular
from ....checkpoint.safetensors_folder import CODES, INDEX, SINGLE
from ....errors import CheckpointError
from ....host.direct_file import read_range
from .stored_tensor import StoredTensor

MOST_HEADER = 100_000_000  # bytes, as in the safetensors library
DTYPES = {code: dtype for dtype, code in CODES.items()} | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Name → tensor of all files of a folder. Raises CheckpointError when a file is missing or damaged."""
    if (folder / INDEX).is_file():
        return _read_sharded(folder)
    if (folder / SINGLE).is_file():
        return read_file(folder / SINGLE)
    old = sorted(
        path.name
        for path in (*folder.glob("pytorch_model*.bin"), *folder.glob("*.pth"))
    )
    advice = " Complete the download."
    if old:
        advice = (
            f" It has {old[0]}, a pickle: save it with save_pretrained(DIR) of transformers first, "
            "which writes safetensors."
        )
    raise CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}.{advice}")


def _read_sharded(folder: Path) -> dict[str, StoredTensor]:
    # The index must name files in this folder and nothing else.
    places = read_json(folder / INDEX).get("weight_map")
    is_table = isinstance(places, dict) and bool(places)
    if not is_table or not all(map(_is_file_name, places.values())):
        raise CheckpointError(
            f"{folder / INDEX} is damaged: weight_map is not a table of file names."
        )
    # All files must be present before any is read.
    files = sorted({*places.values()})
    if absent := [name for name in files if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{folder} lacks {len(absent)} of {len(files)} files that {INDEX} names, first "
            f"{absent[0]}. Complete the download."
        )
    # Each file must hold exactly the tensors that the index assigns to it.
    found: dict[str, StoredTensor] = {}
    for file in files:
        tensors = read_file(folder / file)
        expected = {name for name, place in places.items() if place == file}
        if differing := sorted(expected ^ tensors.keys()):
            where = "is not in" if differing[0] in expected else "is in"
            raise CheckpointError(
                f"{folder / file} does not belong to {INDEX}: {differing[0]} {where} the "
                f"file, and so {len(differing) - 1} others. Files are swapped, or of "
                "another model."
            )
        found |= tensors
    return {name: found[name] for name in places}


def _is_file_name(text: object) -> bool:
    return isinstance(text, str) and Path(text).name == text


def read_file(path: Path) -> dict[str, StoredTensor]:
    """Name → tensor of one file. Raises CheckpointError when it is damaged."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MOST_HEADER, size - 8):
                raise ValueError(f"its header has {length} bytes and the file {size}")
            header = json.loads(file.read(length))
        return _tensors_of(path, header, 8 + length, size)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged or no safetensors file: {error}. Download or save it "
            "again."
        ) from error


def _tensors_of(
    path: Path, header: Any, start: int, size: int
) -> dict[str, StoredTensor]:
    """Raises ValueError for entries that do not cover the file."""
    if not isinstance(header, dict):
        raise ValueError("its header is not a table")
    found = {}
    intervals = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (begin, end) = _entry(name, entry)
        if math.prod(shape) * dtype.itemsize != end - begin:
            raise ValueError(f"{name} {list(shape)} of {dtype} has {end - begin} bytes")
        intervals.append((begin, end))
        read = partial(_read, path, name, start + begin, shape, dtype)
        found[name] = StoredTensor(shape, dtype, read, f"{path}: {name}")
    # The tensors must fill the file without gaps or overlaps.
    at = 0
    for begin, end in sorted(intervals):
        if begin != at:
            raise ValueError(f"byte {at} after its header is in no tensor or in two")
        at = end
    if start + at != size:
        raise ValueError(
            f"its tensors end at byte {start + at}, and it has {size} bytes: it is truncated"
        )
    return found


def _entry(
    name: str, entry: Any
) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
    # Sizes are limited before any of them is multiplied.
    values = entry if isinstance(entry, dict) else {}
    shape = values.get("shape")
    offsets = values.get("data_offsets")
    if (
        not _is_list_of_counts(shape)
        or not _is_list_of_counts(offsets)
        or len(offsets) != 2
        or len(shape) > 16
    ):
        raise ValueError(f"the entry of {name} is not one of a tensor")
    code = values.get("dtype")
    if code not in DTYPES:
        raise ValueError(
            f"{name} has the dtype {code!r}, and {', '.join(DTYPES)} are known"
        )
    return DTYPES[code], tuple(shape), tuple(offsets)


def _is_list_of_counts(value: object) -> bool:
    if not isinstance(value, list):
        return False
    return all(type(number) is int and 0 <= number < 2**62 for number in value)


def _read(
    path: Path, name: str, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        flat = read_range(path, offset, nbytes)
        if len(flat) < nbytes:
            raise OSError(f"it ends at byte {offset + len(flat)}")
    except OSError as error:
        raise CheckpointError(f"{path}: {name} cannot be read: {error}.") from error
    if flat.storage_offset() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(shape)


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
