"""Checkpoints of DeepSpeed in our terms, and ours as universal folders of DeepSpeed.

DeepSpeed names tensors as the module that it trains does. Two kinds of modules are known:

    Megatron-DeepSpeed's GPT        "args" in the model file describe it            mds_family.py
    a model of transformers         the config.json beside the checkpoint does      huggingface/families.py
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ....config import RunConfig, Source
from ....config.options.model import ModelConfig
from ....config.training_schedule import make_learning_rate
from ....errors import CheckpointError
from ..family import (
    Family,
    entries_of,
    initial,
    missing,
    model_of,
    to_ours,
    to_theirs,
    unused,
)
from ..files.safetensors_reader import read_json
from ..files.stored_tensor import (
    WEIGHT,
    LogicalCheckpoint,
    RawCheckpoint,
    StoredTensor,
    Tensors,
)
from ..files.tensor_views import first_rows
from ..formats import Format, Wishes
from ..huggingface.families import FAMILIES
from ..huggingface.format import (
    CONFIG,
    check_tied,
    family_for,
    family_of,
    with_prefix,
)
from ..malformed import refuses_malformed
from ..megatron import mds_family
from ..own_format import progress_in
from .checkpoint import BUFFER, read_engine_folder, without_state
from .folder import LATEST, is_engine_folder, tag_folder
from .universal_folder import (
    POINTER,
    ZERO,
    read_universal,
    universal_folder,
    write_universal,
)

OF_MEGATRON = (mds_family.NAME, mds_family.PIPELINE)
ENGINE = "deepspeed"
UNIVERSAL = "deepspeed-universal"
# Kinds of state of torch's optimizers → name of ours.
OPTIMIZERS = {
    frozenset({"exp_avg", "exp_avg_sq"}): "adam",
    frozenset({"momentum_buffer"}): "sgd",
}
# Keys of their parameter groups, and of the JSON's optimizer → our options.
NUMBERS = {"eps": "adam_eps", "weight_decay": "weight_decay"}


# ------------------------------------------------------------------ reading
def detect_engine(folder: Path) -> bool:
    """Return whether the folder, or the one that `latest` names, has the files of an engine."""
    return (
        is_engine_folder(folder)
        and not (folder / ZERO).is_dir()
        or (folder / LATEST).is_file()
        and any(is_engine_folder(path) for path in folder.iterdir() if path.is_dir())
    )


def detect_universal(folder: Path) -> bool:
    """Return whether the folder, or the one that `latest_universal` names, has a folder for each parameter."""
    return (
        (folder / ZERO).is_dir()
        and is_engine_folder(folder)
        or (folder / POINTER).is_file()
    )


def read_raw(folder: Path, wishes: Wishes, universal: bool = False) -> RawCheckpoint:
    """Return the checkpoint under the names of its module. Raises CheckpointError."""
    path = (
        universal_folder(folder, wishes.iteration)
        if universal
        else tag_folder(folder, wishes.iteration)
    )
    if path is None:
        which = (
            "that its pointer names"
            if wishes.iteration is None
            else f"of iteration {wishes.iteration}"
        )
        raise CheckpointError(
            f"{folder} has no checkpoint {which}. Give the folder that DeepSpeed saved "
            "into, or one of its global_step folders."
        )
    if universal:
        return read_universal(path, wishes.weights_only)
    thirds = None if wishes.qkv_packing is None else wishes.qkv_packing == "thirds"
    return read_engine_folder(path, wishes.weights_only, thirds)


@refuses_malformed
def read(folder: Path, wishes: Wishes, universal: bool = False) -> LogicalCheckpoint:
    """Return the checkpoint in our terms. Raises CheckpointError."""
    return in_our_terms(read_raw(folder, wishes, universal), folder, wishes)


def in_our_terms(raw: RawCheckpoint, folder: Path, wishes: Wishes) -> LogicalCheckpoint:
    """Return a checkpoint in our terms from one under the names of its module. Raises CheckpointError.

    folder: that the user gave, which may hold config.json
    """
    # The model computes its buffers, so stored ones are left out.
    raw = without_state(raw) if wishes.weights_only else raw
    raw = replace(
        raw,
        tensors={kind: named for kind, named in raw.tensors.items() if kind != BUFFER},
    )
    # The names of the weights decide whether the module is of Megatron-DeepSpeed or transformers.
    if mds_family.is_of_megatron(raw.tensors[WEIGHT]):
        raw, family, options = _of_megatron(raw, wishes)
    else:
        raw, family, options = _of_transformers(raw, folder)
    model = model_of(options, raw.folder)
    # The weights are renamed and packed; a missing, unused or misshapen tensor is an error.
    weights = with_prefix(raw.tensors[WEIGHT], family)
    options, weights = check_tied(options, weights, model, family)
    entries = entries_of(family, model)
    missing(entries, weights, wishes.allow_missing)
    left = unused(entries, weights, family, wishes.allow_unused)
    ours = to_ours(entries, weights, model)
    ours |= initial(
        entries, [entry.ours for entry in entries if entry.ours not in ours]
    )
    # The optimizer's state takes the same names and packings.
    tensors = {WEIGHT: ours, **_state(raw, entries, family, model)}
    source = {
        "format": UNIVERSAL if (raw.folder / ZERO).is_dir() else ENGINE,
        "family": family.name,
        "settings": _settings(raw, folder, family),
    }
    if isinstance(rate := _group(raw).get("lr"), float):
        source["next_rate"] = {"iteration": raw.progress.iteration, "lr": rate}
    return LogicalCheckpoint(
        raw.folder,
        options,
        tensors,
        raw.progress,
        _optimizer(tensors, raw),
        _training(raw) if len(tensors) > 1 else {},
        source=source,
        ignored=raw.ignored,
        unused=tuple(left),
    )


def _of_megatron(
    raw: RawCheckpoint, wishes: Wishes
) -> tuple[RawCheckpoint, Family, dict[str, Any]]:
    args = raw.settings.get("args")
    if not args:
        raise CheckpointError(
            f'{raw.folder}: its model file has no "args", so the options of the model '
            "are not known. Megatron-DeepSpeed stores them; copy that file again."
        )
    # Names of a pipeline are converted to those of the module first.
    name = (
        mds_family.NAME
        if mds_family.has_module_names(raw.tensors[WEIGHT])
        else mds_family.PIPELINE
    )
    raw = mds_family.with_module_names(raw)
    # Damaged arguments raise any error, which is reported with the folder.
    try:
        options = mds_family.model_options(args)
        rows = raw.tensors[WEIGHT][
            f"{mds_family.EMBEDDING}word_embeddings.weight"
        ].shape[0]
        options["vocab_size"] = _vocab_size(args, rows, wishes, raw.folder)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(
            f"{raw.folder}: its arguments or names are damaged: {type(error).__name__} "
            f"{error}."
        ) from error
    except CheckpointError as error:
        raise CheckpointError(
            f"{raw.folder}, arguments of Megatron-DeepSpeed: {error}."
        ) from error
    # The options of the model decide the packing of heads and the padding of the vocabulary.
    model = model_of(options, raw.folder)
    family = mds_family.family(
        mds_family.packing_of(raw, model, wishes.qkv_packing), name
    )
    return _without_padding(raw, model.vocab_size), family, options


def _vocab_size(
    args: Mapping[str, Any], rows: int, wishes: Wishes, folder: Path
) -> int:
    size = wishes.vocab_size or args.get("vocab_size")
    if (
        size is None
        and args.get("padded_vocab_size") not in (None, rows)
        or size is None
        and rows % 128
    ):
        size = rows  # padding was removed
    if size is None:
        raise CheckpointError(
            f"{folder}: the embedding has {rows} rows with padding, and the files do not "
            "record how many of them are tokens. Give the number: --vocab-size N"
        )
    if not isinstance(size, int) or not 0 < size <= rows:
        raise CheckpointError(
            f"{folder}: an embedding of {rows} rows does not hold a vocabulary of {size!r} tokens"
        )
    return size


def _without_padding(raw: RawCheckpoint, rows: int) -> RawCheckpoint:
    """Return the embedding and output layer with their first rows only."""

    def cut(name: str, tensor: StoredTensor) -> StoredTensor:
        has_rows = name.endswith(("word_embeddings.weight", "output_layer.weight"))
        return (
            first_rows(tensor, rows) if has_rows and tensor.shape[0] > rows else tensor
        )

    return replace(
        raw,
        tensors={
            kind: {name: cut(name, tensor) for name, tensor in named.items()}
            for kind, named in raw.tensors.items()
        },
    )


def _of_transformers(
    raw: RawCheckpoint, folder: Path
) -> tuple[RawCheckpoint, Family, dict[str, Any]]:
    path = _config_file(raw.folder, folder)
    settings = read_json(path)
    family = family_of(settings, path.parent)
    try:
        options = family.options(settings)
    except (TypeError, ValueError, KeyError, CheckpointError) as error:
        raise CheckpointError(f"{path}, model_type {family.name}: {error}.") from error
    stripped = {
        kind: {name.removeprefix("module."): tensor for name, tensor in named.items()}
        for kind, named in raw.tensors.items()
    }
    return replace(raw, tensors=stripped), family, options


def _config_file(inner: Path, folder: Path) -> Path:
    places = [place / CONFIG for place in (inner, folder, folder.parent)]
    for path in places:
        if path.is_file():
            return path
    raise CheckpointError(
        f"{inner}: the tensors are those of a model that is not Megatron-DeepSpeed's, and "
        f"there is no {CONFIG} that describes it. Copy the model's {CONFIG} of "
        f"transformers into {folder}. For other modules, load the folder with "
        "engine.load_checkpoint."
    )


def _state(
    raw: RawCheckpoint, entries: list, family: Family, model: ModelConfig
) -> Tensors:
    """Return the moments under our names. Raises CheckpointError if a parameter lacks a moment that others have."""
    found = {}
    for kind, named in raw.tensors.items():
        if kind == WEIGHT:
            continue
        state = to_ours(entries, with_prefix(named, family), model)
        without = [entry.ours for entry in entries if entry.ours not in state]
        if without and len(without) < len(entries):
            raise CheckpointError(
                f"{raw.folder}: {len(without)} parameters, first {without[0]}, have no "
                f"{kind}: they were frozen. Here all parameters are trained. Load the "
                "weights alone (--no-optim; --finetune in training)."
            )
        found[kind] = state
    return found


def _optimizer(tensors: Tensors, raw: RawCheckpoint) -> str | None:
    kinds = frozenset(tensors) - {WEIGHT}
    if not kinds:
        return None
    if kinds not in OPTIMIZERS:
        raise CheckpointError(
            f"{raw.folder}: its optimizer holds {', '.join(sorted(kinds))}, which is "
            "neither Adam's nor SGD's state. Load the weights alone (--no-optim; "
            "--finetune in training)."
        )
    return OPTIMIZERS[kinds]


def _group(raw: RawCheckpoint) -> Mapping[str, Any]:
    """Return the first group of parameters of the optimizer; {} without one."""
    groups = raw.settings.get("param_groups")
    return (
        groups[0]
        if isinstance(groups, list) and groups and isinstance(groups[0], Mapping)
        else {}
    )


def _training(raw: RawCheckpoint) -> dict[str, Any]:
    """Return the numbers of the optimizer, where the files record them."""
    group = _group(raw)
    found = {
        f"optimizer.{ours}": group[theirs]
        for theirs, ours in NUMBERS.items()
        if isinstance(group.get(theirs), float)
    }
    found |= {
        name: value
        for name, value in _choices(raw, group).items()
        if isinstance(value, bool)
    }
    betas = group.get("betas")
    if (
        isinstance(betas, list)
        and len(betas) == 2
        and all(isinstance(beta, float) for beta in betas)
    ):
        found |= {"optimizer.adam_beta1": betas[0], "optimizer.adam_beta2": betas[1]}
    return found


def _choices(raw: RawCheckpoint, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are true or false: from the parameter groups that DeepSpeed and torch have written,
    else from the JSON. AdamW's weight decay is always decoupled."""
    table = lambda value: value if isinstance(value, Mapping) else {}
    optimizer = table(table(raw.settings.get("ds_config")).get("optimizer"))
    params = table(optimizer.get("params"))
    decoupled = str(optimizer.get("type")).lower() == "adamw" or params.get(
        "adam_w_mode"
    )
    return {
        "optimizer.adam_bias_correction": group.get(
            "bias_correction", params.get("bias_correction")
        ),
        "optimizer.decoupled_weight_decay": group.get(
            "decoupled_weight_decay", decoupled
        ),
    }


def _settings(raw: RawCheckpoint, folder: Path, family: Family) -> dict[str, Any]:
    if family.name in OF_MEGATRON:
        return {}
    return dict(read_json(_config_file(raw.folder, folder)))


# ------------------------------------------------------------------ writing
def write(checkpoint: LogicalCheckpoint, folder: Path, wishes: Wishes) -> list[str]:
    """Write a universal folder. Raises CheckpointError.

    wishes.family  "mds-gpt", "mds-gpt-pipeline" or a family of Hugging Face; None: the source's
    """
    # The dtype and the family are checked before anything is converted.
    if wishes.dtype not in (None, "float32"):
        raise CheckpointError(
            f"--dtype {wishes.dtype}: universal folders hold weights in float32, from "
            "which the optimizer continues. Omit it."
        )
    model = model_of(checkpoint.model, checkpoint.folder)
    name = wishes.family or checkpoint.source.get("family")
    if name is None:
        raise CheckpointError(
            "a universal folder has the names of the module that DeepSpeed trains. Give "
            f"--family: {', '.join((*OF_MEGATRON, *FAMILIES))}."
        )
    # Tensors receive their names in the module that DeepSpeed trains.
    family = _family_to_write(name, checkpoint, model, wishes)
    entries = entries_of(family, model)
    tensors = {
        kind: to_theirs(entries, named, model)
        for kind, named in checkpoint.tensors.items()
        if kind == WEIGHT or not wishes.weights_only
    }
    about = {name: _about(name, model) for name in tensors[WEIGHT]}
    # A pipeline names layers by their position, so all kinds of tensors are renamed.
    if family.name == mds_family.PIPELINE:
        renamed = {name: mds_family.pipeline_name(name, model) for name in about}
        about = {renamed[name]: value for name, value in about.items()}
        tensors = {
            kind: {renamed[name]: tensor for name, tensor in named.items()}
            for kind, named in tensors.items()
        }
    # The first step after the load needs the learning rate that the schedule had reached.
    rate = next_rate(checkpoint, model)
    settings = {
        "client_state": {"iteration": checkpoint.progress.iteration or 0},
        "lr": rate,
    }
    raw = RawCheckpoint(checkpoint.folder, tensors, settings, checkpoint.progress)
    path = write_universal(raw, folder, about, wishes.done)
    kinds = ", ".join(kind for kind in tensors if kind != WEIGHT) or "weights only"
    unknown = [
        "the learning rate of the next step is not recorded: DeepSpeed makes that step with the first "
        "one of its scheduler"
    ]
    return [
        f"wrote {path}: {len(tensors[WEIGHT])} parameters as {family.name}, {kinds}",
        'DeepSpeed loads it with "checkpoint": {"load_universal": true} and '
        f'engine.load_checkpoint("{folder}")',
        *(unknown if rate is None else []),
    ]


def next_rate(checkpoint: LogicalCheckpoint, model: ModelConfig) -> float | None:
    """Return the learning rate of the next step, which DeepSpeed takes from the files; None if it is not recorded."""
    if "optimizer.lr" in checkpoint.training:
        source = Source("derived", str(checkpoint.folder))
        config = RunConfig(model=model).with_values(checkpoint.training, source)
        return make_learning_rate(config)(progress_in(checkpoint.progress))
    kept = checkpoint.source.get("next_rate") or {}
    return (
        kept.get("lr")
        if kept.get("iteration") == checkpoint.progress.iteration
        else None
    )


def _family_to_write(
    name: str, checkpoint: LogicalCheckpoint, model: ModelConfig, wishes: Wishes
) -> Family:
    if name not in OF_MEGATRON:
        return family_for(checkpoint, model, replace(wishes, family=name))
    packing = wishes.qkv_packing or "thirds"
    if packing == "thirds" and model.query_groups != model.num_attention_heads:
        raise CheckpointError(
            f"--family {name}: Megatron-DeepSpeed does not compute "
            f"{model.num_attention_heads} heads with {model.query_groups} keys and values "
            f"correctly. Write a family of Hugging Face: {', '.join(FAMILIES)}."
        )
    return mds_family.family(packing, name)


def _about(name: str, model: ModelConfig) -> dict[str, Any]:
    """Return how DeepSpeed divides a tensor of Megatron-DeepSpeed over tensor-parallel ranks."""
    if not name.startswith(mds_family.ROOT):
        return {}
    if name.endswith((".dense.weight", ".dense_4h_to_h.weight")):
        return {"cat_dim": 1}
    if "word_embeddings" in name or "output_layer" in name:
        return {"vocab_tensor": True, "original_vocab_size": model.vocab_size}
    return (
        {"param_n_sub_params": 2} if "dense_h_to_4h" in name and model.is_gated else {}
    )


READS = ("iteration", "vocab_size", "qkv_packing", "allow_missing", "allow_unused")
FORMAT = Format(
    ENGINE, "checkpoint of DeepSpeed's engine", detect_engine, read, reads=READS
)
UNIVERSAL_FORMAT = Format(
    UNIVERSAL,
    "universal checkpoint of DeepSpeed",
    detect_universal,
    partial(read, universal=True),
    write,
    reads=READS,
    writes=("family", "qkv_packing"),
    can_verify=False,
)
