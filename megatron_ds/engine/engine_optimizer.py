"""`EngineOptimizer`: the optimizer as the user of an engine sees it, and what runs on each rank's shards in its name.

Terms:  a *parameter group* is torch's: parameters of the module with hyper-parameters of their own (lr, weight_decay, …).
        The *inner* optimizers are those that ZeRO makes for the pieces that a rank updates (zero/shard_optimizer.py).

The groups are those of the user's optimizer, or follow from the JSON. Programs and torch's schedulers change the numbers in
them; before each update they are copied to the groups of the inner optimizers, so a change counts from the next step on.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..config import RunConfig
from ..errors import ConfigError
from ..optim import OPTIMIZERS
from ..zero.optimizer import StepResult, ZeroOptimizer

# The hyper-parameters that a group has by the JSON's optimizer, and where the config keeps them.
JSON_KEYS = {
    "adam": {"lr": lambda o: o.lr, "betas": lambda o: (o.adam_beta1, o.adam_beta2), "eps": lambda o: o.adam_eps,
             "weight_decay": lambda o: o.weight_decay},
    "sgd": {"lr": lambda o: o.lr, "momentum": lambda o: o.sgd_momentum, "weight_decay": lambda o: o.weight_decay}}
Group = dict[str, Any]


class InnerOptimizers:
    """Makes the inner optimizers of one engine, with the user's groups, and keeps their numbers up to date.

    kind    its name in checkpoints
    groups  the user's, with "params"; all parameters that are trained are in one of them
    make    from groups of 1-D fp32 tensors, with the user's numbers, to an optimizer
    client  the user's own optimizer, None where the JSON's is used
    """

    def __init__(self, kind: str, groups: list[Group], make: Callable[[list[Group]], torch.optim.Optimizer],
                 client: torch.optim.Optimizer | None = None):
        self.kind, self.groups, self.client, self._make = kind, groups, client, make
        self._pairs: list[tuple[Group, Group]] = []         # (inner, the user's)

    def __call__(self, inner: list[Group]) -> torch.optim.Optimizer:
        """For `ZeroOptimizer`: groups of pieces, in which the user's groups are mixed."""
        group_of = {p.spec.name: i for i, group in enumerate(self.groups) for p in group["params"]}
        members: dict[int, list[nn.Parameter]] = defaultdict(list)
        for tensor in (t for group in inner for t in group["params"]):
            members[group_of[tensor.spec.name]].append(tensor)
        made = [{**self.groups[i], "params": members[i]} for i in sorted(members)]
        optimizer = self._make(made)
        self._pairs += zip(optimizer.param_groups, [self.groups[i] for i in sorted(members)])
        return optimizer

    def refresh(self) -> None:
        """The next update uses the numbers that the user's groups have now."""
        for inner, group in self._pairs:
            inner.update((key, value) for key, value in group.items() if key != "params")


class EngineOptimizer(torch.optim.Optimizer):
    """What `initialize` returns beside the engine, which steps it. Attributes of the `ZeroOptimizer` are its own too.

    zero_grad     the engine's
    param_groups  their numbers may be changed at any time and count from the next step on; "params" are the module's
    """

    def __init__(self, zero: ZeroOptimizer, inner: InnerOptimizers, defaults: Group):
        # Not torch's __init__: its first call loads the compiler, more than a second of each start. Schedulers need no more.
        self.zero, self.inner, self.defaults = zero, inner, defaults
        self.param_groups, self.state = inner.groups, {}
        self.overflow = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "zero" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.zero, name)

    def __repr__(self) -> str:
        return f"EngineOptimizer({len(self.param_groups)} parameter groups, {self.zero.policy})"

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by; 1 but for fp16. `cur_scale` is DeepSpeed's other name for it."""
        return self.zero.loss_scale

    cur_scale = loss_scale

    def step(self, closure: Any = None) -> None:
        raise ConfigError("the optimizer of an engine is stepped by engine.step(), which also averages the gradients, clips "
                          "them and counts micro-batches. Call engine.step() instead of optimizer.step().")

    def add_param_group(self, param_group: Group) -> None:
        raise ConfigError("parameters cannot be added to an engine's optimizer: the shards are laid out by initialize. Give "
                          "all groups to it.")

    def update(self) -> StepResult:
        """One step of `ZeroOptimizer` with the numbers that the groups have now. Collective."""
        self.inner.refresh()
        result = self.zero.step(None)
        self.overflow = result.skipped
        for optimizer in filter(None, (self, self.inner.client)):
            optimizer._opt_called = True        # torch's schedulers warn when they are stepped before the optimizer
        return result

    def state_dict(self) -> dict[str, Any]:
        """This rank's shards, for the same layout of ranks and the same stage. `Engine.save_checkpoint` fits every layout."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {"state": {_key(piece): piece.tensor.detach().clone() for piece in self.zero.pieces()},
                "param_groups": copy.deepcopy(groups), "numbers": self.zero.extra_state()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave on this rank. Collective. Raises ConfigError where it is of another layout."""
        pieces = {_key(piece): piece.tensor for piece in self.zero.pieces()}
        state, groups = state_dict["state"], state_dict["param_groups"]
        if pieces.keys() != state.keys() or len(groups) != len(self.param_groups):
            odd = next(iter(sorted(pieces.keys() ^ state.keys())), "its number of parameter groups")
            raise ConfigError(f"the optimizer's state_dict is of another layout: {odd} is in one of them only. A checkpoint "
                              "of engine.save_checkpoint loads at any number of ranks and any stage.")
        self.zero.before_change()
        for key, tensor in pieces.items():
            tensor.copy_(state[key])
        for group, saved in zip(self.param_groups, groups):
            group.update(copy.deepcopy(saved))
        self.zero.load_extra_state(state_dict["numbers"])
        self.zero.after_load()


def _key(piece) -> str:
    return f"{piece.kind} of {piece.spec.name}[{piece.start}:{piece.stop}]"


# ---------------------------------------------------------------------------------------------------- of the JSON
def json_optimizers(settings: RunConfig, groups: Sequence[Group]) -> InnerOptimizers:
    """The JSON's optimizer. groups: "params", and any numbers that differ from the JSON's."""
    o = settings.optimizer
    numbers = {key: value(o) for key, value in JSON_KEYS[o.optimizer].items()}
    return InnerOptimizers(o.optimizer, [{**numbers, **group} for group in groups],
                           lambda made: OPTIMIZERS[o.optimizer](made, settings=o))
