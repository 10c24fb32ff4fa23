"""Checkpoints of an engine: those of this package (docs/scale/checkpoints.md), with `client_state`.

checkpoint_places.py shows the folders. They also hold the state of the loop: micro-steps, the scheduler's
state, and the numbers of parameter groups that a scheduler or the program has changed (`engine.set_lr`). The
other numbers follow the config of the run that loads, so that a changed "lr" in the JSON takes effect. This
state and the program's are saved as JSON (stored_values.py).
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import __version__
from ...checkpoint.folder import write_durably
from ...checkpoint.load import load, read_run
from ...checkpoint.pieces import Piece
from ...checkpoint.run_file import progress_of, require
from ...checkpoint.save import save
from ...checkpoint.whole_tensors import StoredTensors
from ...errors import CheckpointError, ConfigError
from ...mpu.agree import on_all_ranks, on_one_rank
from ...mpu.managed_parameter import spec_of
from ...mpu.param_spec import ParamSpec
from ...mpu.parameter_piece import ParameterPiece
from . import known_tags
from .agreed_tag import agreed_tag
from .checkpoint_places import (
    LATEST,
    check_vacant,
    default_tag,
    folder_of,
    last_folder,
    place_of,
)
from .data_efficiency import data_efficiency_state, load_data_efficiency_state
from .deepspeed_loading import client_state as client_state_of
from .deepspeed_loading import deepspeed_folder, fill_from_deepspeed, restore_counters
from .module_specs import NOT_DRAWN, global_names, name_of
from .module_values import saved_buffers
from .optimizer import JsonScheduler
from .status import EngineStatus
from .stored_values import plain, restored

# kinds of pieces
WEIGHT = "weight"
BUFFER = "buffer"
CLIENT = "client_state"
TYPED = "typed_client_state"
CustomLoad = Callable[..., Any]  # custom_load_fn(src=state_dict, dst=module)
logger = logging.getLogger(__name__)


def save_checkpoint(
    engine: EngineStatus,
    save_dir: str | os.PathLike,
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> Path:
    """Save weights, optimizer, scheduler, loss scale and progress; returns the path. Collective.

    tag           name of a folder for it; None: global_step and the number of steps, in `save_dir` itself
    client_state  what `load_checkpoint` returns: values of the types of `stored_values`; those of rank 0
    save_latest   `load_checkpoint` without a tag takes this checkpoint
    exclude_frozen_parameters  leave out parameters that are not trained
    Raises ConfigError, before anything is written, with the key of a value that cannot be saved, or if ranks
    give different tags (agreed_tag.py).
    """
    _check_can_save(engine, save_dir)
    # The place. Without a tag and without `latest` it must not be the last one in `save_dir`.
    world = engine.world.world
    tag = agreed_tag(tag, engine.config, world)
    name = default_tag(engine.global_steps) if tag is None else str(tag)
    folder = folder_of(save_dir, None if tag is None and save_latest else name)

    def begin() -> dict[str, Any]:
        check_vacant(folder)
        known_tags.check(engine, Path(save_dir), last_folder(save_dir))
        return _client_values(client_state or {})

    # What is saved: pieces, and values in run.json.
    client = on_one_rank(world, begin)
    frozen = {
        spec_of(p).name for p in engine.module.parameters() if not p.requires_grad
    }
    left_out = sorted(frozen) if exclude_frozen_parameters else []
    path = save(
        folder,
        engine.global_steps,
        _saved_pieces(engine, left_out),
        run=_run_values(engine, left_out) | client,
        coordinates=engine.world.coordinates,
        world=world,
        limit=None if folder == Path(save_dir) else 1,
    )

    # `latest` names the tag only after the checkpoint is complete. Empty where DeepSpeed's folder has the
    # name.
    def point() -> None:
        is_taken = tag is None and (Path(save_dir) / name).exists()
        write_durably(Path(save_dir) / LATEST, "" if is_taken else name)
        known_tags.wrote(engine, Path(save_dir), folder, engine.global_steps)

    if save_latest:
        on_one_rank(world, point)
    return path


def _check_can_save(engine: EngineStatus, save_dir: str | os.PathLike) -> None:
    """Raises ConfigError in the middle of an update, or without a folder."""
    if engine.has_gradients:
        raise ConfigError(
            "a checkpoint holds no gradients, and those of the current update would be lost. "
            "Save at a boundary of accumulation, right after engine.step()."
        )
    if not save_dir:
        raise ConfigError(
            f"save_checkpoint(save_dir={save_dir!r}): a checkpoint needs a folder of its own. "
            "Give its path."
        )


def _saved_pieces(engine: EngineStatus, left_out: Sequence[str]) -> list[Piece]:
    """Return the optimizer's pieces, buffers, and what routers remember. left_out: names of parameters"""
    pieces = [
        piece
        for piece in engine.optimizer.pieces(saving=True)
        if piece.spec.name not in left_out
    ]
    buffers = [buffer for buffer in _buffers(engine) if buffer.replica == 0]
    return [*pieces, *buffers, *engine.step_state.pieces()]


def _run_values(engine: EngineStatus, left_out: Sequence[str]) -> dict[str, Any]:
    """Return what run.json has, but for the program's values."""
    names = {"left_out": left_out, "shared": _other_names(engine)}
    return {
        "version": __version__,
        "engine": _description(engine) | names,
        "progress": engine.progress.to_dict(),
        "optimizer": engine.optimizer.extra_state(),
        "loop": loop_state(engine),
    }


def load_checkpoint(
    engine: EngineStatus,
    load_dir: str | os.PathLike,
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: CustomLoad | None = None,
) -> tuple[str | None, dict[str, Any] | None]:
    """Load a checkpoint saved at any stage on any number of ranks, also by DeepSpeed. Collective.

    Returns (path, client_state); (None, None), as DeepSpeed, where the directory holds none yet. At the
    layout that saved it, training continues with the same bits.
    load_module_strict        False: what the checkpoint lacks stays as it is, and what it has besides is left
    load_optimizer_states     False: the weights alone; the counts of steps and the scheduler stay as they are
    load_lr_scheduler_states  False: the scheduler stays as it is
    load_module_only          the same as load_optimizer_states=False
    custom_load_fn            called on every rank as custom_load_fn(src=state_dict, dst=module) in place of
                              loading weights and buffers; rank 0's values count. It takes the memory of the
                              whole module
    """
    world = engine.world.world
    with_optimizer = load_optimizer_states and not load_module_only
    _check_loader(engine, custom_load_fn)
    # A folder of DeepSpeed.
    tag = None if tag is None else str(tag)
    foreign = on_one_rank(world, lambda: deepspeed_folder(load_dir, tag))
    if foreign is not None:
        _check_foreign(foreign, load_module_strict, custom_load_fn)
        return _load_foreign(engine, foreign, with_optimizer, load_lr_scheduler_states)
    # A checkpoint of this package, or none.
    is_whole = load_module_strict and custom_load_fn is None
    found = on_one_rank(
        world, lambda: _found(engine, load_dir, tag, with_optimizer, is_whole)
    )
    if found is None:
        return None, None
    folder, step, run = found
    client = run[CLIENT] | restored(run.get(TYPED, {"dict": []}))
    # The pieces that are filled, all or those that the checkpoint has. Parameters that are frozen here may have
    # been trained later.
    if with_optimizer:
        engine.changes.train_named(run.get("loop", {}).get("trained_later", []))
    pieces = _loaded_pieces(engine, run, without_weights=custom_load_fn is not None)
    if not is_whole:
        pieces = _present(engine, pieces, folder, step)
    load(
        folder,
        step,
        pieces,
        coordinates=engine.world.coordinates,
        world=world,
        kinds=None if with_optimizer else {WEIGHT, BUFFER},
    )
    # What is no tensor, and what the program loads by itself.
    if with_optimizer:
        _restore_progress(engine, run, load_lr_scheduler_states)
    engine.optimizer.after_load()
    engine.discard_gradients()
    if custom_load_fn is not None:
        _load_by(engine, custom_load_fn, folder, step)
    return os.path.join(folder, f"iter_{step:07d}"), client


def _check_loader(engine: EngineStatus, custom_load_fn: CustomLoad | None) -> None:
    """Raises ConfigError for a program's own function where the ranks hold different tensors."""
    if custom_load_fn is not None and (
        engine.world.expert_parts > 1 or engine.world.model.size > 1
    ):
        raise ConfigError(
            "custom_load_fn gets whole tensors, but this engine's ranks hold different experts "
            "or parts of tensors. Leave it out."
        )


def _found(
    engine: EngineStatus,
    load_dir: str | os.PathLike,
    tag: str | None,
    with_optimizer: bool,
    is_whole: bool,
) -> tuple[Path, int, dict] | None:
    """(folder, step, values of run.json) of the checkpoint to load, which is checked; None if there is none."""
    folder, step = place_of(load_dir, tag)
    if step is None:
        return None
    run = read_run(folder, step)
    _check(engine, folder, run, with_optimizer, is_whole)
    known_tags.look(engine, Path(load_dir), last_folder(load_dir))
    return folder, step, run


def _loaded_pieces(
    engine: EngineStatus, run: Mapping[str, Any], without_weights: bool
) -> list[Piece]:
    """Return the pieces of this engine that a checkpoint with the values `run` fills. without_weights: nor buffers"""
    state = engine.optimizer.pieces(saved=run["optimizer"])
    pieces = [*state, *_buffers(engine), *engine.step_state.pieces()]
    if without_weights:
        return [piece for piece in pieces if piece.kind not in (WEIGHT, BUFFER)]
    return pieces


def _restore_progress(
    engine: EngineStatus, run: Mapping[str, Any], with_scheduler: bool
) -> None:
    """Restore what is no tensor: the optimizer's numbers, the progress and the state of the loop."""
    engine.optimizer.load_extra_state(run["optimizer"])
    engine.progress = progress_of(run)
    load_loop_state(engine, run.get("loop", {}), with_scheduler)


def _client_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the program's state in run.json: as it is where JSON has the same values, else with their types."""
    typed = plain(dict(state), CLIENT)
    if all(type(key) is str and _is_json(value) for key, value in state.items()):
        return {CLIENT: dict(state)}
    return {CLIENT: {}, TYPED: typed}


def _is_json(value: Any) -> bool:
    """Return whether JSON gives back a value that `plain` accepts."""
    if type(value) is dict:
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    return all(map(_is_json, value)) if type(value) is list else plain(value) is value


def _present(
    engine: EngineStatus, pieces: list[Piece], folder: Path, step: int
) -> list[Piece]:
    """Return the pieces whose tensors the checkpoint has. Collective; rank 0 reports the others."""

    def names() -> set[str]:
        stored = StoredTensors(
            folder, step, (WEIGHT, BUFFER, *{piece.kind for piece in pieces})
        )
        return {f"{kind}/{name}" for kind, name in stored.keys()}

    there = on_one_rank(engine.world.world, names)
    parameters = {spec_of(p).name for p in engine.module.parameters()}
    missing = sorted(name for name in parameters if f"{WEIGHT}/{name}" not in there)
    if missing and engine.world.rank == 0:
        logger.warning(
            "the checkpoint in %s lacks %d parameters of this engine, first %s: they stay as they "
            "are",
            folder,
            len(missing),
            missing[0],
        )
    return [piece for piece in pieces if f"{piece.kind}/{piece.spec.name}" in there]


def _load_by(
    engine: EngineStatus, custom_load_fn: CustomLoad, folder: Path, step: int
) -> None:
    """Call the program's function with the saved weights and buffers. Collective."""
    world = engine.world.world
    state = on_all_ranks(world, lambda: _state_dict_of(engine, folder, step))
    with engine.gathered_parameters(modifier_rank=0):
        on_all_ranks(
            world,
            lambda: custom_load_fn(src=state, dst=engine.module),
            doing="custom_load_fn",
        )


def _state_dict_of(
    engine: EngineStatus, folder: Path, step: int
) -> dict[str, torch.Tensor]:
    """Return the saved weights, in the formats of the module's, and buffers, under all names of the module."""
    stored = StoredTensors(folder, step, (WEIGHT, BUFFER))
    dtypes = {spec_of(p).name: p.dtype for p in engine.module.parameters()}
    state = {
        entry.name: tensor.to(dtypes.get(entry.name, tensor.dtype))
        for entry, tensor in zip(stored.entries, stored.read_all(stored.entries))
    }
    # The module's own names: of tied parameters all, of a compiled module those with its prefix.
    for name, value in engine.module.state_dict(keep_vars=True).items():
        saved = (
            spec_of(value).name if isinstance(value, nn.Parameter) else name_of(name)
        )
        if saved in state:
            state[name] = state[saved]
    own = {
        name_of(name)
        for name in engine.module.state_dict(keep_vars=True)
        if name_of(name) != name
    }
    return {name: tensor for name, tensor in state.items() if name not in own}


def _check_foreign(
    folder: Path, strict: bool, custom_load_fn: CustomLoad | None
) -> None:
    if not strict or custom_load_fn is not None:
        raise ConfigError(
            f"{folder} was saved by DeepSpeed, and such a checkpoint loads whole only: "
            "load_module_strict=False and custom_load_fn= are for checkpoints of this package. "
            "Load it without them, then save it here."
        )


def _load_foreign(
    engine: EngineStatus, path: Path, with_optimizer: bool, with_scheduler: bool
) -> tuple[str, dict[str, Any]]:
    """`load_checkpoint` of a folder that DeepSpeed wrote."""
    raw = fill_from_deepspeed(
        engine, path, [*engine.optimizer.pieces(), *_buffers(engine)], with_optimizer
    )
    if with_optimizer:
        state = restore_counters(engine, raw)
        load_loop_state(
            engine, {"lr_scheduler": plain(state["lr_scheduler"])}, with_scheduler
        )
    engine.optimizer.after_load()
    engine.discard_gradients()
    return str(path), client_state_of(raw)


def _description(engine: EngineStatus) -> dict[str, Any]:
    specs = [spec_of(p) for p in engine.module.parameters()]
    world = engine.world
    times = [world.expert_parts if "ep" in spec.distinct_over else 1 for spec in specs]
    return {
        "parameters": sum(times),
        "elements": sum(spec.numel * n for spec, n in zip(specs, times)),
        "optimizer": engine.optimizer.inner.kind,
    }


def _other_names(engine: EngineStatus) -> dict[str, str]:
    """Further name of a tied parameter → the name under which it is saved."""
    first: dict[int, str] = {}
    found = {}
    for name, p in engine.module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(p), name) != name:
            found[name_of(name)] = spec_of(p).name
    return found


def _check(
    engine: EngineStatus,
    folder: Path,
    run: Mapping[str, Any],
    with_optimizer: bool,
    strict: bool,
) -> None:
    """Raises CheckpointError for a checkpoint of another module, or with the state of another optimizer.

    strict: all parameters of the module must be there
    """
    # The folder was saved by an engine, and its description is complete.
    theirs = run.get("engine")
    ours = _description(engine)
    if theirs is None:
        raise CheckpointError(
            f"{folder} was saved by a training script, not by an engine: its tensors have "
            "other names. megatron-ds export extracts them."
        )
    require(
        run,
        folder,
        "engine.parameters",
        "engine.elements",
        "engine.optimizer",
        "progress",
        "optimizer",
        "client_state",
    )
    # The same module.
    if strict and (left_out := theirs.get("left_out")):
        raise CheckpointError(
            f"{folder} lacks {len(left_out)} parameters, first {left_out[0]}: it was saved "
            "with exclude_frozen_parameters=True. Load it with load_module_strict=False; "
            "they then keep the values that the module has."
        )
    if strict and any(theirs[key] != ours[key] for key in ("parameters", "elements")):
        raise CheckpointError(
            f"{folder} is a checkpoint of another module: {theirs['parameters']} parameters with "
            f"{theirs['elements']} elements there, {ours['parameters']} with {ours['elements']} here. To "
            "load what fits, give load_module_strict=False."
        )
    # The same optimizer.
    if with_optimizer and theirs["optimizer"] != ours["optimizer"]:
        raise CheckpointError(
            f"{folder} has the state of the optimizer {theirs['optimizer']}, which "
            f"{ours['optimizer']} cannot use. Load the weights alone, with "
            "load_optimizer_states=False."
        )


def _buffers(engine: EngineStatus) -> list[ParameterPiece]:
    """Ranks that sum gradients have equal buffers: data-parallel ones, of experts the expert-data ones."""
    world = engine.world
    of_experts = set(global_names(engine.module, world).values())
    replica = lambda name: (world.of_experts if name in of_experts else world.data).rank
    return [
        ParameterPiece(
            ParamSpec(name, tuple(buffer.shape), NOT_DRAWN),
            buffer.detach().view(-1),
            BUFFER,
            replica=replica(name),
        )
        for name, buffer in saved_buffers(engine.module, world).items()
    ]


def loop_state(engine: EngineStatus) -> dict[str, Any]:
    """Return the state of the loop as JSON. Raises ConfigError where the scheduler's state has no plain form."""
    changed = [
        {
            key: _number(group[key])
            for key in group
            if key != "params" and group[key] != first.get(key)
        }
        for group, first in zip(engine.optimizer.param_groups, engine.configured_groups)
    ]
    scheduler: Any = engine.lr_scheduler
    stored = scheduler.state_dict() if hasattr(scheduler, "state_dict") else None
    return {
        "micro_steps": engine.micro_steps,
        "param_groups": plain(changed, "param_groups"),
        "lr_scheduler": plain(stored, "the state_dict() of lr_scheduler"),
        "data_efficiency": data_efficiency_state(engine),
        "missed_updates": dict(engine.optimizer.missed),
        "trained_later": list(engine.changes.late),
    }


def _number(value: Any) -> Any:
    """Return a learning rate that is a tensor as a number."""
    return (
        value.item()
        if isinstance(value, torch.Tensor) and value.numel() == 1
        else value
    )


def load_loop_state(
    engine: EngineStatus, state: Mapping[str, Any], with_scheduler: bool
) -> None:
    """Restore a `loop_state`; without one, {}, the JSON's scheduler follows the progress."""
    engine.micro_steps = state.get(
        "micro_steps", engine.global_steps * engine.gradient_accumulation_steps()
    )
    load_data_efficiency_state(engine, state.get("data_efficiency", {}))
    if not with_scheduler:
        return
    engine.optimizer.restore_steps(state.get("missed_updates", {}))
    groups = engine.optimizer.param_groups
    changed = restored(state.get("param_groups") or [])
    for group, numbers in zip(groups, changed if len(changed) == len(groups) else ()):
        group.update(numbers)
    saved = restored(state.get("lr_scheduler"))
    if saved is None and isinstance(engine.lr_scheduler, JsonScheduler):
        saved = {"last_batch_iteration": engine.global_steps - engine.skipped_steps - 1}
    scheduler: Any = engine.lr_scheduler
    if saved is not None and hasattr(scheduler, "load_state_dict"):
        scheduler.load_state_dict(saved)
