"""Learning-rate schedulers of an engine: the JSON's, with the surface of torch's, or one of the user's.

`engine.step()` steps the scheduler after each update that was not skipped, as DeepSpeed does. A scheduler's state goes into
the checkpoint as plain JSON values (`plain`), which `restored` turns back.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..config import RunConfig
from ..config.training_schedule import make_learning_rate
from ..errors import ConfigError
from ..ramps import DeepSpeedRate
from .engine_optimizer import EngineOptimizer, Group

SchedulerMaker = Callable[[torch.optim.Optimizer], Any]


class JsonScheduler:
    """WarmupLR, WarmupDecayLR or WarmupCosineLR of the JSON, for all parameter groups.

    WarmupCosineLR scales the learning rate that each group began with; the others give all groups the same.
    last_batch_iteration: number of the last update, counted from 0; −1 before the first
    """

    def __init__(self, groups: list[Group], rate: DeepSpeedRate):
        self.groups, self.rate = groups, rate
        self.last_batch_iteration = -1
        self._firsts = [group["lr"] for group in groups]
        self._apply()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on to the next update, or to the one of this number."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self._apply()

    def get_lr(self) -> list[float]:
        """Of the next update, one for each group."""
        value = self.rate.at(self.last_batch_iteration)
        if self.rate.style == "WarmupCosineLR":
            return [first * value / self.rate.highest for first in self._firsts]
        return [value] * len(self.groups)

    def get_last_lr(self) -> list[float]:
        """As torch's schedulers: what `step` has set last."""
        return self.get_lr()

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.step(state["last_batch_iteration"])

    def _apply(self) -> None:
        for group, value in zip(self.groups, self.get_lr()):
            group["lr"] = value


def make_scheduler(settings: RunConfig, optimizer: EngineOptimizer, client: Any | SchedulerMaker | None) -> Any | None:
    """The JSON's scheduler, else the client's, else None. client: a scheduler, or a function from the optimizer to one."""
    if settings.optimizer.lr_decay_style.startswith("Warmup"):
        if client is not None:
            raise ConfigError('the learning rate is scheduled twice, by "scheduler" in the config and by lr_scheduler=. Keep '
                              "one of them.")
        return JsonScheduler(optimizer.param_groups, make_learning_rate(settings)) if optimizer.param_groups else None
    if client is None:
        return None
    if not callable(getattr(client, "step", None)) and callable(client):
        client = client(optimizer)
    if not callable(getattr(client, "step", None)):
        raise ConfigError(f"lr_scheduler is {type(client).__name__}: give a scheduler, an object with a method step(), or a "
                          "function that makes one from an optimizer.")
    owner = getattr(client, "optimizer", None)
    if owner is not None and getattr(owner, "param_groups", None) is not optimizer.param_groups:
        raise ConfigError("lr_scheduler changes the learning rates of another optimizer than this engine's, so it would have "
                          "no effect. Make it from the optimizer that is given as optimizer=, or give a function: "
                          "lr_scheduler=lambda optimizer: StepLR(optimizer, 10).")
    return client


def plain(value: Any) -> Any:
    """`value` in what JSON can hold. Raises ConfigError where it has no plain form (a function, an object)."""
    if value is None or isinstance(value, bool | int | str) or isinstance(value, float) and math.isfinite(value):
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
    raise ConfigError(f"a checkpoint holds plain values only, and the state to be saved has a {type(value).__name__}. Leave "
                      "it out of state_dict().")


def restored(value: Any) -> Any:
    """What `plain` was given."""
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
