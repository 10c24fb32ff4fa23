"""Folders of safetensors in Hugging Face's layout, written and read one tensor at a time.

    model.safetensors                         if everything fits into one file; else
    model-00001-of-00003.safetensors …        and
    model.safetensors.index.json              {"metadata": {"total_size": …}, "weight_map": {tensor: file}}

A file is eight bytes with the length of a JSON header, the header with the offsets of each tensor, and the
tensors. Since shapes are known in advance, the header is written first and each tensor is released after it
is written. (The safetensors library needs all tensors of a file in memory.)
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import CheckpointError
from ..host.direct_file import DirectFile
from ..mpu.agree import FailureWords, on_one_rank
from ..mpu.group import Group
from ..registry import did_you_mean
from .folder import read_regular, sync_directory, write_durably

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorEntry:
    """Name, shape and dtype of a tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_folder(
    directory: str | os.PathLike,
    entries: Sequence[TensorEntry],
    tensors: Callable[[Sequence[TensorEntry]], Iterable[torch.Tensor | None]],
    world: Group,
    max_shard_bytes: int,
) -> None:
    """Write `entries` into files of at most `max_shard_bytes`, or of one tensor that is larger.

    tensors   given entries in the order of writing, yields their tensors, on all ranks. Floating-point ones
              are cast to the dtype of the entry while they are written

    Files are written under temporary names and renamed: a crash leaves the old files or none, never a
    mixture. Other files stay. Collective over `world`. Raises CheckpointError when rank 0 cannot write.
    """
    folder = Path(directory)
    failing: FailureWords = {
        "doing": f"could not write safetensors to {directory}",
        "kind": CheckpointError,
    }
    # The names of the files contain their number, so all entries are divided before any is written.
    files = cut_into_files(entries, max_shard_bytes)
    on_one_rank(world, lambda: folder.mkdir(parents=True, exist_ok=True), **failing)
    names = (
        [SINGLE]
        if len(files) == 1
        else [
            f"model-{i:05d}-of-{len(files):05d}.safetensors"
            for i in range(1, len(files) + 1)
        ]
    )
    named = dict(zip(names, files))
    # An error of rank 0 is raised after all ranks have sent their tensors: otherwise they would wait for rank 0.
    error = None
    arriving = iter(tensors([entry for file in files for entry in file]))
    try:
        if world.rank == 0:
            error = _write_hidden(folder, named, arriving)
        # Send the tensors of this rank; on rank 0, receive the rest after an error.
        for _ in arriving:
            pass
        on_one_rank(world, lambda: _publish(folder, named, error), **failing)
    finally:
        if world.rank == 0:
            with suppress(OSError):
                _forget(folder, map(_hidden, names))


def cut_into_files(
    entries: Sequence[TensorEntry], max_bytes: int
) -> list[list[TensorEntry]]:
    """Distribute entries over files, in order. Wide dtypes come first in a file, which aligns tensors."""
    files: list[list[TensorEntry]] = [[]]
    for entry in entries:
        if files[-1] and sum(e.nbytes for e in files[-1]) + entry.nbytes > max_bytes:
            files.append([])
        files[-1].append(entry)
    return [sorted(file, key=lambda entry: -entry.dtype.itemsize) for file in files]


def header_of(entries: Sequence[TensorEntry]) -> bytes:
    """Return the bytes of a file before its first tensor."""
    places: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        places[entry.name] = {
            "dtype": CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    text = json.dumps(places).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_hidden(
    folder: Path,
    files: Mapping[str, Sequence[TensorEntry]],
    tensors: Iterator[torch.Tensor | None],
) -> OSError | None:
    """Write all files under temporary names. Return an error, since other ranks are still sending."""
    try:
        for name, entries in files.items():
            with DirectFile(folder / _hidden(name)) as file:
                file.write(header_of(entries))
                for entry in entries:
                    tensor = next(tensors)
                    assert tensor is not None, f"{entry}: rank 0 got no tensor"
                    is_alike = tensor.dtype == entry.dtype or (
                        tensor.dtype.is_floating_point and entry.dtype.is_floating_point
                    )
                    assert tensor.shape == entry.shape and is_alike, (
                        f"{entry}: got {tensor.dtype} {list(tensor.shape)}"
                    )
                    file.write_tensor(tensor, entry.dtype)
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def _publish(
    folder: Path, files: Mapping[str, Sequence[TensorEntry]], error: OSError | None
) -> None:
    """Replace the old files. Raises `error` when writing failed; the old files then stay."""
    if error is not None:
        raise error
    several = len(files) > 1
    if (
        several or not (folder / SINGLE).exists()
    ):  # a single file is replaced by the rename
        _forget(folder, (SINGLE, INDEX))
    for name in files:
        os.replace(folder / _hidden(name), folder / name)
    sync_directory(folder)
    if several:
        total = sum(entry.nbytes for entries in files.values() for entry in entries)
        places: dict[str, str] = {}
        for name, entries in files.items():
            places |= {entry.name: name for entry in entries}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_durably(folder / INDEX, json.dumps(index, indent=2) + "\n")
    present = {path.name for path in folder.glob("model*.safetensors*")}
    _forget(folder, present - {*files, *([INDEX] if several else [])})


def _forget(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)


def _hidden(name: str) -> str:
    return f".{name}.writing"


def from_safetensors(
    directory: str | os.PathLike,
) -> Callable[[str, int, torch.Tensor], None]:
    """Return a function read(name, start, out) that fills flat `out` with elements of a tensor, from `start` on.

    It reads only the rows that it needs. Raises CheckpointError when the folder has no safetensors; the
    function raises it when there is no such tensor, or when the tensor is too small.
    """
    folder = Path(directory)
    file_of = dict(_contents(folder))

    def read(name: str, start: int, out: torch.Tensor) -> None:
        from safetensors import safe_open

        if name not in file_of:
            raise CheckpointError(
                f"{folder} has no tensor "
                f"{name!r}{did_you_mean(name, list(file_of)) or '.'}"
            )
        # Whole rows are read, and elements before `start` and after its end are cut off.
        with safe_open(file_of[name], framework="pt") as file:
            stored = file.get_slice(name)
            shape = stored.get_shape()
            row = torch.Size(shape[1:]).numel()
            stop = start + out.numel()
            if stop > torch.Size(shape).numel():
                raise CheckpointError(
                    f"{name} in {folder} has shape {shape}, but the parameter reads its "
                    f"elements {start} to {stop - 1}. Use files of the same model."
                )
            first = start // row if row else 0
            last = -(-stop // row) if row else 0
            values = stored[first:last] if shape else file.get_tensor(name)
            flat = values.reshape(-1)
            out.copy_(flat[start - first * row : stop - first * row] if shape else flat)

    return read


def _contents(folder: Path) -> Iterator[tuple[str, Path]]:
    from safetensors import SafetensorError, safe_open

    try:
        if (folder / SINGLE).exists():
            with safe_open(folder / SINGLE, framework="pt") as file:
                yield from ((name, folder / SINGLE) for name in file.keys())  # noqa: SIM118  not a dict
        else:
            index = json.loads(read_regular(folder / INDEX))
            yield from (
                (name, folder / file) for name, file in index["weight_map"].items()
            )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} has no readable safetensors ({SINGLE}, or {INDEX}): {error}"
        ) from error
