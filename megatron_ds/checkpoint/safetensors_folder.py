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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import CheckpointError
from ..mpu.agree import on_one_rank
from ..mpu.group import Group
from ..registry import did_you_mean
from .folder import sync_directory, write_durably

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CODES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
         torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
         torch.uint8: "U8", torch.bool: "BOOL"}


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


def write_folder(directory: str | os.PathLike, entries: Sequence[TensorEntry],
                 tensors: Callable[[Sequence[TensorEntry]], Iterable[torch.Tensor | None]], world: Group,
                 max_shard_bytes: int) -> None:
    """Write `entries` into files of at most `max_shard_bytes`, or of one tensor that is larger.

    tensors   given entries in the order of writing, yields their tensors; called on all ranks

    Files are written under temporary names and renamed: a crash leaves the old files or none, never a
    mixture. Other files in the folder are kept. Collective over `world`. Raises CheckpointError on all ranks
    when rank 0 cannot write.
    """
    folder = Path(directory)
    failing = {"doing": f"could not write safetensors to {directory}", "kind": CheckpointError}
    files = cut_into_files(entries, max_shard_bytes)
    on_one_rank(world, lambda: folder.mkdir(parents=True, exist_ok=True), **failing)
    writing = _Writing(folder, files) if world.rank == 0 else None
    try:
        for tensor in tensors([entry for file in files for entry in file]):
            if writing:
                writing.add(tensor)
    except BaseException:
        if writing:
            writing.abandon()
        raise
    on_one_rank(world, lambda: writing.publish(), **failing)


def cut_into_files(entries: Sequence[TensorEntry], max_bytes: int) -> list[list[TensorEntry]]:
    """Distribute entries over files, in order.

    Within a file wide dtypes come first, which aligns every tensor.
    """
    files: list[list[TensorEntry]] = [[]]
    for entry in entries:
        if files[-1] and sum(e.nbytes for e in files[-1]) + entry.nbytes > max_bytes:
            files.append([])
        files[-1].append(entry)
    return [sorted(file, key=lambda entry: -entry.dtype.itemsize) for file in files]


def header_of(entries: Sequence[TensorEntry]) -> bytes:
    """The bytes of a file before its first tensor."""
    places, at = {"__metadata__": {"format": "pt"}}, 0
    for entry in entries:
        places[entry.name] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape),
                              "data_offsets": [at, at + entry.nbytes]}
        at += entry.nbytes
    text = json.dumps(places).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class _Writing:
    """Files being written, on rank 0.

    An error is raised in `publish` only, since other ranks are still sending.
    """

    def __init__(self, folder: Path, files: list[list[TensorEntry]]):
        self._folder, self._files = folder, files
        self._names = [SINGLE] if len(files) == 1 else [
            f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
        self._queue = [(i, entry) for i, file in enumerate(files) for entry in file][::-1]
        self._open = None
        self._number = -1
        self._error: Exception | None = None
        if not self._queue:
            self._attempt(lambda: self._begin(0))

    def add(self, tensor: torch.Tensor) -> None:
        """The next tensor, on the CPU."""
        number, entry = self._queue.pop()
        assert tensor.shape == entry.shape and tensor.dtype == entry.dtype, (
            f"{entry}: got {tensor.dtype} {list(tensor.shape)}")
        self._attempt(lambda: self._write(number, tensor))

    def publish(self) -> None:
        """Replace the old files. Raises OSError when writing failed; the old files then stay."""
        self._attempt(self._end)
        if self._error is not None:
            self.abandon()
            raise self._error
        if len(self._names) > 1 or not (self._folder / SINGLE).exists():   # one file is replaced atomically
            self._forget((SINGLE, INDEX))
        for name in self._names:
            os.replace(self._hidden(name), self._folder / name)
        sync_directory(self._folder)
        if len(self._names) > 1:
            write_durably(self._folder / INDEX, self._index())
        self._forget({path.name for path in self._folder.glob("model*.safetensors*")} - {
            *self._names, *([INDEX] if len(self._names) > 1 else [])})

    def abandon(self) -> None:
        """Remove the temporary files; the old files stay."""
        if self._open is not None:
            self._open.close()
        for name in self._names:
            self._hidden(name).unlink(missing_ok=True)

    def _write(self, number: int, tensor: torch.Tensor) -> None:
        if number != self._number:
            self._end()
            self._begin(number)
        self._open.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)

    def _begin(self, number: int) -> None:
        self._number = number
        self._open = open(self._hidden(self._names[number]), "wb")
        self._open.write(header_of(self._files[number]))

    def _end(self) -> None:
        if self._open is not None:
            self._open.flush()
            os.fsync(self._open.fileno())
            self._open.close()
            self._open = None

    def _attempt(self, action: Callable[[], None]) -> None:
        if self._error is None:
            try:
                action()
            except OSError as error:
                self._error = error
                if self._open is not None:
                    self._open.close()

    def _index(self) -> str:
        total = sum(entry.nbytes for file in self._files for entry in file)
        places = {entry.name: name for name, file in zip(self._names, self._files) for entry in file}
        return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)

    def _hidden(self, name: str) -> Path:
        return self._folder / f".{name}.writing"


def from_safetensors(directory: str | os.PathLike) -> Callable[[str, int, torch.Tensor], None]:
    """A function read(name, start, out) that fills flat `out` with elements of a tensor, from `start` on.

    It reads only the rows that it needs. Raises CheckpointError when the folder has no safetensors; the
    function raises it when there is no such tensor, or when the tensor is too small.
    """
    folder = Path(directory)
    file_of = dict(_contents(folder))

    def read(name: str, start: int, out: torch.Tensor) -> None:
        from safetensors import safe_open

        if name not in file_of:
            raise CheckpointError(f"{folder} has no tensor "
                                  f"{name!r}{did_you_mean(name, list(file_of)) or '.'}")
        with safe_open(file_of[name], framework="pt") as file:
            stored = file.get_slice(name)
            shape = stored.get_shape()
            row = torch.Size(shape[1:]).numel()
            stop = start + out.numel()
            if stop > torch.Size(shape).numel():
                raise CheckpointError(f"{name} in {folder} has shape {shape}, but the parameter reads its "
                                      f"elements {start} to {stop - 1}. Use files of the same model.")
            first, last = start // row if row else 0, -(-stop // row) if row else 0
            values = stored[first:last] if shape else file.get_tensor(name)
            flat = values.reshape(-1)
            out.copy_(flat[start - first * row:stop - first * row] if shape else flat)

    return read


def _contents(folder: Path) -> Iterator[tuple[str, Path]]:
    from safetensors import SafetensorError, safe_open

    try:
        if (folder / SINGLE).exists():
            with safe_open(folder / SINGLE, framework="pt") as file:
                yield from ((name, folder / SINGLE) for name in file.keys())   # noqa: SIM118  not a dict
        else:
            index = json.loads((folder / INDEX).read_bytes())
            yield from ((name, folder / file) for name, file in index["weight_map"].items())
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{folder} has no readable safetensors ({SINGLE}, or {INDEX}): "
                              f"{error}") from error
