"""An engine on disk: the checkpoints of this package (docs/checkpoints.md), with the user's `client_state` beside.

    dir/iter_0000010/, dir/latest_checkpointed_iteration.txt     saved without a tag
    dir/TAG/iter_0000010/, …                                     saved with one: a folder of its own, with one checkpoint
    dir/latest                                                   the tag that was saved last, if tags were ever used
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..checkpoint.folder import is_ours, name_of, read_regular, steps_in, write_durably
from ..checkpoint.load import latest, load, read_run
from ..checkpoint.pieces import ParameterPiece
from ..checkpoint.run_file import progress_of, require
from ..checkpoint.save import save
from ..errors import CheckpointError, ConfigError
from ..mpu.agree import on_one_rank
from ..mpu.param_spec import ParamSpec
from .loop_state import load_loop_state, loop_state
from .module_specs import NOT_DRAWN, global_names
from .module_values import saved_buffers

if TYPE_CHECKING:
    from .engine import Engine

LATEST = "latest"
BUFFER = "buffer"           # the kind of a piece


def save_checkpoint(engine: "Engine", directory: str | os.PathLike, tag: str | None, client_state: Mapping[str, Any]) -> Path:
    """See `Engine.save_checkpoint`."""
    if engine.has_gradients:
        raise ConfigError("a checkpoint holds no gradients, and this step has some that would be lost. Save at a boundary of "
                          "accumulation, right after engine.step().")
    folder, tagged = folder_of(directory, tag), tag is not None
    on_one_rank(engine.world.world, lambda: _check_vacant(folder))
    buffers = [buffer for buffer in _buffers(engine) if buffer.replica == 0]
    run = {"version": __version__, "engine": _description(engine), "progress": engine.progress.to_dict(),
           "optimizer": engine.optimizer.extra_state(), "loop": loop_state(engine), "client_state": dict(client_state)}
    path = save(folder, engine.global_steps, [*engine.optimizer.pieces(), *buffers], coordinates=engine.world.coordinates,
                world=engine.world.world, run=run, limit=1 if tagged else None)

    def point() -> None:
        if tagged or (Path(directory) / LATEST).exists():
            write_durably(Path(directory) / LATEST, tag or "")

    on_one_rank(engine.world.world, point)
    return path


def load_checkpoint(engine: "Engine", directory: str | os.PathLike, tag: str | None,
                    load_optimizer_states: bool, load_scheduler: bool = True) -> tuple[str | None, dict[str, Any]]:
    """See `Engine.load_checkpoint`."""
    world = engine.world.world

    def look() -> tuple[str, int, dict] | None:
        folder = folder_of(directory, last_tag(directory) if tag is None else tag)
        step = latest(folder)
        if step is None:
            if tag is not None:
                raise CheckpointError(f"there is no checkpoint with the tag {tag!r} in {directory}; there are "
                                      f"{', '.join(_tags(Path(directory))) or 'no tags'}.")
            return None
        run = read_run(folder, step)
        _check(engine, folder, run, load_optimizer_states)
        return str(folder), step, run

    found = on_one_rank(world, look)
    if found is None:
        return None, {}
    folder, step, run = found
    kinds = None if load_optimizer_states else ("weight", BUFFER)
    load(folder, step, [*engine.optimizer.pieces(), *_buffers(engine)], coordinates=engine.world.coordinates,
         world=world, kinds=kinds)
    if load_optimizer_states:
        engine.optimizer.load_extra_state(run["optimizer"])
        engine.progress = progress_of(run)
        load_loop_state(engine, run.get("loop", {}), load_scheduler)
    engine.optimizer.after_load()
    engine.zero_grad()
    return os.path.join(folder, f"iter_{step:07d}"), run["client_state"]


def _description(engine: "Engine") -> dict[str, Any]:
    specs, world = [p.spec for p in engine.module.parameters()], engine.world
    times = [world.expert_parts if "ep" in spec.distinct_over else 1 for spec in specs]
    return {"parameters": sum(times), "elements": sum(spec.numel * n for spec, n in zip(specs, times)),
            "optimizer": engine.optimizer.inner.kind}


def _check(engine: "Engine", folder: Path, run: Mapping[str, Any], with_optimizer: bool) -> None:
    """Raises CheckpointError where the checkpoint is of another module, or has the state of another optimizer."""
    theirs, ours = run.get("engine"), _description(engine)
    if theirs is None:
        raise CheckpointError(f"{folder} was saved by a training script, not by an engine: its tensors have other names. "
                              "tools/checkpoint_to_safetensors.py takes them out of it.")
    require(run, folder, "engine.parameters", "engine.elements", "engine.optimizer", "progress", "optimizer", "client_state")
    if any(theirs[key] != ours[key] for key in ("parameters", "elements")):
        raise CheckpointError(f"{folder} is of another module: {theirs['parameters']} parameters with {theirs['elements']} "
                              f"elements there, {ours['parameters']} with {ours['elements']} here.")
    if with_optimizer and theirs["optimizer"] != ours["optimizer"]:
        raise CheckpointError(f"{folder} has the state of the optimizer {theirs['optimizer']}, which is of no use to "
                              f"{ours['optimizer']}. Load the weights alone, with load_optimizer_states=False.")


def _check_vacant(folder: Path) -> None:
    """Raises CheckpointError where the folder holds the run of a training script, whose next start would load this save."""
    step = next(iter(reversed(steps_in(folder))), None)
    if step is not None and is_ours(folder / name_of(step)) and "engine" not in read_run(folder, step):
        raise CheckpointError(f"{folder} holds iteration {step} of a training script, and its next start would load this "
                              "engine's checkpoint instead. Give another folder, or a tag.")


def folder_of(directory: str | os.PathLike, tag: str | None) -> Path:
    """Where checkpoints of a tag lie. Raises ConfigError for a tag that is not the name of a folder."""
    if tag and (os.path.basename(tag) != tag or tag in (".", "..", LATEST)):
        raise ConfigError(f"tag {tag!r} is not the name of a folder in {directory}. Use letters, digits, - and _.")
    return Path(directory) / tag if tag else Path(directory)


def last_tag(directory: str | os.PathLike) -> str | None:
    """The tag that was saved last; None where the last checkpoint has none."""
    try:
        return read_regular(Path(directory) / LATEST).decode(errors="replace").strip() or None
    except FileNotFoundError:
        return None


def _tags(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir() and steps_in(path)) if directory.is_dir() else []


def _buffers(engine: "Engine") -> list[ParameterPiece]:
    """Ranks of one copy of the model have equal buffers: `save` chooses one of them."""
    world = engine.world
    named = set(global_names(engine.module, world).values())
    replica = lambda name: (world.expert if name in named else world.data).rank
    return [ParameterPiece(ParamSpec(name, tuple(buffer.shape), NOT_DRAWN), buffer.detach().view(-1), BUFFER,
                           replica=replica(name))
            for name, buffer in saved_buffers(engine.module, world).items()]
