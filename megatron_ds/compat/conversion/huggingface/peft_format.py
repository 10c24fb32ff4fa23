"""Folders of peft: an adapter and the name of the model beside which it was trained.

read     the model, which is a folder on this machine, and its sum with the adapter as the weights
write    the adapters of a checkpoint, with the folder of their frozen weights as the model
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save

from ....checkpoint.folder import write_durably
from ....errors import CheckpointError
from ....mpu.param_spec import ParamSpec
from ..adapter_tensors import (
    adapters_in_memory,
    of_layers,
    parts_of_name,
    shifted,
    with_adapters,
)
from ..family import entries_of, model_of
from ..files.safetensors_reader import read_file, read_json
from ..files.stored_tensor import (
    WEIGHT,
    AdapterTensors,
    LogicalCheckpoint,
    StoredTensor,
)
from ..files.torch_file import read_torch_file
from ..formats import Format, Wishes, detected
from ..published import published
from .format import family_for
from .peft_adapter import (
    CONFIG,
    PICKLED,
    WEIGHTS,
    adapted_layers,
    check_config,
    from_peft,
    targets_of,
    to_peft,
    with_own_factors,
)

NAME = "peft"


def detect(folder: Path) -> bool:
    """Return whether the folder has the settings of an adapter."""
    return (folder / CONFIG).is_file()


def read(folder: Path, wishes: Wishes) -> LogicalCheckpoint:
    """Return the model with the adapter. Raises CheckpointError, also where the model is not on this machine."""
    config = read_json(folder / CONFIG)
    check_config(config, folder / CONFIG)
    _check_numbers(config, folder / CONFIG)
    weights, stored = _stored(folder)
    # peft's files have no weights of the model, only its name.
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
    values = {name: tensor.read() for name, tensor in stored.items()}
    tensors = from_peft(values, family, model)
    specs = {entry.ours: entry.spec for entry in entries_of(family, model)}
    rank = config["r"]
    _check_shapes(tensors, rank, specs, weights)
    tensors = with_own_factors(tensors, config, family, model)
    in_memory = adapters_in_memory(tensors, weights)
    adapters = AdapterTensors(
        shifted(in_memory, found.tensors[WEIGHT], specs, -1),
        rank,
        config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank),
        tuple(targets_of(tensors)),
        base,
    )
    _check_magnitudes(adapters, bool(config.get("use_dora")), weights)
    return with_adapters(found, adapters, specs, folder)


def _stored(folder: Path) -> tuple[Path, Mapping[str, StoredTensor]]:
    """Return the file with the tensors, and the tensors, which are not read yet. Raises CheckpointError.

    Of two files the safetensors file is taken, as peft does.
    """
    weights = folder / WEIGHTS
    if weights.is_file():
        return weights, read_file(weights)
    pickled = folder / PICKLED
    if not pickled.is_file():
        raise CheckpointError(
            f"{folder} has neither {WEIGHTS} nor {PICKLED}. Copy the file of the adapter there."
        )
    content = read_torch_file(pickled).content
    is_table = isinstance(content, dict) and all(
        isinstance(name, str) and isinstance(tensor, StoredTensor)
        for name, tensor in content.items()
    )
    if not is_table:
        raise CheckpointError(
            f"{pickled} is not a table from names to tensors. Save the adapter again."
        )
    return pickled, content


def _check_numbers(config: Mapping, place: Path) -> None:
    """Raises CheckpointError unless rank and factor are numbers that an adapter may have."""
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    is_number = isinstance(alpha, int | float) and math.isfinite(alpha)
    if type(rank) is not int or rank < 1 or not is_number:
        raise CheckpointError(
            f"{place} is damaged: r is {rank!r} and lora_alpha {alpha!r}, not a rank from 1 up and a number. Save the "
            "adapter again."
        )


def _check_shapes(
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    specs: Mapping[str, ParamSpec],
    weights: Path,
) -> None:
    """Raises CheckpointError for matrices of another rank, or of a model with other widths."""
    for name, tensor in tensors.items():
        layer, _, leaf = parts_of_name(name, weights)
        columns = specs[f"{layer}.weight"].shape[1]
        wanted = {"a": [rank, columns], "b": [len(tensor), rank]}
        shape = list(tensor.shape)
        if shape != wanted.get(leaf, shape):
            raise CheckpointError(
                f"{weights}: {name} is {shape}, and with r={rank} and the model's widths it is "
                f"{wanted[leaf]}. Give the {CONFIG} and the model of this adapter."
            )


def _check_magnitudes(adapters: AdapterTensors, wanted: bool, weights: Path) -> None:
    """Raises CheckpointError unless all adapters have magnitudes or none has, as the settings demand."""
    found = set()
    for parts in of_layers(adapters).values():
        found |= {"m" in leaves for leaves in parts.values()}
    if found - {wanted}:
        have = "some adapters have no" if wanted else "adapters have a"
        raise CheckpointError(
            f"{weights}: use_dora is {wanted} in {CONFIG}, and {have} lora_magnitude_vector. Save the adapter again."
        )


def write(checkpoint: LogicalCheckpoint, folder: Path, wishes: Wishes) -> list[str]:
    """Write the adapters of the checkpoint. Raises CheckpointError if it has none."""
    adapters = checkpoint.adapters
    if adapters is None:
        raise CheckpointError(
            f"{checkpoint.folder} has no adapters: its weights are those of a whole model. Use --to huggingface."
        )
    _check_memories(adapters)
    # Names of the modules are those of the family.
    model = model_of(checkpoint.model, checkpoint.folder)
    family = family_for(checkpoint, model, wishes)
    specs = {entry.ours: entry.spec for entry in entries_of(family, model)}
    absolute = shifted(adapters.tensors, adapters.below, specs, 1)
    ours = {name: tensor.read() for name, tensor in absolute.items()}
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
        "use_dora": adapters.has_magnitudes,
        "target_modules": modules,
        "fan_in_fan_out": any(
            layer.is_transposed for layer in adapted_layers(family, model)
        ),
        "inference_mode": True,
    }
    values = {
        key: value.to(torch.float32, copy=True).contiguous()
        for key, value in tensors.items()
    }
    # Readers see the folder only when it is complete.
    with published(folder) as hidden:
        (hidden / WEIGHTS).write_bytes(save(values, metadata={"format": "pt"}))
        write_durably(hidden / CONFIG, json.dumps(settings, indent=1))
    written = sum(".lora_A." in key for key in tensors)
    return [
        f"wrote {folder}: adapters of {written} modules of a {family.name} model, rank {adapters.rank}"
    ]


def _check_memories(adapters: AdapterTensors) -> None:
    """Raises CheckpointError if the training of the adapters moved biases of experts, which their folder lacks."""
    for name, now in adapters.remembered.items():
        before = adapters.below.get(name)
        if name.endswith("expert_bias") and not (
            before is not None and torch.equal(now.read(), before.read().to(now.dtype))
        ):
            raise CheckpointError(
                f"the run that trained the adapters moved {name}, which a folder of peft has no place for: with the "
                "frozen weights in its place, routers would choose other experts. Use megatron-ds merge-adapter "
                "--to huggingface, or train with --moe-router-bias-update-rate 0."
            )


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
