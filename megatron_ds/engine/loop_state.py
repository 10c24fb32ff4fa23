"""What a checkpoint of an engine holds of the loop: micro-steps, the scheduler's state, numbers that the program changed.

A parameter group's numbers are saved where they differ from those that `initialize` found, by a scheduler or by the program
(`engine.set_lr`). The others follow the config of the run that loads, so that a changed "lr" in the JSON has its effect.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .schedule import JsonScheduler, plain, restored

if TYPE_CHECKING:
    from .engine import Engine


def loop_state(engine: "Engine") -> dict[str, Any]:
    """Plain values (JSON). Raises ConfigError where the scheduler's state has none."""
    changed = [{key: group[key] for key in group if key != "params" and group[key] != first.get(key)}
               for group, first in zip(engine.optimizer.param_groups, engine.configured_groups)]
    scheduler = engine.lr_scheduler.state_dict() if hasattr(engine.lr_scheduler, "state_dict") else None
    return {"micro_steps": engine.micro_steps, "param_groups": plain(changed), "lr_scheduler": plain(scheduler)}


def load_loop_state(engine: "Engine", state: Mapping[str, Any], with_scheduler: bool) -> None:
    """What `loop_state` gave; {} of a checkpoint that has none, where the JSON's scheduler follows the progress."""
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
