"""`LayerRecord`: work and memory of one layer of each sort, from which stages of any size are added up.

Stages of a layout differ in how many layers of each sort they hold. So one layer of a sort is built and run, as a
plan runs stages: what is in front of the blocks as a first stage, each sort of block as one in the middle, and what is
behind the blocks, with the loss, as a last stage. Layouts that differ in their pipelines and in ZeRO share the records.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...config import RunConfig
from ...config.run import sections
from ...models import Layer, build_stage
from ...mpu.fake_group import fake_mesh
from ...mpu.managed_parameter import spec_of
from ...mpu.param_spec import EXPERT_DATA_AXES
from ...ops.work import CallWork, Product
from ...pipeline.instruction import Op
from ...planning.fake_stages import StageRunner, without_memory
from ...planning.run_model import describe_layers
from ...planning.run_plan import PipelineShape, plan_run
from ...version import __version__
from .recorded_work import (
    Allocated,
    Awaited,
    Begun,
    Call,
    Event,
    StageWork,
    WorkRecorder,
)

FRONT = "in front of the blocks"
BEHIND = "behind the blocks"
THREE_STAGES = 3


@dataclass(frozen=True)
class LayerRecord:
    """One layer, or the layers in front of or behind the blocks.

    parameters  elements of this rank; of_experts: those of experts among them
    kept        bytes of activations that a micro-batch keeps
    at_work     bytes that the layer needs besides while it runs
    """

    work: StageWork
    parameters: int
    of_experts: int
    kept: int
    at_work: int


Records = Mapping[str, LayerRecord]
"""Sort of layer, `FRONT` or `BEHIND` → its record"""


def record_layers(config: RunConfig, device: str) -> dict[str, LayerRecord]:
    """Return the records of a configuration without pipeline. device: planned, "cpu" or "cuda"."""
    mesh = fake_mesh(config.grid(), 0)
    # A layer is the first, one in the middle, or the last of three stages.
    plan = replace(
        plan_run(config, describe_layers(config, mesh)),
        shape=PipelineShape("1f1b", THREE_STAGES, 1),
    )
    with without_memory(device, config.train.kernels) as where:
        runner = StageRunner(
            config, mesh, plan, where, frozenset(), recorder=WorkRecorder
        )
        groups = groups_of(runner.layers)
        return {
            sort: _record(runner, number, layers)
            for sort, (number, layers) in groups.items()
        }


def groups_of(layers: Sequence[Layer]) -> dict[str, tuple[int, list[Layer]]]:
    """Return sort → (stage of three, its layers): one block of each sort, and what is in front and behind."""
    blocks = [at for at, layer in enumerate(layers) if layer.is_block]
    first = blocks[0]
    last = blocks[-1]
    found = {FRONT: (0, [*layers[:first]])}
    for layer in layers[first : last + 1]:
        found.setdefault(layer.sort, (1, [layer]))
    found[BEHIND] = THREE_STAGES - 1, [*layers[last + 1 :]]
    return found


def _record(runner: StageRunner, number: int, layers: Sequence[Layer]) -> LayerRecord:
    modules = build_stage(layers)
    run = runner.run_stage(number, layers, modules)
    parameters = list(dict.fromkeys(modules.parameters()))
    experts = [p for p in parameters if spec_of(p).reduced_over == EXPERT_DATA_AXES]
    return LayerRecord(
        run.work,
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in experts),
        run.kept,
        run.at_work,
    )


# ---- On disk.


class RecordCache:
    """Records, and numbers of plans, in files, a file for each key. folder: None for the user's cache."""

    def __init__(self, folder: Path | None = None):
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder = folder or home / "megatron_ds" / "plan_time"

    def find(self, key: str) -> dict[str, LayerRecord] | None:
        """Return the records of a key; None if there are none, or none that can be read."""
        try:
            values = self.read(key) or {}
            found = {sort: _record_of(value) for sort, value in values.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        return found or None

    def keep(self, key: str, records: Records) -> None:
        """Write records, as `write` does."""
        self.write(key, {sort: _values_of(record) for sort, record in records.items()})

    def read(self, key: str) -> Any:
        """Return the values of a file; None if there is none, or none of JSON."""
        try:
            return json.loads((self.folder / f"{key}.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None

    def write(self, key: str, values: Any) -> None:
        """Write values as JSON; a folder that cannot be written is left out."""
        text = json.dumps(values)
        path = self.folder / f"{key}.json"
        beside = path.with_name(f"{key}.{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            beside.write_text(text, encoding="utf-8")
            beside.replace(path)
        except OSError:
            return


# Sections of which neither the work of a layer nor a plan depends.
_LEFT_OUT = frozenset({"checkpoint", "logging"})


def key_of(config: RunConfig, *more: Any) -> str:
    """Return a name for what was found of a configuration: it changes with whatever may change that.

    more: the planned device, and other values on which it depends
    """
    settings = {
        name: asdict(config.section(name))
        for name in sections()
        if name not in _LEFT_OUT
    }
    versions = __version__, torch.__version__
    text = json.dumps(
        [versions, config.world_size, settings, more], sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _values_of(record: LayerRecord) -> dict[str, Any]:
    phases = {
        op.value: [_event_values(event) for event in events]
        for op, events in record.work.phases.items()
    }
    rest = {name: getattr(record, name) for name in _NUMBERS}
    return {"phases": phases, **rest}


_NUMBERS = ("parameters", "of_experts", "kept", "at_work")
_KINDS = {
    "computed": Call,
    "begun": Begun,
    "awaited": Awaited,
    "allocated": Allocated,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def _event_values(event: Event) -> list[Any]:
    if isinstance(event, Call):
        work = event.work
        dtype = str(work.dtype).removeprefix("torch.")
        return [
            "computed",
            event.name,
            event.implementation,
            [list(product) for product in work.products],
            work.scores,
            work.nbytes,
            dtype,
        ]
    return [_NAMES[type(event)], *event]


def _record_of(values: Mapping[str, Any]) -> LayerRecord:
    phases = {
        Op(name): tuple(_event_of(*event) for event in events)
        for name, events in values["phases"].items()
    }
    return LayerRecord(StageWork(phases), *(int(values[name]) for name in _NUMBERS))


def _event_of(kind: str, *values: Any) -> Event:
    if kind != "computed":
        return _KINDS[kind](*values)
    name, implementation, products, scores, nbytes, dtype = values
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype} is no dtype")
    work = CallWork(
        tuple(Product(*product) for product in products), scores, nbytes, found
    )
    return Call(name, implementation, work)
