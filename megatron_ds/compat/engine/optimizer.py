"""`EngineOptimizer`, the optimizer that `initialize` returns; its parameter groups and its learning-rate
schedulers.

Terms:  a *parameter group* is torch's: parameters of the module with hyper-parameters of their own (lr,
        weight_decay, …). The *inner* optimizers are those that ZeRO makes for the pieces of parameters that a
        rank updates.

The groups are those of the user's optimizer, or those of `model_parameters` with the JSON's numbers. Programs
and torch's schedulers change these numbers; before each update they are copied to the groups of the inner
optimizers, so a change takes effect in the next step. `engine.step()` steps the scheduler after each update
that was not skipped.
"""

import copy
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cached_property
from itertools import chain
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import nn

from ...config import OptimizerConfig, RunConfig
from ...config.optimizer_facts import facts_of
from ...config.options.training import DEEPSPEED_STYLES
from ...config.training_schedule import make_beta1, make_learning_rate
from ...errors import ArgumentError, CallError, ConfigError
from ...optim import OptimizerTraits, ParamGroup, RegisteredOptimizer, default_groups
from ...optim.optimizers import NO_NEEDS
from ...progress.ramps import DeepSpeedRate
from ...zero.optimizer import StepResult, ZeroOptimizer
from ...zero.shard_optimizer import Leaf
from .group_schedule import GroupSchedule, NumberOfStep
from .module_specs import named_parameters
from .parameter_offload import ParameterOffload

Group = dict[str, Any]
LR_FACTOR = "lr_factor"  # of a group, if its learning rate is not that of the JSON
Decays = Callable[[str, nn.Parameter], bool]  # (name, parameter)
SchedulerMaker = Callable[[torch.optim.Optimizer], Any]
logger = logging.getLogger(__name__)


class InnerOptimizers:
    """Makes the inner optimizers of one engine, with the user's groups, and keeps their numbers up to date.

    kind    the optimizer's name in checkpoints
    groups  the user's, with "params"; every trained parameter is in one of them
    make    from groups of 1-D fp32 tensors, with the user's numbers, to an optimizer
    client  the user's own optimizer, None where the JSON's is used
    traits  what `make` needs of the ranks
    """

    def __init__(
        self,
        kind: str,
        groups: list[Group],
        make: Callable[..., torch.optim.Optimizer],
        client: torch.optim.Optimizer | None = None,
        traits: OptimizerTraits = NO_NEEDS,
    ):
        self.kind = kind
        self.groups = groups
        self.client = client
        self._make = make
        self.traits = traits
        self._pairs: list[tuple[Group, Group]] = []  # (inner, the user's)

    def __call__(self, inner: list[Group], /, **options: Any) -> torch.optim.Optimizer:
        """Return an optimizer of the pieces in `ZeroOptimizer`'s groups, sorted into the user's groups."""
        group_of: dict[str, int] = {}
        for i, group in enumerate(self.groups):
            group_of |= {p.spec.name: i for p in group["params"]}
        members: dict[int, list[nn.Parameter]] = defaultdict(list)
        for tensor in (t for group in inner for t in group["params"]):
            members[group_of[tensor.spec.name]].append(tensor)
        # Norms, matrices, exchanges are collective: a rank without parts of any parameter has empty groups.
        is_collective = self.traits.is_collective
        present = range(len(self.groups)) if is_collective else sorted(members)
        optimizer = self._make(
            [{**self.groups[i], "params": members[i]} for i in present], **options
        )
        self._pairs += zip(optimizer.param_groups, [self.groups[i] for i in present])
        return optimizer

    def param_groups(self) -> tuple[ParamGroup, ...]:
        """Return the groups of `ZeroOptimizer`."""
        return default_groups(self)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the specs of all parameters; these must have been written."""
        return frozenset(p.spec.name for group in self.groups for p in group["params"])

    def forget(self) -> None:
        """Forget the inner optimizers that were made: others take their place."""
        self._pairs.clear()

    def refresh(self) -> None:
        """Copy the numbers of the user's groups to the inner ones."""
        for inner, group in self._pairs:
            inner.update(
                (key, value) for key, value in group.items() if key != "params"
            )


class OptimizersOfGroups(Protocol):
    """`InnerOptimizers`, or several as one (engine/several_optimizers.py)."""

    kind: str
    groups: list[Group]
    client: torch.optim.Optimizer | None

    def param_groups(self) -> tuple[ParamGroup, ...]:
        """Return the groups of `ZeroOptimizer`."""
        ...

    def forget(self) -> None:
        """Forget the inner optimizers that were made: others take their place."""

    def refresh(self) -> None:
        """Copy the numbers of the user's groups to the inner ones."""


class EngineOptimizer(torch.optim.Optimizer):
    """A torch optimizer that the engine steps. Attributes that it lacks are those of its `ZeroOptimizer`.

    Numbers of its param_groups may be changed at any time and take effect in the next step.

    missed  name of a parameter → updates that left it out, because it was frozen; 0 of those without an entry
    make    makes a `ZeroOptimizer` of the parameters that require gradients then
    parameter_offload  at stage 3 alone
    """

    parameter_offload: ParameterOffload

    def __init__(
        self,
        zero: ZeroOptimizer,
        inner: OptimizersOfGroups,
        defaults: Group,
        make: Callable[[], ZeroOptimizer],
    ):
        # Not torch's __init__: its first call loads the compiler, more than a second of each start.
        # Schedulers need no more.
        self.zero = zero
        self.inner = inner
        self.defaults = defaults
        self.param_groups = inner.groups
        self.state = defaultdict(None)
        self.overflow = False
        self.missed: dict[str, int] = {}
        self._make = make

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "zero" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.zero, name)

    def __repr__(self) -> str:
        return f"EngineOptimizer({len(self.param_groups)} parameter groups, {self.zero.settings.policy})"

    @property
    def loss_scale(self) -> float:
        """Factor of the next loss; 1 except with fp16. `cur_scale` is DeepSpeed's other name for it."""
        return self.zero.loss_scale

    cur_scale = loss_scale

    def step(self, closure: Any = None) -> NoReturn:
        """Raises ConfigError: `engine.step()` makes the update."""
        raise ConfigError(
            "the optimizer of an engine is stepped by engine.step(), which also averages the "
            "gradients, clips them and counts micro-batches. Call engine.step() instead of "
            "optimizer.step()."
        )

    def add_param_group(self, param_group: Group) -> None:
        """Raises ConfigError: `initialize` lays out the shards of all parameters."""
        raise ConfigError(
            "parameters cannot be added to an engine's optimizer: initialize lays out the "
            "shards of all parameters. Give all groups to initialize."
        )

    def update(self) -> StepResult:
        """Make a step of `ZeroOptimizer` with the current values of the groups. Collective."""
        self.inner.refresh()
        result = self.zero.step(None)
        self.overflow = result.skipped
        for optimizer in filter(None, (self, self.inner.client)):
            # Otherwise torch's schedulers warn of steps in the wrong order.
            vars(optimizer)["_opt_called"] = True
        return result

    def remake(self) -> ZeroOptimizer:
        """Return a new `ZeroOptimizer` of the module, with inner optimizers of its own. Collective."""
        self.inner.forget()
        return self._make()

    def begin_states(self, resting: Sequence[str]) -> None:
        """Before an update: begin the states of parameters that missed all updates so far and take this one,
        of optimizers that do not begin with zeros."""
        count = self.zero.resident.num_updates
        late = {name for name, behind in self.missed.items() if behind == count > 0}
        for leaf in self._leaves_of(late.difference(resting)):
            optimizer = self.zero._optimizer_of(leaf).optimizer_of(leaf)
            if hasattr(optimizer, "restart"):
                optimizer.restart([leaf.tensor])

    def _leaves_of(self, names: Set[str]) -> list[Leaf]:
        sets = self.zero.trained if names else []
        leaves = chain.from_iterable(s.leaves for s in sets)
        return [leaf for leaf in leaves if leaf.spec.name in names]

    def restore_steps(self, missed: Mapping[str, int]) -> None:
        """Set the counts of steps of parameters that have missed updates, after those of all were set."""
        self.missed = dict(missed)
        updates = self.zero.resident.num_updates
        for leaf in self._leaves_of(self.missed.keys()):
            optimizer = self.zero._optimizer_of(leaf).optimizer_of(leaf)
            state = optimizer.state.get(leaf.tensor, {})
            count = updates - self.missed[leaf.spec.name]
            if torch.is_tensor(state.get("step")):
                state["step"].fill_(count)
            elif "step" in state:
                state["step"] = count

    def state_dict(self) -> dict[str, Any]:
        """This rank's shards, for the same layout; `Engine.save_checkpoint` is for every layout."""
        groups = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.param_groups
        ]
        return {
            "state": {
                _key(piece): piece.tensor.detach().clone()
                for piece in self.zero.pieces()
            },
            "param_groups": copy.deepcopy(groups),
            "numbers": self.zero.extra_state(),
            "missed_updates": dict(self.missed),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a `state_dict` of this rank. Collective. Raises ConfigError where it has another layout."""
        pieces = {_key(piece): piece.tensor for piece in self.zero.pieces()}
        state = state_dict["state"]
        groups = state_dict["param_groups"]
        if pieces.keys() != state.keys() or len(groups) != len(self.param_groups):
            odd = next(
                iter(sorted(pieces.keys() ^ state.keys())),
                "its number of parameter groups",
            )
            raise ConfigError(
                f"the optimizer's state_dict has another layout: {odd} is in one of them only. "
                "Use engine.save_checkpoint: its checkpoints load at any number of ranks and "
                "any stage."
            )
        self.zero.before_change()
        for key, tensor in pieces.items():
            tensor.copy_(state[key])
        for group, saved in zip(self.param_groups, groups):
            group.update(copy.deepcopy(saved))
        self.zero.load_extra_state(state_dict["numbers"])
        self.restore_steps(state_dict.get("missed_updates", {}))
        self.zero.after_load()


def _key(piece) -> str:
    return f"{piece.kind} of {piece.spec.name}[{piece.start}:{piece.stop}]"


def registered_optimizer(
    name: str,
    o: OptimizerConfig,
    groups: Sequence[Group],
    numbers: Mapping[str, Any] | None = None,
) -> InnerOptimizers:
    """Return an optimizer with the numbers of the JSON. groups: "params", and the numbers that differ from these.

    numbers: in place of the JSON's
    """
    facts = facts_of(name)
    entry = RegisteredOptimizer(name, o)
    if numbers is None:
        numbers = (
            facts.numbers(o) if facts else {"lr": o.lr, "weight_decay": o.weight_decay}
        )
    of_groups = [{**numbers, **group} for group in groups]
    for group in of_groups:
        group["lr"] *= group.get(LR_FACTOR, 1.0)
    return InnerOptimizers(
        facts.name if facts else name,
        of_groups,
        entry,
        traits=entry.traits,
    )


def make_groups(
    module: nn.Module, model_parameters: Any, decay: Decays | None
) -> list[Group]:
    """Return the groups of the JSON's optimizer, from `model_parameters`, as in torch:

        None                                         all parameters of the module
        parameters, or (name, parameter) pairs       these, in one group
        [{"params": […], "weight_decay": 0.0}, …]    groups; numbers that a group does not have are the JSON's

    decay: parameters for which it is False get a group of their own with weight decay 0.
    Raises ConfigError where a parameter is not the module's, or in two groups.
    """
    # Three forms of the argument become groups.
    given = list(module.parameters() if model_parameters is None else model_parameters)
    groups = (
        [dict(group) for group in given]
        if given and isinstance(given[0], dict)
        else [{"params": given}]
    )
    # Pairs lose their names; a parameter that is listed twice in a group counts once.
    for group in groups:
        listed = (
            [group["params"]]
            if isinstance(group["params"], nn.Parameter)
            else group["params"]
        )
        group["params"] = list(
            dict.fromkeys(p[1] if isinstance(p, tuple) else p for p in listed)
        )
    # Each parameter is the module's, and in one group.
    everything = [p for group in groups for p in group["params"]]
    check_owned(module, everything, "model_parameters=")
    if len(set(everything)) < len(everything):
        names = {p: name for name, p in named_parameters(module)}
        twice = next(
            names[p] for i, p in enumerate(everything) if p in set(everything[:i])
        )
        raise ConfigError(
            f"{twice} is in two groups of model_parameters=: it would be updated twice. Put "
            "each parameter into one group."
        )
    return groups if decay is None else _split(module, groups, decay)


def freeze_others(module: nn.Module, groups: Iterable[Group]) -> None:
    """Set requires_grad=False for all parameters of the module that are in no group."""
    trained = {id(p) for group in groups for p in group["params"]}
    left = [
        name
        for name, p in named_parameters(module)
        if p.requires_grad and id(p) not in trained
    ]
    for p in module.parameters():
        if id(p) not in trained:
            p.requires_grad_(False)
    if left and trained:
        logger.warning(
            "%d parameters are in no group of the optimizer and are not trained (first: %s)",
            len(left),
            left[0],
        )


def check_owned(
    module: nn.Module, parameters: Iterable[nn.Parameter], source: str
) -> None:
    """Raises ConfigError where one of `parameters`, those of the argument `source`, is not the module's."""
    mine = {id(p) for p in module.parameters()}
    given = list(parameters)
    if count := sum(id(p) not in mine for p in given):
        raise ConfigError(
            f"{count} of the {len(given)} parameters of {source} are not parameters of model=. "
            "Make the optimizer from the parameters of the same module, after any change that "
            "replaces them."
        )


def check_step(scheduler: Any, arguments: Mapping[str, Any]) -> None:
    """Raises CallError where `scheduler.step` needs more than these arguments."""
    try:
        inspect.signature(scheduler.step).bind(**arguments)
    except TypeError as error:
        kind = type(scheduler).__name__
        raise CallError(
            f"engine.step() cannot step {kind}: {error}. Nothing was updated. Give what it needs as "
            f'engine.step(lr_kwargs={{"metrics": …}}), or leave lr_scheduler out of initialize, make {kind} from '
            "engine.optimizer and step it where its metric is known. With transformers' Trainer use another "
            "lr_scheduler_type: under an engine the Trainer never steps it with a metric."
        ) from error


def _split(module: nn.Module, groups: list[Group], decay: Decays) -> list[Group]:
    names = {p: name for name, p in named_parameters(module)}
    result = []
    for group in groups:
        decayed = [p for p in group["params"] if decay(names[p], p)]
        others = [p for p in group["params"] if p not in set(decayed)]
        result += [{**group, "params": decayed}] if decayed else []
        result += [{**group, "params": others, "weight_decay": 0.0}] if others else []
    return result


class JsonScheduler(GroupSchedule):
    """The scheduler of the JSON, for all parameter groups.

    WarmupCosineLR scales the first learning rate of each group; the others set the same rate in all groups,
    times the factor of a group that has one.
    beta1: of groups with "betas", whose beta2 stays; None: betas do not change
    kind: its "type", by which it is an instance of DeepSpeed's class of this name
    """

    def __init__(
        self,
        optimizer: EngineOptimizer,
        rate: NumberOfStep,
        beta1: NumberOfStep | None = None,
        kind: str = "",
    ):
        groups = optimizer.param_groups
        self.kind = kind
        self._firsts = [group["lr"] for group in groups]
        betas = None if beta1 is None else [beta1] * len(groups)
        super().__init__(optimizer, [rate] * len(groups), betas=betas)

    def get_lr(self) -> list[float]:
        """Learning rates of the next update, one for each group."""
        values = super().get_lr()
        rate = self._rates[0]
        if isinstance(rate, DeepSpeedRate) and rate.style == "WarmupCosineLR":
            return [
                first * value / rate.highest
                for first, value in zip(self._firsts, values)
            ]
        factors = [group.get(LR_FACTOR, 1.0) for group in self.optimizer.param_groups]
        return [value * factor for value, factor in zip(values, factors)]


def make_scheduler(
    settings: RunConfig, optimizer: EngineOptimizer, client: Any | SchedulerMaker | None
) -> Any | None:
    """Return the JSON's scheduler, else the client's (one, or a function of the optimizer), else None."""
    # The JSON's.
    if settings.optimizer.lr_decay_style in DEEPSPEED_STYLES:
        if client is not None:
            raise ConfigError(
                'both "scheduler" in the config and lr_scheduler= schedule the learning rate. '
                "Remove one of them."
            )
        return (
            JsonScheduler(
                optimizer,
                # Those of DeepSpeed's styles have a value for each step.
                cast(NumberOfStep, make_learning_rate(settings)),
                cast(NumberOfStep | None, make_beta1(settings)),
                settings.optimizer.lr_decay_style,
            )
            if optimizer.param_groups
            else None
        )
    # The client's, or what its function makes.
    if client is None:
        return None
    if not callable(getattr(client, "step", None)) and callable(client):
        client = client(optimizer)
    if not callable(getattr(client, "step", None)):
        raise ConfigError(
            f"lr_scheduler is {type(client).__name__}: give a scheduler, an object with a "
            "method step(), or a function that makes one from an optimizer."
        )
    # A scheduler changes the groups of the optimizer that it was made from.
    owner = getattr(client, "optimizer", None)
    if (
        owner is not None
        and getattr(owner, "param_groups", None) is not optimizer.param_groups
    ):
        raise ArgumentError(
            "lr_scheduler changes the learning rates of another optimizer, not of this "
            "engine's, so it would have no effect. Make it from the optimizer that is given as "
            "optimizer=, or give a function: lr_scheduler=lambda optimizer: StepLR(optimizer, "
            "10)."
        )
    return client
