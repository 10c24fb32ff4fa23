"""`engine.load_checkpoint` of a folder that DeepSpeed wrote: the same module continues here.

Any ZeRO stage and number of ranks, there and here, and universal folders. Names are those of the module, so
no table is needed. What continues: weights (the fp32 masters), optimizer state, buffers, counters, loss
scale, the scheduler's state, client_state.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ...checkpoint.folder import read_regular, steps_in
from ...checkpoint.pieces import WEIGHT, Piece
from ...errors import CheckpointError
from ...mpu.agree import on_all_ranks
from ...mpu.collectives import all_gather_object
from ...mpu.managed_parameter import spec_of
from ...progress.ramps import Progress
from ..conversion.deepspeed.checkpoint import (
    BUFFER,
    read_engine_folder,
    without_state,
)
from ..conversion.deepspeed.folder import LATEST, is_engine_folder, tag_folder
from ..conversion.deepspeed.universal_folder import POINTER, ZERO, read_universal
from ..conversion.files.stored_tensor import RawCheckpoint, Tensors
from ..conversion.filling import fill, plan_filling
from .checkpoint_places import step_in_directory
from .status import EngineStatus


def deepspeed_folder(load_dir: str | os.PathLike, tag: str | None) -> Path | None:
    """Return the folder of the checkpoint of a tag, or of the last one, if DeepSpeed wrote it; else None.

    An engine here may save beside the folders of DeepSpeed, or into one of them. `latest`, which both write,
    names the last checkpoint; an empty one means the steps in `load_dir` itself. A folder that has steps of
    this package is not DeepSpeed's. Raises CheckpointError if a pointer names no folder.
    """
    folder = Path(load_dir)
    if tag is not None:
        return (
            folder / tag
            if is_engine_folder(folder / tag) and not steps_in(folder / tag)
            else None
        )
    pointer = LATEST if (folder / LATEST).is_file() else POINTER
    if not (folder / pointer).is_file() or pointer == POINTER and steps_in(folder):
        return None
    name = read_regular(folder / pointer).decode(errors="replace").strip()
    if not name or os.path.basename(name) == name and steps_in(folder / name):
        return None
    if step_in_directory(folder, name) is not None and not (folder / name).exists():
        return None
    return (
        tag_folder(folder, None, pointer)
        if any(map(is_engine_folder, folder.iterdir()))
        else None
    )


def fill_from_deepspeed(
    engine: EngineStatus, path: Path, pieces: list[Piece], with_optimizer: bool
) -> RawCheckpoint:
    """Fill the pieces of this rank. Collective. Raises the same CheckpointError on all ranks.

    Nothing has been changed when tensors are missing or of another shape.
    """
    # With experts the checkpoint has the parameters of all ranks.
    world = engine.world.world
    plans = []
    here = {spec_of(p).name for p in engine.module.parameters()}
    names = (
        here.union(*all_gather_object(here, world))
        if engine.world.expert_parts > 1
        else here
    )

    # Files are checked on every rank before a piece is filled.
    def plan() -> None:
        universal = (path / ZERO).is_dir()
        raw = (
            read_universal(path, not with_optimizer)
            if universal
            else read_engine_folder(path, not with_optimizer)
        )
        raw = raw if with_optimizer else without_state(raw)
        tensors = with_aliases(raw)
        _check(names, pieces, tensors, with_optimizer)
        plans.append(
            (
                raw,
                plan_filling(
                    pieces, tensors, None if with_optimizer else (WEIGHT, BUFFER)
                ),
            )
        )

    # Both phases end with the same error on all ranks.
    together = partial(
        on_all_ranks,
        world,
        doing=f"cannot load {path}, which DeepSpeed saved",
        kind=CheckpointError,
    )
    together(plan)
    raw, filling = plans[0]
    together(lambda: fill(filling, engine.world.coordinates))
    return raw


def with_aliases(raw: RawCheckpoint) -> Tensors:
    """Return the tensors, with a shared parameter under each of its names."""
    shared = raw.settings["shared"]
    return {
        kind: {
            **named,
            **{
                alias: named[source]
                for alias, source in shared.items()
                if source in named
            },
        }
        for kind, named in raw.tensors.items()
    }


def _check(
    names: set[str], pieces: list[Piece], tensors: Tensors, with_optimizer: bool
) -> None:
    """Raises CheckpointError for parameters that the module lacks, or the state of another optimizer.

    names: of the module's parameters, with the experts of all ranks
    """
    used = {id(tensor) for name, tensor in tensors[WEIGHT].items() if name in names}
    if odd := sorted(
        name for name, tensor in tensors[WEIGHT].items() if id(tensor) not in used
    ):
        raise CheckpointError(
            f"it has {len(odd)} parameters that the module lacks, first {odd[0]}. Load it "
            "with the module that was trained."
        )
    here = {piece.kind for piece in pieces} - {WEIGHT, BUFFER}
    there = tensors.keys() - {WEIGHT, BUFFER}
    if with_optimizer and not here <= there:
        raise CheckpointError(
            f"its optimizer state is {', '.join(sorted(there)) or 'empty'}, and the "
            f"optimizer here needs {', '.join(sorted(here))}. Load the weights alone, with "
            "load_optimizer_states=False."
        )


def restore_counters(engine: EngineStatus, raw: RawCheckpoint) -> Mapping[str, Any]:
    """Set the counters, loss scale and progress of the engine. Returns state for `load_loop_state`."""
    progress = raw.progress
    steps = progress.iteration or 0
    samples = progress.samples or 0
    skipped = progress.skipped_steps or 0
    updates = (
        progress.num_updates if progress.num_updates is not None else steps - skipped
    )
    engine.optimizer.load_extra_state({"num_updates": updates, **progress.scaler})
    engine.progress = replace(
        Progress(),
        step=steps,
        samples=samples,
        scheduled_samples=samples,
        skipped_steps=min(skipped, steps),
    )
    return {"lr_scheduler": raw.settings.get("lr_scheduler")}


def client_state(raw: RawCheckpoint) -> dict[str, Any]:
    """Return what the program gave to DeepSpeed's save_checkpoint, as plain values."""
    args = raw.settings.get("args")
    return {**raw.settings["client_state"], **({"args": args} if args else {})}
