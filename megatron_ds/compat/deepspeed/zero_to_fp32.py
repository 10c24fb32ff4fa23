"""`deepspeed.utils.zero_to_fp32`: the fp32 weights of an engine's checkpoint, in one state_dict or one
folder.

    state = get_fp32_state_dict_from_zero_checkpoint("saved")               # of the last tag, on one process
    megatron-ds zero-to-fp32 saved pytorch_model.bin

The checkpoint may be of any ZeRO stage, number of ranks and tensor-parallel size. Weights are the fp32
masters. Tied parameters have all of their names.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoint.load import read_run
from ...checkpoint.safetensors_folder import TensorEntry, cut_into_files, write_folder
from ...checkpoint.whole_tensors import StoredTensors
from ...errors import CheckpointError, ConfigError
from ...mpu.group import solo
from ..engine.checkpoint_places import place_of
from .checkpoint_files import (
    get_model_state_files,
    get_optim_files,
    parse_optim_states,
)

__all__ = [
    "bytes_of",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_files",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "parse_optim_states",
]

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """{name: CPU tensor} of a checkpoint that `engine.save_checkpoint` wrote. One process, no process group.

    tag        None: the last one that was saved
    lazy_mode  has no effect: tensors are always read one after the other
    Raises CheckpointError where there is no complete checkpoint, ConfigError for exclude_frozen_parameters: a
    checkpoint does not record which parameters were frozen.
    """
    if exclude_frozen_parameters:
        raise ConfigError(
            "exclude_frozen_parameters=True is not supported here: a checkpoint does not "
            "record which parameters were frozen. Use engine.save_16bit_model(..., "
            "exclude_frozen_parameters=True)."
        )
    stored = _Weights(checkpoint_dir, tag)
    return stored.read(stored.entries)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike, tag: str | None = None
) -> nn.Module:
    """Return the model, on the CPU, with weights and buffers of a checkpoint. RuntimeError if of another module."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    first: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        known = first.setdefault(id(value), name)
        if name not in state and known in state:  # tied
            state[name] = state[known]
    model.load_state_dict(state)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike,
    output_dir: str | os.PathLike,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> list[str]:
    """Write the weights for torch.load, or as safetensors (safe_serialization). Returns the tensors' names.

    output_dir      a folder, or a file whose name ends in .bin, .pt or .pth
    max_shard_size  of a file of the folder, in bytes or as "5GB"; a larger tensor has a file of its own.
                    None: one file

    A folder has the files of Hugging Face: pytorch_model.bin, or its parts and pytorch_model.bin.index.json.
    The tensors of one file are in memory at a time.
    """
    if exclude_frozen_parameters:
        get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, True)  # raises
    stored = _Weights(checkpoint_dir, tag)
    output = Path(output_dir)
    entries = stored.entries
    is_file = output.suffix in (".bin", ".pt", ".pth")
    limit = sum(entry.nbytes for entry in entries) + 1
    if max_shard_size is not None and not is_file:
        limit = bytes_of(max_shard_size)
    if safe_serialization and not is_file:
        write_folder(output, entries, stored.read_all, solo(), limit)
    elif safe_serialization:
        raise ConfigError(
            f"safe_serialization=True writes safetensors into a folder, but {output} has the "
            f"ending of a torch file ({output.suffix}). Give the name of a folder, or "
            "safe_serialization=False."
        )
    else:
        _write_for_torch(output, is_file, stored, cut_into_files(entries, limit))
    return [entry.name for entry in entries]


def bytes_of(size: str | int) -> int:
    """Return a size in bytes: 5000000000 for "5GB". Raises ConfigError."""
    text = str(size).strip().upper()
    unit = next((unit for unit in UNITS if text.endswith(unit)), None)
    number = text.removesuffix(unit) if unit else text
    if not number.strip().isdecimal() or not int(number):
        raise ConfigError(
            f"max_shard_size {size!r} is not a number of bytes. Write 5GB, 500MB or "
            "5000000000."
        )
    return int(number) * (UNITS[unit] if unit else 1)


def _file_name(i: int, count: int) -> str:
    return (
        f"pytorch_model-{i + 1:05d}-of-{count:05d}.bin"
        if count > 1
        else "pytorch_model.bin"
    )


def _write_for_torch(
    output: Path, is_file: bool, stored: "_Weights", files: list[list[TensorEntry]]
) -> None:
    folder = output.parent if is_file else output
    folder.mkdir(parents=True, exist_ok=True)
    if is_file:
        paths = [output] * len(files)
    else:
        paths = [folder / _file_name(i, len(files)) for i in range(len(files))]
    # A file gets its name once all are written, so a crash leaves no partial set.
    for path, entries in zip(paths, files):
        torch.save(stored.read(entries), path.with_name(f".{path.name}.writing"))
    for path in paths:
        os.replace(path.with_name(f".{path.name}.writing"), path)
    if len(files) > 1:
        places: dict[str, str] = {}
        total = 0
        for path, entries in zip(paths, files):
            places |= {entry.name: path.name for entry in entries}
            total += sum(entry.nbytes for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "pytorch_model.bin.index.json").write_text(
            json.dumps(index, indent=2)
        )


class _Weights:
    """Weights and buffers of the checkpoint of a tag, under all of their names. `entries` lists them."""

    def __init__(self, directory: str | os.PathLike, tag: str | None):
        place, step = place_of(directory, tag)
        if step is None:
            raise CheckpointError(
                f"there is no checkpoint in {place}: give the folder that was the save_dir of "
                "engine.save_checkpoint, and the tag if there was one."
            )
        self._stored = StoredTensors(place, step, ("weight", "buffer"))
        self._entry_of = {entry.name: entry for entry in self._stored.entries}
        for name, other in _shared_names(read_run(place, step)).items():
            if other in self._entry_of:  # else it was left out
                self._entry_of.setdefault(name, self._entry_of[other])
        self.entries = [
            TensorEntry(name, entry.shape, entry.dtype)
            for name, entry in self._entry_of.items()
        ]

    def read(self, entries: Sequence[TensorEntry]) -> dict[str, torch.Tensor]:
        """{name: tensor}; the names of a tied parameter have one tensor."""
        found: dict[str, torch.Tensor] = {}
        for entry in entries:
            own = self._entry_of[entry.name]
            if own.name not in found:
                found[own.name] = self._stored.read(own)
            found[entry.name] = found[own.name]
        return {entry.name: found[entry.name] for entry in entries}

    def read_all(self, entries: Sequence[TensorEntry]) -> Iterator[torch.Tensor]:
        """Return the tensors of `entries`, each read when the iterator reaches it."""
        return (self._stored.read(self._entry_of[entry.name]) for entry in entries)


def _shared_names(run: Mapping[str, Any]) -> dict[str, str]:
    """Further name → saved name; none in checkpoints of earlier versions."""
    engine = run.get("engine")
    found = engine.get("shared", {}) if isinstance(engine, Mapping) else {}
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) for name in found.values()
    ):
        raise CheckpointError(
            f"run.json: the shared names of the engine are {found!r:.60}: it is damaged. Use another tag."
        )
    return dict(found)
