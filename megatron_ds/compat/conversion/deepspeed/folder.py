"""Files of a checkpoint that DeepSpeed's engine wrote: which there are, which are missing, what they hold.

    latest                                              "global_step200", the folder beside it
    global_step200/mp_rank_00_model_states.pt           weights in 16 bits, counters; optimizer at stage 0
    …/[bf16_]zero_pp_rank_{d}_mp_rank_{k}_optim_states.pt     shard of masters and moments, stages 1 to 3
    …/zero_pp_rank_{d}_mp_rank_{k}_model_states.pt      stage 3: counters, no weights
    …/layer_{n}[-model_{t}]-model_states.pt             pipeline: weights of a layer
    …/layer_{l}_expert_{e}_mp_rank_00_model_states.pt   weights of an expert (deepspeed/experts.py)
    …/expp_rank_{r}_mp_rank_00_optim_states.pt          stage 0: optimizer of an expert-parallel rank

d is the data-parallel rank, k the rank among the model-parallel ones, t the tensor-parallel rank.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....checkpoint.folder import read_regular
from ....errors import CheckpointError
from ..files.stored_tensor import StoredTensor
from ..files.torch_file import ForeignFile, read_torch_file

LATEST = "latest"
_MODEL = re.compile(
    r"(?:zero_pp_rank_([0-9]{1,9})_)?mp_rank_([0-9]{1,9})_model_states\.pt"
)
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,9})_mp_rank_([0-9]{1,9})_optim_states\.pt"
)
_LAYER = re.compile(r"layer_([0-9]{1,9})(?:-model_([0-9]{1,9}))?-model_states\.pt")
_EXPERT = re.compile(
    r"layer_([0-9]{1,9})_expert_([0-9]{1,9})_mp_rank_([0-9]{1,9})_model_states\.pt"
)
_EXPERT_OPTIMIZER = re.compile(
    r"expp_rank_([0-9]{1,9})_mp_rank_([0-9]{1,9})_optim_states\.pt"
)


@dataclass(frozen=True)
class EngineFiles:
    """Paths of the files of one checkpoint.

    folder      that contains them
    models      (model-parallel rank, data-parallel rank) → file; data-parallel rank 0 unless stage 3
    optimizers  (model-parallel rank, data-parallel rank) → file of a shard; empty at stage 0
    layers      (number of the layer, tensor-parallel rank) → file; empty without a pipeline
    experts     (number of the layer among those with experts, expert) → file
    expert_optimizers  expert-parallel rank → file; at stage 0 with experts
    """

    folder: Path
    models: Mapping[tuple[int, int], Path]
    optimizers: Mapping[tuple[int, int], Path]
    layers: Mapping[tuple[int, int], Path]
    experts: Mapping[tuple[int, int], Path]
    expert_optimizers: Mapping[int, Path]

    @property
    def model_ranks(self) -> int:
        """Number of model-parallel ranks."""
        return 1 + max(rank for rank, _ in self.models)

    @property
    def shards(self) -> int:
        """Number of data-parallel ranks among which the optimizer state is divided; 0 at stage 0."""
        return 1 + max((rank for _, rank in self.optimizers), default=-1)


def is_engine_folder(path: Path) -> bool:
    """Return whether names of files in the folder are those of a checkpoint of an engine."""
    return path.is_dir() and any(_MODEL.fullmatch(name) for name in os.listdir(path))


def tag_folder(
    folder: Path, iteration: int | None = None, pointer: str = LATEST
) -> Path | None:
    """Return the folder of one checkpoint: `folder` itself, that of an iteration, or the one that `latest` names.

    None where `folder` has none. Raises CheckpointError if `latest` names no folder beside it.
    """
    if iteration is not None:
        found = folder / f"global_step{iteration}"
        return found if found.is_dir() else None
    if is_engine_folder(folder):
        return folder
    try:
        tag = read_regular(folder / pointer).decode(errors="replace").strip()
    except OSError:
        return None
    if not tag or os.path.basename(tag) != tag or tag in (".", ".."):
        raise CheckpointError(
            f"{folder / pointer} holds {tag!r}, which is not the name of a folder. Write "
            "the name of a checkpoint in that folder into it."
        )
    if not (folder / tag).is_dir():
        raise CheckpointError(
            f"{folder / pointer} names {tag!r}, and there is no such folder. Restore it, "
            "or write the name of another checkpoint into that file."
        )
    return folder / tag


def files_of(folder: Path) -> EngineFiles:
    """Return the files in a folder of one checkpoint. Raises CheckpointError if files of a rank are missing."""
    models = {}
    optimizers = {}
    layers = {}
    experts = {}
    expert_optimizers = {}
    # The name of a file gives its kind and its rank.
    for name in sorted(os.listdir(folder)):
        if found := _MODEL.fullmatch(name):
            models[int(found[2]), int(found[1] or 0)] = folder / name
        elif found := _OPTIMIZER.fullmatch(name):
            optimizers[int(found[2]), int(found[1])] = folder / name
        elif found := _LAYER.fullmatch(name):
            layers[int(found[1]), int(found[2] or 0)] = folder / name
        elif (found := _EXPERT.fullmatch(name)) and not int(found[3]):
            experts[int(found[1]), int(found[2])] = folder / name
        elif (found := _EXPERT_OPTIMIZER.fullmatch(name)) and not int(found[2]):
            expert_optimizers[int(found[1])] = folder / name
    # Each kind of file must be complete: a missing rank would leave holes in the tensors.
    if not models:
        raise CheckpointError(
            f"{folder} has no file mp_rank_00_model_states.pt or zero_pp_rank_0_mp_rank_00_"
            "model_states.pt: it is no checkpoint of an engine of DeepSpeed."
        )
    for kind, files in (
        ("model_states", models),
        ("optim_states", optimizers),
        ("layer", layers),
    ):
        _check_complete(folder, kind, files)
    if optimizers and {rank for rank, _ in optimizers} != {rank for rank, _ in models}:
        raise CheckpointError(
            f"{folder} has optim_states of {len({r for r, _ in optimizers})} "
            f"model-parallel ranks, and model_states of {len({r for r, _ in models})}. "
            "Copy the missing files, or load the weights alone."
        )
    # The number comes from a name of a file, so no list of this length is made.
    number = 1 + max(expert_optimizers, default=-1)
    if number > len(expert_optimizers):
        first = next(rank for rank in range(number) if rank not in expert_optimizers)
        raise CheckpointError(
            f"{folder}: {number - len(expert_optimizers)} expp_rank files are missing, "
            f"first that of expert-parallel rank {first}. Copy those that other nodes "
            "wrote, or load the weights alone."
        )
    return EngineFiles(folder, models, optimizers, layers, experts, expert_optimizers)


def _check_complete(
    folder: Path, kind: str, files: Mapping[tuple[int, int], Path]
) -> None:
    """Raises CheckpointError unless each first number occurs with each second one, from 0 on. Numbers of layers
    may be left out."""
    if not files:
        return
    first = (
        sorted({a for a, _ in files})
        if kind == "layer"
        else range(1 + max(a for a, _ in files))
    )
    second = range(1 + max(b for _, b in files))
    number = len(first) * len(second)
    if number > len(files):
        absent = next((a, b) for a in first for b in second if (a, b) not in files)
        place = (
            "layer {} of tensor-parallel rank {}"
            if kind == "layer"
            else "model-parallel rank {}, data-parallel rank {}"
        ).format(*absent)
        raise CheckpointError(
            f"{folder}: {number - len(files)} of {number} {kind} files are missing, first "
            f"that of {place}. Files of all ranks must be in one folder: copy those that "
            "other nodes wrote."
        )


# ---- Contents.


def open_file(path: Path) -> ForeignFile:
    """Return a file whose content is a dict. Raises CheckpointError."""
    file = read_torch_file(path)
    if not isinstance(file.content, dict):
        raise CheckpointError(
            f"{path} holds a {type(file.content).__name__}, and DeepSpeed writes a dict "
            "there: it is another file."
        )
    return file


def entry(
    content: Mapping[Any, Any],
    name: str | int,
    kind: type | tuple[type, ...],
    place: object,
    absent: Any = ...,
) -> Any:
    """Return content[name], of a type. Raises CheckpointError where it is missing (without `absent`) or another."""
    value = content.get(name, ...)
    if value is ... or value is None:
        if absent is not ...:
            return absent
        raise CheckpointError(
            f"{place} has no {name!r}, which DeepSpeed writes there: it is damaged, or of "
            "a version that is not known."
        )
    if (
        not isinstance(value, kind)
        or isinstance(value, bool)
        and kind in (int, (int, float))
    ):
        raise CheckpointError(
            f"{place}: {name!r} is a {type(value).__name__}, which DeepSpeed does not "
            "write there: it is damaged."
        )
    return value


def buffer_names(content: Mapping[str, Any], place: object) -> set[str]:
    """Return the names of buffers in a model file. Raises CheckpointError where they are not text."""
    found = entry(content, "buffer_names", list, place, [])
    for name in found:
        if not isinstance(name, str):
            raise CheckpointError(
                f"{place}: 'buffer_names' has a {type(name).__name__}, which DeepSpeed does not "
                "write there: it is damaged."
            )
    return set(found)


def count(content: Mapping[str, Any], name: str, place: object) -> int | None:
    """Return a number of steps or samples; None where it is missing. Raises CheckpointError for other values."""
    value = entry(content, name, (int, float, StoredTensor), place, None)
    if isinstance(value, StoredTensor):
        value = scalar(value)
    if value is not None and not (
        isinstance(value, int | float) and 0 <= value < 2**62 and value == int(value)
    ):
        raise CheckpointError(f"{place}: {name!r} is {value}, not a count.")
    return None if value is None else int(value)


def scalar(tensor: StoredTensor) -> float:
    """Return the value of a tensor with one element. Raises CheckpointError for others."""
    if tensor.shape not in ((), (1,)):
        raise CheckpointError(
            f"{tensor.place} has shape {list(tensor.shape)}, where one number is expected."
        )
    return tensor.read().item()


def shapes_in(content: Any, place: object) -> dict[str, tuple[int, ...]]:
    """Return {name: shape}, as `param_shapes` has them. Raises CheckpointError for anything else."""
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{place}: shapes of parameters are a {type(content).__name__}. It is damaged."
        )
    for name, shape in content.items():
        if (
            not isinstance(name, str)
            or not isinstance(shape, Sequence)
            or not all(type(n) is int and 0 <= n < 2**48 for n in shape)
        ):
            raise CheckpointError(
                f"{place}: the shape of {name!r} is {shape!r}. It is damaged."
            )
    return {name: tuple(shape) for name, shape in content.items()}
