"""Checkpoints of an engine: those of this package (docs/checkpoints.md), with the user's `client_state`.

    dir/iter_0000010/, dir/latest_checkpointed_iteration.txt     saved without a tag
    dir/TAG/iter_0000010/, …                                     saved with one: a folder of its own, one
                                                                 checkpoint
    dir/latest                                                   the tag that was saved last, if tags were
                                                                 ever used

They also hold the state of the loop: micro-steps, the scheduler's state, and the numbers of parameter groups
that a scheduler or the program has changed (`engine.set_lr`). The other numbers follow the config of the run
that loads, so that a changed "lr" in the JSON takes effect. This state is saved as plain JSON values
(`plain`, `restored`).
"""

import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..checkpoint.folder import is_ours, name_of, read_regular, steps_in, write_durably
from ..checkpoint.load import latest, load, read_run
from ..checkpoint.run_file import progress_of, require
from ..checkpoint.save import save
from ..errors import CheckpointError, ConfigError
from ..mpu.agree import on_one_rank
from ..mpu.param_spec import ParamSpec
from ..mpu.parameter_piece import ParameterPiece
from . import known_tags
from .deepspeed_loading import client_state, deepspeed_folder, fill_from_deepspeed, restore_counters
from .engine_optimizer import JsonScheduler
from .engine_status import EngineStatus
from .module_specs import NOT_DRAWN, global_names
from .module_values import saved_buffers

LATEST = "latest"
BUFFER = "buffer"           # the kind of a piece


def save_checkpoint(engine: EngineStatus, save_dir: str | os.PathLike, tag: str | None = None,
                    client_state: Mapping[str, Any] | None = None) -> Path:
    """Save weights, optimizer, scheduler, loss scale and progress; returns the path. Collective.

    tag           name of a folder for it, which `load_checkpoint` without a tag then takes; None: in
                  `save_dir` itself, by the number of steps
    client_state  plain values (JSON) of the program, which `load_checkpoint` returns; those of rank 0
    """
    if engine.has_gradients:
        raise ConfigError("a checkpoint holds no gradients, and those of the current update would be lost. "
                          "Save at a boundary of accumulation, right after engine.step().")
    # A vacant place, and what is saved besides the optimizer's pieces.
    tag, tagged = None if tag is None else str(tag), tag is not None
    folder, pointer = folder_of(save_dir, tag), Path(save_dir) / LATEST
    on_one_rank(engine.world.world, lambda: _check_may_save(engine, Path(save_dir), folder))
    buffers = [buffer for buffer in _buffers(engine) if buffer.replica == 0]
    run = {"version": __version__, "engine": _description(engine), "progress": engine.progress.to_dict(),
           "optimizer": engine.optimizer.extra_state(), "loop": loop_state(engine),
           "client_state": dict(client_state or {})}
    pieces = [*engine.optimizer.pieces(saving=True), *buffers, *engine.step_state.pieces()]
    path = save(folder, engine.global_steps, pieces, run=run, coordinates=engine.world.coordinates,
                world=engine.world.world, limit=1 if tagged else None)

    # `latest` names the tag only after the checkpoint is complete.
    def point() -> None:
        if tagged or pointer.exists():
            write_durably(pointer, tag or "")
        known_tags.look(engine, Path(save_dir), folder)

    on_one_rank(engine.world.world, point)
    return path


def load_checkpoint(engine: EngineStatus, load_dir: str | os.PathLike, tag: str | None = None,
                    load_module_strict: bool = True, load_optimizer_states: bool = True,
                    load_lr_scheduler_states: bool = True,
                    load_module_only: bool = False) -> tuple[str | None, dict[str, Any]]:
    """Load a checkpoint saved at any stage on any number of ranks, also by DeepSpeed. Collective over all
    ranks.

    Returns (path, client_state); (None, {}) where the directory holds none yet. At the layout that saved it,
    training continues with the same bits.
    load_optimizer_states     False: the weights alone; the counts of steps and the scheduler stay as they are
    load_lr_scheduler_states  False: the scheduler stays as it is
    load_module_only          the same as load_optimizer_states=False
    """
    if not load_module_strict:
        raise ConfigError("load_module_strict=False: a checkpoint loads only into the module that was "
                          "saved. Save with engine.save_safetensors, and load what fits into the module "
                          "before initialize.")
    world, with_optimizer = engine.world.world, load_optimizer_states and not load_module_only
    tag = None if tag is None else str(tag)
    foreign = on_one_rank(world, lambda: deepspeed_folder(load_dir, tag))
    if foreign is not None:
        return _load_foreign(engine, foreign, with_optimizer, load_lr_scheduler_states)

    def look() -> tuple[str, int, dict] | None:
        folder = folder_of(load_dir, last_tag(load_dir) if tag is None else tag)
        step = latest(folder)
        if step is None:
            if tag is not None:
                raise CheckpointError(f"there is no checkpoint with the tag {tag!r} in {load_dir}. Tags "
                                      f"there: {', '.join(_tags(Path(load_dir))) or 'none'}.")
            return None
        run = read_run(folder, step)
        _check(engine, folder, run, with_optimizer)
        known_tags.look(engine, Path(load_dir), folder_of(load_dir, last_tag(load_dir)))
        return str(folder), step, run

    found = on_one_rank(world, look)
    if found is None:
        return None, {}
    folder, step, run = found
    kinds = None if with_optimizer else ("weight", BUFFER)
    pieces = [*engine.optimizer.pieces(saved=run["optimizer"]), *_buffers(engine),
              *engine.step_state.pieces()]
    load(folder, step, pieces, coordinates=engine.world.coordinates, world=world, kinds=kinds)
    if with_optimizer:
        engine.optimizer.load_extra_state(run["optimizer"])
        engine.progress = progress_of(run)
        load_loop_state(engine, run.get("loop", {}), load_lr_scheduler_states)
    engine.optimizer.after_load()
    engine.discard_gradients()
    return os.path.join(folder, f"iter_{step:07d}"), run["client_state"]


def _load_foreign(engine: EngineStatus, path: Path, with_optimizer: bool, with_scheduler: bool
                  ) -> tuple[str, dict[str, Any]]:
    """`load_checkpoint` of a folder that DeepSpeed wrote."""
    raw = fill_from_deepspeed(engine, path, [*engine.optimizer.pieces(), *_buffers(engine)], with_optimizer)
    if with_optimizer:
        state = restore_counters(engine, raw)
        load_loop_state(engine, {"lr_scheduler": plain(state["lr_scheduler"])}, with_scheduler)
    engine.optimizer.after_load()
    engine.discard_gradients()
    return str(path), client_state(raw)


def _description(engine: EngineStatus) -> dict[str, Any]:
    specs, world = [p.spec for p in engine.module.parameters()], engine.world
    times = [world.expert_parts if "ep" in spec.distinct_over else 1 for spec in specs]
    return {"parameters": sum(times), "elements": sum(spec.numel * n for spec, n in zip(specs, times)),
            "optimizer": engine.optimizer.inner.kind}


def _check(engine: EngineStatus, folder: Path, run: Mapping[str, Any], with_optimizer: bool) -> None:
    """Raises CheckpointError for a checkpoint of another module, or with the state of another optimizer."""
    theirs, ours = run.get("engine"), _description(engine)
    if theirs is None:
        raise CheckpointError(f"{folder} was saved by a training script, not by an engine: its tensors have "
                              "other names. megatron-ds export extracts them.")
    require(run, folder, "engine.parameters", "engine.elements", "engine.optimizer", "progress", "optimizer",
            "client_state")
    if any(theirs[key] != ours[key] for key in ("parameters", "elements")):
        raise CheckpointError(
            f"{folder} is a checkpoint of another module: {theirs['parameters']} parameters with "
            f"{theirs['elements']} elements there, {ours['parameters']} with {ours['elements']} here.")
    if with_optimizer and theirs["optimizer"] != ours["optimizer"]:
        raise CheckpointError(f"{folder} has the state of the optimizer {theirs['optimizer']}, which "
                              f"{ours['optimizer']} cannot use. Load the weights alone, with "
                              "load_optimizer_states=False.")


def _check_may_save(engine: EngineStatus, directory: Path, folder: Path) -> None:
    """Raises CheckpointError when another program has saved there. folder: of the tag."""
    _check_vacant(folder)
    known_tags.check(engine, directory, folder_of(directory, last_tag(directory)))


def _check_vacant(folder: Path) -> None:
    """Raises CheckpointError for a training script's folder: its next start would load this checkpoint."""
    step = next(iter(reversed(steps_in(folder))), None)
    if step is not None and is_ours(folder / name_of(step)) and "engine" not in read_run(folder, step):
        raise CheckpointError(f"{folder} holds iteration {step} of a training script, and its next start "
                              "would load this engine's checkpoint instead. Give another folder, or a tag.")


def folder_of(directory: str | os.PathLike, tag: str | None) -> Path:
    """The folder with the checkpoint of a tag. Raises ConfigError for a tag that cannot name a folder."""
    if tag and (os.path.basename(tag) != tag or tag in (".", "..", LATEST)):
        raise ConfigError(f"tag {tag!r} is not the name of a folder in {directory}. Use letters, digits, - "
                          "and _.")
    return Path(directory) / tag if tag else Path(directory)


def last_tag(directory: str | os.PathLike) -> str | None:
    """The tag of the last checkpoint; None where it has none."""
    try:
        return read_regular(Path(directory) / LATEST).decode(errors="replace").strip() or None
    except FileNotFoundError:
        return None


def _tags(directory: Path) -> list[str]:
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted(path.name for path in found if path.is_dir() and steps_in(path))


def _buffers(engine: EngineStatus) -> list[ParameterPiece]:
    """Ranks that sum gradients have equal buffers: data-parallel ones, of experts the expert-data ones."""
    world = engine.world
    of_experts = set(global_names(engine.module, world).values())
    replica = lambda name: (world.expert if name in of_experts else world.data).rank
    return [ParameterPiece(ParamSpec(name, tuple(buffer.shape), NOT_DRAWN), buffer.detach().view(-1), BUFFER,
                           replica=replica(name))
            for name, buffer in saved_buffers(engine.module, world).items()]


def loop_state(engine: EngineStatus) -> dict[str, Any]:
    """The state of the loop as JSON. Raises ConfigError where the scheduler's state has no plain form."""
    changed = [{key: group[key] for key in group if key != "params" and group[key] != first.get(key)}
               for group, first in zip(engine.optimizer.param_groups, engine.configured_groups)]
    scheduler = engine.lr_scheduler.state_dict() if hasattr(engine.lr_scheduler, "state_dict") else None
    return {"micro_steps": engine.micro_steps, "param_groups": plain(changed),
            "lr_scheduler": plain(scheduler)}


def load_loop_state(engine: EngineStatus, state: Mapping[str, Any], with_scheduler: bool) -> None:
    """Restore a `loop_state`; without one, {}, the JSON's scheduler follows the progress."""
    engine.micro_steps = state.get("micro_steps", engine.global_steps * engine.gradient_accumulation_steps())
    if not with_scheduler:
        return
    groups, changed = engine.optimizer.param_groups, restored(state.get("param_groups") or [])
    for group, numbers in zip(groups, changed if len(changed) == len(groups) else ()):
        group.update(numbers)
    saved = restored(state.get("lr_scheduler"))
    if saved is None and isinstance(engine.lr_scheduler, JsonScheduler):
        saved = {"last_batch_iteration": engine.global_steps - engine.skipped_steps - 1}
    if saved is not None and hasattr(engine.lr_scheduler, "load_state_dict"):
        engine.lr_scheduler.load_state_dict(saved)


def plain(value: Any) -> Any:
    """`value` as JSON. Raises ConfigError where it has no plain form (a function, an object)."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, float):
        return {"float": str(value)}
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return plain(value.item())
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [plain(item) for item in value]}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[plain(key), plain(item)] for key, item in value.items()]}
    raise ConfigError("a checkpoint holds plain values only, but the state to be saved has a "
                      f"{type(value).__name__}. Leave it out of state_dict().")


def restored(value: Any) -> Any:
    """The value from which `plain` made `value`."""
    if isinstance(value, list):
        return [restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "float":
        return float(content)
    if kind == "tuple":
        return tuple(restored(item) for item in content)
    made = {restored(key): restored(item) for key, item in content}
    return Counter(made) if kind == "counter" else made
