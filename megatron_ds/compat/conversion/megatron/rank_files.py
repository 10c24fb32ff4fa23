"""The mp_rank folders of one iteration: one file for each model-parallel rank.

mp_rank_{tp:02d}[_{pp:03d}][_{ep:03d}]/model_optim_rng.pt      and distrib_optim.pt
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import CheckpointError
from ..files.foreign_pickle import fields_of
from ..files.stored_tensor import StoredTensor
from ..files.torch_file import read_torch_file
from .megatron_args import check_arguments
from .megatron_names import flattened

WEIGHTS_FILES = ("model_optim_rng.pt", "model_rng.pt")
OPTIMIZER_FILE = "distrib_optim.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_AXES = ("tensor", "pipeline", "expert")
Coordinates = tuple[int, int, int]


@dataclass(frozen=True)
class RankFile:
    """The file of one rank. at: its tensor-, pipeline- and expert-parallel positions.

    chunks  {name of theirs: tensor} of each model chunk, in the order of registration
    """

    folder: Path
    at: Coordinates
    content: Mapping[str, Any]
    chunks: tuple[Mapping[str, StoredTensor], ...]
    ignored: tuple[str, ...]

    @property
    def args(self) -> dict[str, Any]:
        """The arguments of the run."""
        return fields_of(self.content.get("args"))


def rank_folders(path: Path) -> list[Path]:
    """The folders of ranks in the folder of an iteration."""
    if not path.is_dir():
        return []
    return sorted(
        folder
        for folder in path.iterdir()
        if _FOLDER.fullmatch(folder.name) and _weights_file(folder)
    )


def _weights_file(folder: Path) -> Path | None:
    for name in WEIGHTS_FILES:
        if (folder / name).is_file():
            return folder / name
    return None


def read_rank_files(path: Path) -> list[RankFile]:
    """All ranks' files, sorted by position. Raises CheckpointError if some are missing or mixed up."""
    # The first file records the sizes of the grid.
    folders = rank_folders(path)
    if not folders:
        raise CheckpointError(f"{path} has no mp_rank_*/{WEIGHTS_FILES[0]}.")
    contents = [read_torch_file(_weights_file(folder)) for folder in folders]
    if not all(isinstance(found.content, Mapping) for found in contents):
        raise CheckpointError(f"{path}: a file holds no table of values.")
    args = fields_of(contents[0].content.get("args"))
    if args:
        check_arguments(args, path)
    # Each folder's name is its position in the grid.
    sizes = _sizes(args)
    files = []
    for folder, found in zip(folders, contents):
        at = _position(folder.name, sizes)
        chunks = tuple(flattened(model) for model in _models(found.content, folder))
        files.append(RankFile(folder, at, found.content, chunks, found.ignored))
    files.sort(key=lambda file: file.at)
    _check_grid(path, files, sizes)
    # Megatron-LM's converter writes the same arguments into all files.
    ranks = {repr(file.args.get("rank")) for file in files}
    if len(ranks) > 1 or len(files) == 1:
        for file in files:
            _check_rank(file, sizes)
    return files


def _sizes(args: Mapping[str, Any]) -> Coordinates | None:
    """(tp, pp, ep) of the arguments; None without arguments."""
    if not args:
        return None
    sizes = [args.get(f"{axis}_model_parallel_size") or 1 for axis in _AXES]
    if not args.get("tensor_model_parallel_size"):
        sizes[0] = args.get("model_parallel_size") or 1  # its name before pipelines
    return tuple(sizes)


def _position(name: str, sizes: Coordinates | None) -> Coordinates:
    groups = _FOLDER.fullmatch(name).groups()
    numbers = [int(number) for number in groups if number is not None]
    # With one pipeline stage, the second number is the expert-parallel position.
    has_experts_alone = sizes is not None and sizes[1] == 1 and sizes[2] > 1
    if len(numbers) == 2 and has_experts_alone:
        return numbers[0], 0, numbers[1]
    return (*numbers, 0, 0)[:3]


def _models(content: Mapping[str, Any], folder: Path) -> Iterator[Any]:
    if "model" in content:
        yield content["model"]
        return
    # Virtual pipeline stages are numbered without gaps.
    keys = [key for key in content if isinstance(key, str)]
    numbered = [key for key in keys if re.fullmatch(r"model\d+", key)]
    chunks = [f"model{i}" for i in range(len(numbered))]
    if not chunks or any(name not in content for name in chunks):
        first = ", ".join(map(str, list(content)[:10]))
        raise CheckpointError(f"{folder} holds no model; its entries are {first}.")
    yield from (content[name] for name in chunks)


def _check_grid(path: Path, files: list[RankFile], sizes: Coordinates | None) -> None:
    # Every rank of the grid must have a file.
    counts = tuple(max(file.at[axis] for file in files) + 1 for axis in range(3))
    present = {file.at for file in files}
    wanted = sizes or counts
    absent = next((at for at in _positions(wanted) if at not in present), None)
    if absent or len(present) != math.prod(wanted):
        sizes_of_run = " × ".join(map(str, wanted))
        what = f"there are {len(present)}"
        if absent:
            what = f"the first missing is {absent}"
        raise CheckpointError(
            f"{path} has files of {len(present)} ranks, and the run had tensor × pipeline "
            f"× expert = {sizes_of_run} ranks; {what} (tp, pp, ep). Copy "
            "all mp_rank folders."
        )
    # All files must be of one save.
    for name in ("iteration", "checkpoint_version"):
        values = {repr(file.content.get(name)) for file in files}
        if len(values) > 1:
            raise CheckpointError(
                f"{path}: the files have {name} {' and '.join(sorted(values))}: they are "
                "not of one save."
            )


def _positions(sizes: Coordinates) -> Iterator[Coordinates]:
    for t in range(sizes[0]):
        for p in range(sizes[1]):
            for e in range(sizes[2]):
                yield t, p, e


def _check_rank(file: RankFile, sizes: Coordinates | None) -> None:
    """Raises CheckpointError if the file records that another rank wrote it."""
    rank = file.args.get("rank")
    world = file.args.get("world_size")
    if not sizes or not isinstance(rank, int) or sizes[2] > 1:
        return
    # Tensor-parallel ranks are next to each other.
    if rank % sizes[0] != file.at[0]:
        raise CheckpointError(
            f"{file.folder} was written by rank {rank}, whose tensor-parallel position is "
            f"{rank % sizes[0]}, and its name is that of position {file.at[0]}: the files "
            "of two ranks are swapped. Restore them from the original."
        )
    # Pipeline stages are the slowest dimension, unless the run chose another order.
    if (
        isinstance(world, int)
        and world > 0
        and world % sizes[1] == 0
        and not file.args.get("use_tp_pp_dp_mapping")
    ):
        stage = rank // (world // sizes[1])
        if stage != file.at[1]:
            raise CheckpointError(
                f"{file.folder} was written by rank {rank} of {world}, whose pipeline "
                f"stage is {stage}, and its name is that of stage {file.at[1]}: the files "
                "of two ranks are swapped. Restore them from the original."
            )
