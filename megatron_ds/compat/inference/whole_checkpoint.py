"""Weights of a model from files: a Hugging Face folder, or the list of files in DeepSpeed's JSON.

    {"type": "BLOOM", "checkpoints": ["pytorch_model-00001-of-00002.bin", …], "version": 1.0}

Files are mapped into memory: ranks of a host share their pages, and a rank reads what it keeps. Pickles are read
with `weights_only`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError, ConfigError
from ..conversion.files.safetensors_reader import read_json

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLES = ("model.safetensors", "pytorch_model.bin")


def load_whole(model: nn.Module, checkpoint: Any, base_dir: str) -> None:
    """Replace the parameters of `model` by those of the files; it may be on the meta device.

    Raises CheckpointError where a file or a weight is missing, or has another shape.
    """
    stored: dict[str, torch.Tensor] = {}
    for path in files_of(checkpoint, base_dir):
        stored |= _read(path)
    # Files of a base model lack its prefix.
    own = model.state_dict(keep_vars=True)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    if not stored.keys() & own.keys():
        stored = {prefix + name: value for name, value in stored.items()}
    stored = {name: value for name, value in stored.items() if name in own}
    for name, value in stored.items():
        if value.shape != own[name].shape:
            raise CheckpointError(
                f"{name} has the shape {list(value.shape)} in the checkpoint and {list(own[name].shape)} in the "
                "model. Give the checkpoint of this model."
            )
    # Weights that share memory need one name only.
    given = {id(own[name]) for name in stored}
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    missing = [
        name
        for name, value in own.items()
        if id(value) not in given and name not in tied
    ]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} weights of {type(model).__name__}: {', '.join(missing[:5])}. Give "
            "all its files."
        )
    model.load_state_dict(stored, strict=False, assign=True)
    tie_weights = getattr(model, "tie_weights", None)
    if tie_weights is not None:
        tie_weights()
    _fill_buffers(model)


def files_of(checkpoint: Any, base_dir: str) -> list[Path]:
    """Return the files of a folder, of a JSON file with DeepSpeed's keys, of such keys, or one file of weights."""
    base = Path(base_dir)
    if isinstance(checkpoint, Mapping):
        return [_present(base / name) for name in _names_of(checkpoint)]
    if not isinstance(checkpoint, str | os.PathLike):
        raise ConfigError(
            f"checkpoint is {checkpoint!r}: give a folder, a file, or the keys of DeepSpeed's JSON."
        )
    path = _present(base / os.fspath(checkpoint))
    if path.is_dir():
        return _files_of_folder(path)
    if path.suffix != ".json":
        return [path]
    block = read_json(path)
    # DeepSpeed's files have names relative to base_dir; many lie beside the JSON.
    return [
        _present(
            base / name if base_dir or (base / name).exists() else path.parent / name
        )
        for name in _names_of(block)
    ]


def _names_of(block: Mapping[str, Any]) -> list[str]:
    names = block.get("checkpoints")
    kind = str(block.get("type", "")).lower()
    is_divided = kind in ("ds_model", "megatron")
    is_list = isinstance(names, list | tuple) and all(map(_is_text, names))
    if is_divided or names is None or not is_list:
        raise ConfigError(
            f'checkpoint: "type": {block.get("type")!r} with "checkpoints" of type {type(names).__name__} is not '
            "available: give a list of files with whole weights under Hugging Face's names, or a folder of them. "
            "megatron-ds convert writes one from Megatron's and DeepSpeed's checkpoints "
            "(docs/scale/checkpoints.md)."
        )
    return list(names)


def _files_of_folder(folder: Path) -> list[Path]:
    for index in INDEXES:
        if (folder / index).exists():
            names = read_json(folder / index).get("weight_map")
            if not isinstance(names, dict) or not all(map(_is_text, names.values())):
                raise CheckpointError(
                    f"{folder / index} is damaged: weight_map is not a table of file names."
                )
            return [_present(folder / name) for name in dict.fromkeys(names.values())]
    for single in SINGLES:
        if (folder / single).exists():
            return [folder / single]
    raise CheckpointError(
        f"{folder} has none of {', '.join((*INDEXES, *SINGLES))}. Give a folder that save_pretrained wrote."
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _present(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(
            f"checkpoint: {path} does not exist. Correct the name, or base_dir."
        )
    return path


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return _tensors_in(path)
    except Exception as error:  # what a damaged file raises depends on the damage
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read as a file of weights ({type(error).__name__}: {reason}). Give files that "
            "torch.save or safetensors wrote."
        ) from error


def _tensors_in(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    stored = stored.get("module", stored.get("model", stored))
    return {name: value for name, value in stored.items() if torch.is_tensor(value)}


# ---------------------------------------------------------------------- a model on the meta device
def _fill_buffers(model: nn.Module) -> None:
    """Compute buffers that no file has (rotary frequencies) of a model from the meta device."""
    lacking = [name for name, value in model.named_buffers() if value.is_meta]
    if not lacking:
        return
    config = getattr(model, "config", None)
    if config is None:
        raise ConfigError(
            f"the buffers {', '.join(lacking[:5])} of {type(model).__name__} are on the meta device, and no file has "
            "them. Make the model on the CPU."
        )
    made = dict(_with_parameters_on_meta(type(model), config).named_buffers())
    for name in lacking:
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        module._buffers[last] = made[name]


def _with_parameters_on_meta(kind: type[nn.Module], config: Any) -> nn.Module:
    """Return a model whose parameters have no memory, and whose buffers have their values."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: Any) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(
                parameter.to("meta"), requires_grad=parameter.requires_grad
            )

    # As torch's own contexts for deferred initialization do it.
    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        return kind(config)
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
