"""Folders of peft: an adapter and the name of the model beside which it was trained.

read     the model, which is a folder on this machine, and its sum with the adapter as the weights
write    the adapters of a checkpoint, with the folder of their frozen weights as the model
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ....checkpoint.folder import write_durably
from ....errors import CheckpointError
from ..adapter_tensors import adapters_in_memory, with_adapters
from ..family import entries_of, model_of
from ..files.safetensors_reader import read_json
from ..files.stored_tensor import AdapterTensors, LogicalCheckpoint
from ..formats import Format, Wishes, detected
from .huggingface_format import family_for
from .peft_adapter import (
    CONFIG,
    WEIGHTS,
    adapted_layers,
    check_config,
    from_peft,
    targets_of,
    to_peft,
)

NAME = "peft"


def detect(folder: Path) -> bool:
    """Whether the folder has the settings of an adapter."""
    return (folder / CONFIG).is_file()


def read(folder: Path, wishes: Wishes) -> LogicalCheckpoint:
    """The model with the adapter. Raises CheckpointError, also where the model is not on this machine."""
    config = read_json(folder / CONFIG)
    check_config(config, folder / CONFIG)
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise CheckpointError(
            f"{folder} has no {WEIGHTS}. Save the adapter as safetensors, which is peft's default."
        )
    # The model beside which it was trained.
    named = wishes.base or config.get("base_model_name_or_path")
    base = Path(str(named))
    if named is None or not base.is_dir():
        raise CheckpointError(
            f"{folder / CONFIG} names the model {named}, which is no folder on this machine. Give its folder with "
            "--base."
        )
    found = detected(base).read(base, wishes)
    model = model_of(found.model, base)
    family = family_for(found, model, wishes)
    tensors = from_peft(load_file(weights), family, model)
    rank = int(config["r"])
    adapters = AdapterTensors(
        adapters_in_memory(tensors, weights),
        rank,
        float(config["lora_alpha"]) / rank,
        tuple(targets_of(tensors)),
        base,
    )
    specs = {entry.ours: entry.spec for entry in entries_of(family, model)}
    return with_adapters(found, adapters, specs, folder)


def write(checkpoint: LogicalCheckpoint, folder: Path, wishes: Wishes) -> list[str]:
    """Write the adapters of the checkpoint. Raises CheckpointError if it has none."""
    adapters = checkpoint.adapters
    if adapters is None:
        raise CheckpointError(
            f"{checkpoint.folder} has no adapters: its weights are those of a whole model. Use --to huggingface."
        )
    # Names of the modules are those of the family.
    model = model_of(checkpoint.model, checkpoint.folder)
    family = family_for(checkpoint, model, wishes)
    ours = {name: tensor.read() for name, tensor in adapters.tensors.items()}
    tensors = to_peft(ours, family, model)
    modules = sorted({key.split(".lora_")[0].rpartition(".")[2] for key in tensors})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(adapters.base),
        "r": adapters.rank,
        "lora_alpha": adapters.scale * adapters.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "fan_in_fan_out": any(
            layer.is_transposed for layer in adapted_layers(family, model)
        ),
        "inference_mode": True,
    }
    # The settings are written last: without them the folder is no adapter.
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty. Give a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        key: value.to(torch.float32, copy=True).contiguous()
        for key, value in tensors.items()
    }
    save_file(values, folder / WEIGHTS, metadata={"format": "pt"})
    write_durably(folder / CONFIG, json.dumps(settings, indent=1))
    return [
        f"wrote {folder}: adapters of {len(tensors) // 2} modules of a {family.name} model, rank {adapters.rank}"
    ]


FORMAT = Format(
    NAME,
    "folder of peft",
    detect,
    read,
    write,
    reads=("base", "allow_missing", "allow_unused"),
    writes=("family",),
    can_verify=False,
)
