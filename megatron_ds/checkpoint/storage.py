"""Tensors of one checkpoint directory, written and read with torch.distributed.checkpoint ("DCP").

The files are a plain DCP checkpoint: `.metadata`, the index of chunks (boxes of logical tensors), and one
`__{rank}_0.distcp` for each rank that wrote a chunk. DCP's own tools can read them. Each chunk is compared
with its checksum in the index (chunk_file.py) and loaded with `weights_only=True`.

Note: why the parts of DCP are used, and not `dcp.save` / `dcp.load`. The latter call torch.distributed
themselves. These parts, with collectives of `Group`, run in one process without a process group, on gloo, on
nccl, and on ranks that are threads. Chunks are written here: DCP's `write_data` keeps the tensors in host
memory until its file is complete, and syncs the file before the last buffer is flushed.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import (
    create_read_items_for_chunk_list,
)
from torch.distributed.checkpoint.storage import WriteResult

from ..errors import CheckpointError
from ..host.pace import Pace
from ..host.reused_pages import reused_pages
from ..mpu.param_spec import Coordinates
from .chunk_file import ChecksummedFiles, read_chunk, saved_crc32, write_chunk
from .folder import INDEX_FILE, in_file_system
from .index import (
    index_of,
    read_index,
    save_id_in,
    tensors_in,
    without_compiled_names,
)
from .pieces import WEIGHT, Piece, View, key, rectangle, values_of, views
from .run_file import entry_of

LISTED = 20  # how many tensors an error message names


# ---- Saving: each rank writes its chunks, then rank 0 writes the index of all chunks.


def write_pieces(
    path: Path,
    pieces: Iterable[Piece],
    coordinates: Coordinates,
    rank: int,
    pace: Pace,
) -> tuple[SavePlan, list[WriteResult]]:
    """Write and sync this rank's file. Returns its part of the index, for `write_index`. Not collective."""
    chunks = list(chunks_of(pieces, coordinates))
    plan = SavePlan([chunk.item for chunk in chunks])
    if not chunks:
        return plan, []
    return plan, _write_file(path / f"__{rank}_0.distcp", chunks, pace)


def _write_file(path: Path, chunks: Sequence["Chunk"], pace: Pace) -> list[WriteResult]:
    """Write chunks one after the other, and sync them. One chunk is in host memory at a time."""
    files = ChecksummedFiles()
    places = []
    with files.create(path) as file:
        for chunk in chunks:
            pace.pause()
            values = values_of(chunk.piece, chunk.view).detach().cpu()
            places.append(write_chunk(file, path.name, values, chunk.view.tensor.dtype))
        file.sync()
    for place in places:
        vars(place)["crc32"] = files.crc32_around(place)  # ignored by DCP's reader
    return [
        WriteResult(chunk.item.index, place.length, place)
        for chunk, place in zip(chunks, places)
    ]


def write_index(
    path: Path, parts: Sequence[tuple[SavePlan, list[WriteResult]]], save_id: str
) -> dict[str, dict]:
    """Write the index of all ranks' chunks. Returns {file: its size and checksum}, for run.json.

    Raises CheckpointError unless the ranks wrote every element once and the files are readable on this rank.
    """
    index = merge_plans([plan for plan, _ in parts])
    with in_file_system(path) as folder:
        writer = Writer(folder, save_id)
        writer.finish(index, [results for _, results in parts])
    files = _table_of(result.storage_data for _, results in parts for result in results)
    # `finish` writes this name and renames it.
    crc32 = writer.fs.crc32_of(f"{INDEX_FILE}.tmp")
    files[INDEX_FILE] = entry_of((path / INDEX_FILE).stat().st_size, crc32)
    index_of(path, save_id, files)
    return files


def _table_of(places: Iterable[_StorageInfo]) -> dict[str, dict]:
    """{file: its size and checksum}. The last chunk of a file ends where the file ends."""
    last = {
        place.relative_path: place
        for place in sorted(places, key=lambda place: place.offset)
    }
    return {
        name: entry_of(place.offset + place.length, _crc32_at_end(place))
        for name, place in sorted(last.items())
    }


def _crc32_at_end(place: _StorageInfo) -> int:
    around = saved_crc32(place)
    assert around is not None, f"{place} was written without a checksum"
    return around[1]


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a piece, and its entry in DCP's plan."""

    piece: Piece
    view: View
    item: WriteItem


def chunks_of(pieces: Iterable[Piece], coordinates: Coordinates) -> Iterator[Chunk]:
    """Yield the chunks of pieces from `pieces.written_here`."""
    seen: set[dcp.MetadataIndex] = set()
    for piece in pieces:
        for view in views(piece, coordinates):
            index = dcp.MetadataIndex(key(piece), view.offset)
            assert index not in seen, (
                f"{index.fqn} is written twice at {list(view.offset)}"
            )
            seen.add(index)
            properties = dcp.TensorProperties(dtype=view.tensor.dtype)
            yield Chunk(
                piece,
                view,
                WriteItem(
                    index,
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        _chunk(view), properties, torch.Size(piece.spec.shape)
                    ),
                ),
            )


class Writer(FileSystemWriter):
    """DCP's writer of the index, with a checksum, and without temporary paths in the index."""

    def __init__(self, path: Path, save_id: str | None = None):
        super().__init__(path)
        self.fs: ChecksummedFiles = ChecksummedFiles()
        self._save_id = save_id

    def storage_meta(self) -> dcp.StorageMeta:
        """Return what the index records about the save: its identifier."""
        return dcp.StorageMeta(save_id=self._save_id)


def merge_plans(plans: Sequence[SavePlan]) -> dcp.Metadata:
    """Return the index of all ranks' chunks. Raises CheckpointError unless they hold every element once."""
    seen: dict[str, tuple] = {}
    for item in itertools.chain.from_iterable(plan.items for plan in plans):
        about = item.tensor_data
        assert about is not None, f"{item.index.fqn} is no tensor"
        this = (list(about.size), about.properties.dtype)
        if seen.setdefault(item.index.fqn, this) != this:
            raise CheckpointError(
                f"{item.index.fqn} is {seen[item.index.fqn]} on one rank and {this} on "
                "another (shape, dtype), so they are not parts of one tensor. Give the "
                "parameter the same full shape and dtype on all ranks."
            )
    # Ranks that cut a tensor in different ways hold some elements twice or not at all.
    _, index = create_default_global_save_plan(list(plans))
    counts = {
        name: (_elements(t.chunks), math.prod(t.size))
        for name, t in tensors_in(index).items()
    }
    wrong = [
        f"{name} has {held} of {total}"
        for name, (held, total) in counts.items()
        if held != total
    ]
    if wrong:
        raise CheckpointError(
            "the ranks together do not hold each element of a tensor once: "
            f"{_listing(wrong)}"
        )
    return index


# ---- Loading: each rank reads the index, and those chunks that intersect its pieces.


class Reading:
    """A checked plan to fill pieces, which are unchanged until `run`.

    exact   refuse a stored dtype other than that of the piece; otherwise values are converted

    Raises CheckpointError listing each tensor that is missing or of another shape.
    """

    def __init__(
        self,
        reader: "Reader",
        pieces: Iterable[Piece],
        coordinates: Coordinates,
        exact: bool,
    ):
        self._reader = reader
        stored = reader.tensors
        pieces = list(pieces)
        self._views: dict[str, list[View]] = {}
        self._padded: list[torch.Tensor] = []
        for piece in pieces:
            found = views(piece, coordinates)
            self._views.setdefault(key(piece), []).extend(found)
            if sum(view.tensor.numel() for view in found) < piece.tensor.numel():
                self._padded.append(piece.tensor.detach())
        problems = {
            problem
            for piece in pieces
            if (problem := _problem(piece, stored.get(key(piece)), exact))
        }
        if problems:
            listed = sorted(
                problems, key=lambda text: (not text.startswith(WEIGHT), text)
            )
            raise CheckpointError(_listing(listed) + _hint(stored))
        self._items: list[ReadItem] = []
        for name, asked in self._views.items():
            self._items += _items(name, stored[name], asked)

    def run(self) -> None:
        """Fill the pieces with the saved values; padding, which is not saved, becomes zero."""
        for tensor in self._padded:
            tensor.zero_()
        for item, values in self._reader.read(self._items):
            index = item.dest_index
            target = self._views[index.fqn][_number(index)].tensor
            rectangle(target, item.dest_offsets, item.lengths).copy_(values)


def _problem(
    piece: Piece, stored: dcp.TensorStorageMetadata | None, exact: bool
) -> str | None:
    if stored is None:
        return f"{key(piece)} is missing"
    if tuple(stored.size) != tuple(piece.spec.shape):
        return f"{key(piece)} has shape {list(stored.size)} there and {list(piece.spec.shape)} here"
    if exact and stored.properties.dtype != piece.tensor.dtype:
        return f"{key(piece)} is {stored.properties.dtype} there and {piece.tensor.dtype} here"
    return None


def _hint(stored: Iterable[str]) -> str:
    without_optimizer = all(name.startswith(f"{WEIGHT}/") for name in stored)
    advice = (
        ". It was saved without optimizer state: give --no-load-optim or --finetune"
    )
    return advice if without_optimizer else ""


def _items(
    name: str, stored: dcp.TensorStorageMetadata, targets: Iterable[View]
) -> list[ReadItem]:
    """Return the parts of stored chunks that fill the views `targets` of a tensor."""
    wanted = [_chunk(view) for view in targets]
    items = create_read_items_for_chunk_list(name, stored, wanted)
    found = sum(math.prod(item.lengths) for item in items)
    needed = _elements(wanted)
    if found != needed:
        raise CheckpointError(
            f"{name}: the stored chunks hold {found} of the {needed} elements wanted"
        )
    return items


class Reader:
    """A checkpoint directory with a verified index (`index.py`). Raises CheckpointError when it is damaged.

    It reads each chunk once. DCP's own reader loads a chunk again for every rectangle of it: up to 2n - 1
    times for a slice of a flat buffer.
    """

    def __init__(self, path: Path):
        self._path = path
        self.index = without_compiled_names(read_index(path))
        self.tensors = tensors_in(self.index)
        self.has_checksums = save_id_in(self.index) is not None

    def whole(self, name: str) -> torch.Tensor | None:
        """Return a tensor that is stored as one chunk; None for others."""
        stored = self.tensors[name]
        if len(stored.chunks) != 1:
            return None
        return self._read_chunk(dcp.MetadataIndex(name, stored.chunks[0].offsets), 0)

    def read(
        self, items: Iterable[ReadItem]
    ) -> Iterator[tuple[ReadItem, torch.Tensor]]:
        """Items with their values, chunk by chunk, in the order in which the chunks are stored."""
        place_of = lambda item: self.index.storage_data[item.storage_index]
        order = lambda item: (place_of(item).relative_path, place_of(item).offset)
        with reused_pages():
            for _, group in itertools.groupby(sorted(items, key=order), key=order):
                first, *others = group
                place = first.storage_index
                chunk = self._read_chunk(place, _number(place))
                for item in (first, *others):
                    yield item, rectangle(chunk, item.storage_offsets, item.lengths)
                del chunk

    def _read_chunk(self, index: dcp.MetadataIndex, number: int) -> torch.Tensor:
        """Read a chunk. number: its position among those of its tensor"""
        place = self.index.storage_data[index]
        stored = self.tensors[index.fqn]
        return read_chunk(
            self._path / place.relative_path,
            index.fqn,
            place,
            stored.chunks[number],
            stored.properties.dtype,
        )


def _number(index: dcp.MetadataIndex) -> int:
    """Return the position of a part among those of its tensor."""
    assert index.index is not None, f"{index} is not numbered"  # DCP numbers them
    return index.index


def _chunk(view: View) -> dcp.ChunkStorageMetadata:
    return dcp.ChunkStorageMetadata(torch.Size(view.offset), view.tensor.size())


def _elements(chunks: Iterable[dcp.ChunkStorageMetadata]) -> int:
    return sum(math.prod(chunk.sizes) for chunk in chunks)


def _listing(problems: list[str]) -> str:
    more = f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
    return "; ".join(problems[:LISTED]) + more
