"""Tensors of one checkpoint directory: planners, a writer and a reader for torch.distributed.checkpoint
("DCP").

The files are a plain DCP checkpoint: `.metadata`, the index of chunks (boxes of logical tensors), and one
`__{rank}_0.distcp` for each rank that wrote a chunk. DCP's own tools can read them. Each chunk is compared
with its checksum in the index (chunk_file.py) and loaded with `weights_only=True`.

Note: why the parts of DCP are used, and not `dcp.save` / `dcp.load`. The latter call torch.distributed
themselves. The same planners, with collectives of `Group`, run in one process without a process group, on
gloo, on nccl, and on ranks that are threads.
"""

import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..errors import CheckpointError
from ..mpu.param_spec import Coordinates
from .chunk_file import ChecksummedFiles, read_chunk, saved_crc32
from .folder import INDEX_FILE
from .index import index_of, read_index
from .pieces import WEIGHT, Piece, View, key, views
from .run_file import entry_of

LISTED = 20       # how many tensors an error message names


# ---- Saving: each rank writes its chunks, then rank 0 writes the index of all chunks.

def write_pieces(path: Path, pieces: Iterable[Piece], coordinates: Coordinates,
                 rank: int) -> tuple[SavePlan, list[WriteResult]]:
    """Write and sync this rank's file.

    Returns this rank's part of the index, for `write_index`. Not collective.
    """
    planner, writer = PieceSavePlanner(pieces, coordinates), Writer(path)
    writer.set_up_storage_writer(is_coordinator=False, rank=rank, use_collectives=False)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    return plan, writer.write_data(plan, planner).wait() if plan.items else []


def write_index(path: Path, parts: Sequence[tuple[SavePlan, list[WriteResult]]],
                save_id: str) -> dict[str, dict]:
    """Write the index of all ranks' chunks. Returns {file: its size and checksum}, for run.json.

    Raises CheckpointError unless the ranks wrote every element once and the files are readable on this rank.
    """
    writer = Writer(path, save_id)
    writer.finish(merge_plans([plan for plan, _ in parts]), [results for _, results in parts])
    files = _table_of(result.storage_data for _, results in parts for result in results)
    files[INDEX_FILE] = entry_of((path / INDEX_FILE).stat().st_size, writer.crc32_of_index)
    index_of(path, save_id, files)
    return files


def _table_of(places: Iterable[_StorageInfo]) -> dict[str, dict]:
    """{file: its size and checksum}. The last chunk of a file ends where the file ends."""
    last: dict[str, _StorageInfo] = {}
    for place in places:
        if place.relative_path not in last or last[place.relative_path].offset < place.offset:
            last[place.relative_path] = place
    return {name: entry_of(place.offset + place.length, saved_crc32(place)[1])
            for name, place in sorted(last.items())}


class PieceSavePlanner(SavePlanner):
    """Writes pieces as chunks of logical tensors. The pieces are those of `pieces.written_here`."""

    def __init__(self, pieces: Iterable[Piece], coordinates: Coordinates):
        self._tensors: dict[dcp.MetadataIndex, torch.Tensor] = {}
        self._items: list[WriteItem] = []
        for piece in pieces:
            for view in views(piece, coordinates):
                self._add(piece, view)

    def _add(self, piece: Piece, view: View) -> None:
        index = dcp.MetadataIndex(key(piece), view.offset)
        assert index not in self._tensors, f"{index.fqn} is written twice at {list(view.offset)}"
        self._tensors[index] = view.tensor
        self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(
            _chunk(view), dcp.TensorProperties(dtype=view.tensor.dtype), torch.Size(piece.spec.shape))))

    def set_up_planner(self, state_dict: Mapping[str, Any], storage_meta: dcp.StorageMeta | None = None,
                       is_coordinator: bool = False) -> None:
        """Nothing to do: the constructor has the pieces."""

    def create_local_plan(self) -> SavePlan:
        """The chunks of this rank."""
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], dcp.Metadata]:
        """The plans unchanged, and the index of all of them."""
        return all_plans, merge_plans(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The values of a chunk."""
        return self._tensors[write_item.index]


class Writer(FileSystemWriter):
    """DCP's writer: one synced file per rank. It adds checksums to the index and omits the temporary path.

    A chunk's storage info in the index gets the attribute `crc32`, which DCP's own reader ignores.
    """

    def __init__(self, path: Path, save_id: str | None = None):
        super().__init__(path)
        self.fs, self._save_id = ChecksummedFiles(), save_id

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future:
        """Write the chunks of the plan, and attach their checksums to the results."""
        written = super().write_data(plan, planner)
        for result in written.wait():
            result.storage_data.crc32 = self.fs.crc32_around(result.storage_data)
        return written

    def storage_meta(self) -> dcp.StorageMeta:
        """What the index records about the save as a whole: its id."""
        return dcp.StorageMeta(save_id=self._save_id)

    @property
    def crc32_of_index(self) -> int:
        """CRC-32 of the index.

        Valid after `finish`, which writes it under a temporary name and renames it.
        """
        return self.fs.crc32_of(f"{INDEX_FILE}.tmp")


def merge_plans(plans: Sequence[SavePlan]) -> dcp.Metadata:
    """The index of all ranks' chunks.

    Raises CheckpointError unless they hold each element of each tensor once.
    """
    seen: dict[str, tuple] = {}
    for item in itertools.chain.from_iterable(plan.items for plan in plans):
        this = (list(item.tensor_data.size), item.tensor_data.properties.dtype)
        if seen.setdefault(item.index.fqn, this) != this:
            raise CheckpointError(f"{item.index.fqn} is {seen[item.index.fqn]} on one rank and {this} on "
                                  "another (shape, dtype), so they are not parts of one tensor. Give the "
                                  "parameter the same full shape and dtype on all ranks.")
    _, index = create_default_global_save_plan(plans)
    counts = {name: (_elements(t.chunks), math.prod(t.size)) for name, t in index.state_dict_metadata.items()}
    wrong = [f"{name} has {held} of {total}" for name, (held, total) in counts.items() if held != total]
    if wrong:
        raise CheckpointError("the ranks together do not hold each element of a tensor once: "
                              f"{_listing(wrong)}")
    return index


# ---- Loading: each rank reads the index, and those chunks that intersect its pieces.

def plan_reading(reader: "Reader", pieces: Iterable[Piece], coordinates: Coordinates,
                 exact: bool) -> "Reading":
    """A checked plan to fill `pieces`. Raises CheckpointError listing each tensor that is missing or of
    another shape.

    exact   refuse a stored dtype other than that of the piece; otherwise values are converted
    """
    planner = PieceLoadPlanner(pieces, coordinates, exact)
    planner.set_up_planner({}, reader.index)
    return Reading(reader, planner, planner.create_local_plan())


class Reading:
    """A checked plan to fill pieces; the pieces are unchanged until `run`."""

    def __init__(self, reader: "Reader", planner: "PieceLoadPlanner", plan: LoadPlan):
        self._reader, self._planner, self._plan = reader, planner, plan

    def run(self) -> None:
        """Fill the pieces with the saved values; padding, which is not saved, becomes zero."""
        self._planner.clear_padding()
        self._reader.read_data(self._plan, self._planner).wait()


class PieceLoadPlanner(LoadPlanner):
    """Reads stored chunks into the pieces that they intersect."""

    def __init__(self, pieces: Iterable[Piece], coordinates: Coordinates, exact: bool):
        self._pieces, self._exact = list(pieces), exact
        self._views: dict[str, list[View]] = {}
        self._padded: list[torch.Tensor] = []
        for piece in self._pieces:
            found = views(piece, coordinates)
            self._views.setdefault(key(piece), []).extend(found)
            if sum(view.tensor.numel() for view in found) < piece.tensor.numel():
                self._padded.append(piece.tensor.detach())

    def set_up_planner(self, state_dict: Mapping[str, Any], metadata: dcp.Metadata | None = None,
                       is_coordinator: bool = False) -> None:
        """Take the index of the checkpoint."""
        self._stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads.

        Raises CheckpointError listing each tensor that is missing or of another shape.
        """
        problems = {problem for piece in self._pieces if (problem := self._problem(piece))}
        problems = sorted(problems, key=lambda text: (not text.startswith(WEIGHT), text))
        if problems:
            raise CheckpointError(_listing(problems) + self._hint())
        return LoadPlan([item for name in self._views for item in self._read_items(name)])

    def _problem(self, piece: Piece) -> str | None:
        stored = self._stored.get(key(piece))
        if stored is None:
            return f"{key(piece)} is missing"
        if tuple(stored.size) != tuple(piece.spec.shape):
            return f"{key(piece)} has shape {list(stored.size)} there and {list(piece.spec.shape)} here"
        if self._exact and stored.properties.dtype != piece.tensor.dtype:
            return f"{key(piece)} is {stored.properties.dtype} there and {piece.tensor.dtype} here"
        return None

    def _hint(self) -> str:
        without_optimizer = all(name.startswith(f"{WEIGHT}/") for name in self._stored)
        advice = ". It was saved without optimizer state: give --no-load-optim or --finetune"
        return advice if without_optimizer else ""

    def _read_items(self, name: str) -> list[ReadItem]:
        wanted = [_chunk(view) for view in self._views[name]]
        items = create_read_items_for_chunk_list(name, self._stored[name], wanted)
        found, needed = sum(math.prod(item.lengths) for item in items), _elements(wanted)
        if found != needed:
            raise CheckpointError(f"{name}: the stored chunks hold {found} of the {needed} elements wanted")
        return items

    def clear_padding(self) -> None:
        """Zero the pieces that contain padding."""
        for tensor in self._padded:
            tensor.zero_()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans unchanged."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raises CheckpointError: checkpoints of this package hold tensors only."""
        raise CheckpointError(f"{read_item.storage_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The memory into which an item is read."""
        target = self._views[read_item.dest_index.fqn][read_item.dest_index.index].tensor
        return _narrow(target, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: `resolve_tensor` returned the final memory."""


class Reader(FileSystemReader):
    """DCP's reader with a verified index (`index.py`). It reads each chunk once.

    DCP's own reader loads a chunk again for every rectangle of it: up to 2n - 1 times for a slice of a flat
    buffer. Raises CheckpointError when the checkpoint is damaged.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        self.index = read_index(path)
        self.has_checksums = self.index.storage_meta.save_id is not None
        self.set_up_storage_reader(self.index, is_coordinator=False)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future:
        """Read the items of the plan, chunk by chunk, in the order in which the chunks are stored."""
        place = lambda item: (self.storage_data[item.storage_index].relative_path,
                              self.storage_data[item.storage_index].offset)
        for _, wanted in itertools.groupby(sorted(plan.items, key=place), key=place):
            wanted = list(wanted)
            chunk = self._read_chunk(wanted[0].storage_index)
            for item in wanted:
                target = planner.resolve_tensor(item)
                target.copy_(_narrow(chunk, item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)
        done: Future = Future()
        done.set_result(None)
        return done

    def _read_chunk(self, index: dcp.MetadataIndex) -> torch.Tensor:
        place, stored = self.storage_data[index], self.index.state_dict_metadata[index.fqn]
        return read_chunk(Path(self.path) / place.relative_path, index.fqn, place, stored.chunks[index.index],
                          stored.properties.dtype)


def _chunk(view: View) -> dcp.ChunkStorageMetadata:
    return dcp.ChunkStorageMetadata(torch.Size(view.offset), view.tensor.size())


def _elements(chunks: Iterable[dcp.ChunkStorageMetadata]) -> int:
    return sum(math.prod(chunk.sizes) for chunk in chunks)


def _narrow(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def _listing(problems: list[str]) -> str:
    more = f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
    return "; ".join(problems[:LISTED]) + more
