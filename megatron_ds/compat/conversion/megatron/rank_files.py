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
from .args import check_arguments
from .names import flattened

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
    """Return the folders of ranks in the folder of an iteration, by name. Others are passed over."""
    if not path.is_dir():
        return []
    found = []
    for folder in path.iterdir():
        if _FOLDER.fullmatch(folder.name) and _weights_file(folder):
            found.append(folder)
    return sorted(found)


def _weights_file(folder: Path) -> Path | None:
    """Return the file with the weights of a rank, under one of its two names."""
    for name in WEIGHTS_FILES:
        file = folder / name
        if file.is_file():
            return file
    return None


def read_rank_files(path: Path) -> list[RankFile]:
    """Return all ranks' files, sorted by position. Raises CheckpointError if some are missing or mixed up."""
    # The first file records the sizes of the grid.
    paths = [(folder, _weights_file(folder)) for folder in rank_folders(path)]
    contents = {
        folder: read_torch_file(file) for folder, file in paths if file is not None
    }
    if not contents:
        raise CheckpointError(f"{path} has no mp_rank_*/{WEIGHTS_FILES[0]}.")
    if not all(isinstance(found.content, Mapping) for found in contents.values()):
        raise CheckpointError(f"{path}: a file holds no table of values.")
    first = next(iter(contents.values()))
    args = fields_of(first.content.get("args"))
    if args:
        check_arguments(args, path)
    # Each folder's name is its position in the grid.
    sizes = _sizes(args)
    files = []
    for folder, found in contents.items():
        at = _position(folder.name, sizes)
        chunks = tuple(flattened(model) for model in _models(found.content, folder))
        files.append(RankFile(folder, at, found.content, chunks, found.ignored))
    # They form one grid.
    files.sort(key=lambda file: file.at)
    _check_grid(path, files, sizes)
    # Megatron-LM's converter writes the same arguments into all files.
    ranks = {repr(file.args.get("rank")) for file in files}
    if len(ranks) > 1 or len(files) == 1:
        for file in files:
            _check_rank(file, sizes)
    return files


def _sizes(args: Mapping[str, Any]) -> Coordinates | None:
    """Return (tp, pp, ep) of the arguments; None without arguments.

    Files of releases before pipelines name the first size model_parallel_size.
    """
    if not args:
        return None
    # Sizes that are missing or None are 1.
    names = [f"{axis}_model_parallel_size" for axis in _AXES]
    tp, pp, ep = (args.get(name) or 1 for name in names)
    if not args.get("tensor_model_parallel_size"):
        tp = args.get("model_parallel_size") or 1
    return tp, pp, ep


def _position(name: str, sizes: Coordinates | None) -> Coordinates:
    """Return the position that the name of a folder gives; missing numbers are 0."""
    match = _FOLDER.fullmatch(name)
    assert match is not None, "rank_folders has chosen the folders by their names"
    numbers = [int(number) for number in match.groups() if number is not None]
    # With one pipeline stage, the second number is the expert-parallel position.
    has_experts_alone = sizes is not None and sizes[1] == 1 and sizes[2] > 1
    if len(numbers) == 2 and has_experts_alone:
        return numbers[0], 0, numbers[1]
    first, second, third, *_ = (*numbers, 0, 0)
    return first, second, third


def _models(content: Mapping[str, Any], folder: Path) -> Iterator[Any]:
    """Yield the model chunks of a rank in their order. Raises CheckpointError if there is none."""
    if "model" in content:
        yield content["model"]
        return
    # Virtual pipeline stages are numbered without gaps.
    keys = [key for key in content if isinstance(key, str)]
    numbered = [key for key in keys if re.fullmatch(r"model\d+", key)]
    chunks = [f"model{i}" for i in range(len(numbered))]
    missing = [name for name in chunks if name not in content]
    if missing or not chunks:
        entries = list(content)[:10]
        first = ", ".join(map(str, entries))
        raise CheckpointError(f"{folder} holds no model; its entries are {first}.")
    for name in chunks:
        yield content[name]


def _check_grid(path: Path, files: list[RankFile], sizes: Coordinates | None) -> None:
    """Raises CheckpointError unless there is one file for each rank, and all are of one save.

    sizes: of the grid; without them the largest positions of the files count.
    """
    # Every rank of the grid must have a file.
    present = {file.at for file in files}
    if sizes is None:
        sizes = tuple(max(places) + 1 for places in zip(*present))
    missing = (at for at in _positions(sizes) if at not in present)
    absent = next(missing, None)
    if absent or len(present) != math.prod(sizes):
        sizes_of_run = " × ".join(map(str, sizes))
        what = f"there are {len(present)}"
        if absent:
            what = f"the first missing is {absent}"
        raise CheckpointError(
            f"{path} has files of {len(present)} ranks, and the run had tensor × "
            f"pipeline × expert = {sizes_of_run} ranks; {what} (tp, pp, ep). "
            "Copy all mp_rank folders."
        )
    # All files must be of one save.
    for name in ("iteration", "checkpoint_version"):
        values = {repr(file.content.get(name)) for file in files}
        if len(values) > 1:
            listed = " and ".join(sorted(values))
            raise CheckpointError(
                f"{path}: the files have {name} {listed}: they are not of one save."
            )


def _positions(sizes: Coordinates) -> Iterator[Coordinates]:
    """Yield all positions of a grid of (tp, pp, ep) ranks, one by one: a damaged file may state any sizes."""
    tp, pp, ep = sizes
    for t in range(tp):
        for p in range(pp):
            for e in range(ep):
                yield t, p, e


def _check_rank(file: RankFile, sizes: Coordinates | None) -> None:
    """Raises CheckpointError if the file records that another rank wrote it."""
    rank = file.args.get("rank")
    world = file.args.get("world_size")
    if not sizes or not isinstance(rank, int) or sizes[2] > 1:
        return
    tp, pp, _ = sizes
    tp_of_name, stage_of_name, _ = file.at
    # Tensor-parallel ranks are next to each other.
    tp_rank = rank % tp
    if tp_rank != tp_of_name:
        raise CheckpointError(
            f"{file.folder} was written by rank {rank}, whose tensor-parallel "
            f"position is {tp_rank}, and its name is that of position "
            f"{tp_of_name}: the files of two ranks are swapped. "
            "Restore them from the original."
        )
    # Pipeline stages are the slowest dimension, unless the run chose another order.
    if file.args.get("use_tp_pp_dp_mapping"):
        return
    if not isinstance(world, int) or world <= 0 or world % pp:
        return
    ranks_of_stage = world // pp
    stage = rank // ranks_of_stage
    if stage != stage_of_name:
        raise CheckpointError(
            f"{file.folder} was written by rank {rank} of {world}, "
            f"whose pipeline stage is {stage}, and its name is that of stage "
            f"{stage_of_name}: the files of two ranks are swapped. "
            "Restore them from the original."
        )
