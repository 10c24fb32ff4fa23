"""Universal checkpoints of DeepSpeed (version 0.4): a folder for each parameter, independent of ranks.

    latest_universal                                    "global_step200_universal", the folder beside it
    …/zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt      {"param": fp32 tensor, "cat_dim": …}; from stage 3
                                                        the flat tensor alone
    …/zero/NAME/step.pt                                 updates of the optimizer; not from stage 3
    …/zero/optimizer_state.pt                           param_groups, loss scaler, from stage 3 the step
    …/mp_rank_00_model_states.pt                        counters, arguments: copied from the engine's folder
    …/zero_pp_rank_0_mp_rank_00_model_states.pt         the same at stage 3

A folder written here has both model files, so that DeepSpeed loads it at any stage ("load_universal": true).
"""

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ....checkpoint.folder import write_durably
from ....errors import CheckpointError
from ..files.stored_tensor import WEIGHT, RawCheckpoint, StoredProgress, StoredTensor
from ..files.tensor_views import interval
from ..files.torch_file import read_torch_file
from ..malformed import refuses_malformed
from ..published import published
from ..run_values import updates_in
from .checkpoint import BUFFER, OWN_KEYS, READ, plain_settings
from .folder import (
    buffer_names,
    count,
    entry,
    open_file,
    scalar,
    shapes_in,
    tag_folder,
)
from .foreign_names import save_with_names, scaler_object
from .optimizer_files import optimizer_steps, scaler_numbers
from .zero_shards import merged_fragments

POINTER = "latest_universal"
ZERO = "zero"
OPTIMIZER = "optimizer_state.pt"
STEP = "step"
WEIGHT_FILE = "fp32"
VERSION = 0.4
MODEL_FILES = (
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_model_states.pt",
)
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
# DeepSpeed loads no more groups of parameters than a file lists, and ignores those beyond its own.
GROUPS = 64
DEEPSPEED = "0.19.8"  # whose format is written


def universal_folder(folder: Path, iteration: int | None = None) -> Path | None:
    """Return the folder that contains `zero`: `folder` itself, or the one that `latest_universal` names."""
    if iteration is None and (folder / ZERO).is_dir():
        return folder
    if iteration is not None:
        numbered = folder / f"global_step{iteration}_universal"
        return numbered if (numbered / ZERO).is_dir() else None
    found = tag_folder(folder, None, POINTER)
    return found if found is not None and (found / ZERO).is_dir() else None


# ------------------------------------------------------------------ reading
@refuses_malformed
def read_universal(folder: Path, weights_only: bool = False) -> RawCheckpoint:
    """Return the checkpoint in a folder that contains `zero`. Raises CheckpointError."""
    # The model files describe the parameters; their tensors are in a folder each.
    names = filter(_MODEL_FILE.fullmatch, sorted(os.listdir(folder)))
    models = {name: open_file(folder / name) for name in names}
    if not models:
        raise CheckpointError(
            f"{folder} has no model_states file, which DeepSpeed copies there. Copy one "
            "from the folder that was converted."
        )
    contents = [file.content for file in models.values()]
    ignored = {name for file in models.values() for name in file.ignored}
    first = contents[0]
    place = folder / next(iter(models))
    # Ranks of a pipeline have different parameters, so the descriptions are united.
    shapes: dict[str, tuple[int, ...]] = {}
    shared: dict[str, str] = {}
    buffers: set[str] = set()
    for content in contents:
        for group in entry(content, "param_shapes", list, place, []):
            shapes |= shapes_in(group, place)
        shared |= entry(content, "shared_params", Mapping, place, {})
        buffers |= buffer_names(content, place)
    # Buffers are in the tensor folders or, if not, in the model files.
    tensors, steps = _tensors(folder / ZERO, shapes, set(shared), weights_only)
    in_folders = buffers & tensors[WEIGHT].keys()
    tensors[BUFFER] = {name: tensors[WEIGHT].pop(name) for name in in_folders}
    if not in_folders:
        tensors[BUFFER] = _buffers_in_models(contents, buffers, place)
    # Frozen parameters without a folder are merged from the parts in the model files.
    frozen = shapes_in(first.get("frozen_param_shapes") or {}, place)
    if absent := {
        name: shape for name, shape in frozen.items() if name not in tensors[WEIGHT]
    }:
        parts = [content.get("frozen_param_fragments") or {} for content in contents]
        tensors[WEIGHT] |= merged_fragments(absent, parts, place)
    # All parameters must have made the same number of steps.
    state = _optimizer_state(folder / ZERO / OPTIMIZER, ignored)
    inner = state.get("optimizer_state_dict")
    if isinstance(inner, Mapping):
        steps |= optimizer_steps(inner, folder / ZERO / OPTIMIZER)
    if len(steps) > 1:
        raise CheckpointError(
            f"{folder / ZERO}: parameters have made {sorted(steps)} steps. Files of "
            "several checkpoints are mixed up."
        )
    # The counters of the first rank hold for the whole run.
    progress = StoredProgress(
        count(first, "global_steps", place),
        count(first, "global_samples", place),
        count(first, "tokens", place),
        count(first, "skipped_steps", place),
        max(steps, default=None),
        scaler_numbers(state.get("loss_scaler")),
    )
    settings = plain_settings(first, state.get("param_groups"), shared)
    return RawCheckpoint(
        folder, tensors, settings, progress, tuple(sorted(ignored - READ))
    )


def _buffers_in_models(
    contents: Sequence[Mapping[str, Any]], buffers: Collection[str], place: Path
) -> dict[str, StoredTensor]:
    """Return the buffers of these names in the model files."""
    found: dict[str, StoredTensor] = {}
    for content in contents:
        module = entry(content, "module", Mapping, place, {})
        found |= {
            name: tensor
            for name, tensor in module.items()
            if name in buffers and isinstance(tensor, StoredTensor)
        }
    return found


def _optimizer_state(path: Path, ignored: set[str]) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    file = open_file(path)
    ignored.update(file.ignored)
    return file.content


def _tensors(
    zero: Path,
    shapes: Mapping[str, tuple[int, ...]],
    others: set[str],
    weights_only: bool,
) -> tuple[dict[str, dict[str, StoredTensor]], set[int]]:
    """Return (kind → name → tensor, numbers of steps). others: names of shared parameters."""
    found: dict[str, dict[str, StoredTensor]] = {WEIGHT: {}}
    steps: set[int] = set()
    for name in sorted(os.listdir(zero)):
        if not (zero / name).is_dir() or name in others:
            continue
        # A folder for each parameter, with a file for each kind.
        files = {path.stem: path for path in sorted((zero / name).glob("*.pt"))}
        if WEIGHT_FILE not in files:
            raise CheckpointError(
                f"{zero / name} has no {WEIGHT_FILE}.pt, the weight. Copy the folder "
                "again."
            )
        # The step is a number; the others are tensors.
        for kind, path in files.items():
            if kind == STEP:
                number = read_torch_file(path).content
                step = scalar(number) if isinstance(number, StoredTensor) else number
                updates = count({STEP: step}, STEP, path)
                if updates is not None:
                    steps.add(updates)
            elif kind == WEIGHT_FILE or not weights_only:
                named = found.setdefault(WEIGHT if kind == WEIGHT_FILE else kind, {})
                named[name] = _tensor(path, shapes.get(name))
    if absent := shapes.keys() - found[WEIGHT].keys() - others:
        raise CheckpointError(
            f"{zero} lacks {len(absent)} parameters that the model file lists, first "
            f"{sorted(absent)[0]}. Copy the folder again."
        )
    return found, steps


def _tensor(path: Path, shape: tuple[int, ...] | None) -> StoredTensor:
    """Return the tensor in a file. A file that has no entries beside the tensor holds it flat and padded, and the
    model file has its shape. Other files record the shapes on the tensor-parallel ranks, and the tensor is merged
    over these."""
    content = read_torch_file(path).content
    tensor = content.get("param") if isinstance(content, Mapping) else content
    if not isinstance(tensor, StoredTensor):
        raise CheckpointError(
            f"{path} holds no tensor. It is damaged, or another file."
        )
    if (
        tensor is not content
        or shape is None
        or len(tensor.shape) != 1
        or tensor.shape[0] < math.prod(shape)
    ):
        return tensor
    return interval(tensor, 0, shape)


# ------------------------------------------------------------------ writing
def write_universal(
    raw: RawCheckpoint,
    folder: Path,
    about: Mapping[str, Mapping[str, Any]] | None = None,
    done: Any = lambda count: None,
) -> Path:
    """Write `folder`/global_stepN_universal, complete or not at all, and `latest_universal`. Returns the
    path.

    raw    weights in fp32 and moments, under the names of the module that DeepSpeed trains; settings: "lr" of
           the next step, client_state, lr_scheduler, shared, ds_config, as far as they are known
    about  name → entries of its files beside "param": cat_dim, vocab_tensor, …
    done   called with the bytes of each tensor
    Raises CheckpointError where the path exists or cannot be written.
    """
    tag = f"global_step{raw.progress.iteration or 0}_universal"
    is_new = not folder.exists()
    try:
        _write(raw, folder / tag, about or {}, done)
    except BaseException:
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        raise
    write_durably(folder / POINTER, tag)
    return folder / tag


def _write(
    raw: RawCheckpoint, folder: Path, about: Mapping[str, Mapping[str, Any]], done: Any
) -> None:
    with published(folder) as hidden:
        for kind, named in raw.tensors.items():
            for name, tensor in named.items():
                place = hidden / ZERO / _checked(name)
                place.mkdir(parents=True, exist_ok=True)
                value = tensor.read().float().contiguous()
                beside = {"cat_dim": 0} | dict(about.get(name, {}))
                torch.save(
                    beside | {"param": value.clone()},
                    place / f"{WEIGHT_FILE if kind == WEIGHT else kind}.pt",
                )
                if kind == WEIGHT and (
                    len(raw.tensors) > 1 or raw.progress.num_updates is not None
                ):
                    torch.save(
                        torch.tensor(float(updates_in(raw.progress))),
                        place / f"{STEP}.pt",
                    )
                done(value.nbytes)
        save_with_names(_state_to_write(raw), hidden / ZERO / OPTIMIZER)
        for name in MODEL_FILES:
            torch.save(_model_file(raw), hidden / name)


def _checked(name: str) -> str:
    if os.path.basename(name) != name or name in ("", ".", ".."):
        raise CheckpointError(f"the parameter {name!r} cannot be the name of a folder.")
    return name


def _state_to_write(raw: RawCheckpoint) -> dict[str, Any]:
    rate = raw.settings.get("lr")
    groups = [
        {"params": [], **({} if rate is None else {"lr": rate})} for _ in range(GROUPS)
    ]
    step = torch.tensor(float(updates_in(raw.progress)))
    state = {
        "param_groups": groups,
        "ds_version": DEEPSPEED,
        "overflow": False,
        "optimizer_state_dict": {"state": {0: {STEP: step}}, "param_groups": groups},
    }
    if raw.progress.scaler:
        state |= {
            "loss_scaler": scaler_object(raw.progress.scaler),
            "dynamic_loss_scale": True,
        }
    return state


def _model_file(raw: RawCheckpoint) -> dict[str, Any]:
    progress = raw.progress
    settings = raw.settings
    steps = progress.iteration or 0
    last = steps - (progress.skipped_steps or 0) - 1
    # Without a stored scheduler, the number of steps decides its position.
    scheduler = settings.get("lr_scheduler") or {"last_batch_iteration": last}
    shapes = {
        name: torch.Size(tensor.shape) for name, tensor in raw.tensors[WEIGHT].items()
    }
    # Keys of the engine itself are written anew and not twice.
    client = {
        key: value
        for key, value in (settings.get("client_state") or {}).items()
        if key not in OWN_KEYS
    }
    return client | {
        "module": None,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": dict(settings.get("shared") or {}),
        "lr_scheduler": scheduler,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": progress.skipped_steps or 0,
        "global_steps": steps,
        "global_samples": progress.samples or 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": settings.get("ds_config") or {},
        "ds_version": DEEPSPEED,
        "universal_checkpoint_info": {"universal_checkpoint_version": VERSION},
    }
