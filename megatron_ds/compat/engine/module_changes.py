"""`ModuleChanges`: what a program changes in a module after `initialize`, followed or refused by name.

Before each update the module is compared with what `initialize` read of it:

    parameter                        stage 0                           stages 1 to 3
    frozen during training           no update, and no decay           refused
    trained that began frozen        trained from then on              refused
    in no group, requires_grad set   not trained, as in torch; warned  the same
    replaced, added, removed, tied   refused                           refused

At stage 0 an update is that of torch's optimizer over the same groups: a parameter without a gradient keeps its
value, its moments and its count of steps. Memory of a parameter that begins frozen (gradient, master, moments)
is made when it is unfrozen, by a new `ZeroOptimizer` that takes over the state of the former one.

Ranks compare what they found with the number that they sum with the norm of the gradients (zero/unused.py), so
an update without changes costs no message, and an error is that of all ranks.
"""

import logging
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ...errors import CallError
from ...mpu.collectives import all_gather_object
from ...mpu.group import Group
from ...mpu.managed_parameter import ManagedParameter, spec_of
from ...zero.offload_settings import DEVICE
from ...zero.optimizer import ZeroOptimizer
from ...zero.unused import PathCheck
from .gradients import EngineParameter, Gradients, store_of
from .module_specs import name_of
from .parts import EngineParts

MOST_NAMED = 8
logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """What a rank found before an update.

    refused  sentences about changes that cannot be followed
    resting  names of parameters that the update leaves out
    """

    refused: tuple[str, ...] = ()
    resting: tuple[str, ...] = ()


class ModuleChanges:
    """The changes of an engine's module. Made by the engine, after its optimizer.

    late  names of parameters that are trained now and were frozen at `initialize`
    """

    def __init__(self, engine: EngineParts):
        self._engine = engine
        in_groups = _in_groups(engine)
        self._trained = [p for p in in_groups if p.requires_grad]
        self._dormant = [p for p in in_groups if not p.requires_grad]
        grouped = set(in_groups)
        self._others = [p for p in engine.module.parameters() if p not in grouped]
        self.late: list[str] = []
        self._refusal = refusal_to_follow(engine.zero)
        self._structure = _Structure(engine.module)
        self._check = self._new_check()

    # ------------------------------------------------------------------ before a forward and a backward
    def train_unfrozen(self) -> None:
        """Give parameters that began frozen, and require gradients now, what training them needs. Collective
        where there are such parameters."""
        if self._refusal:
            return
        late = [p for p in self._dormant if p.requires_grad]
        if late:
            self._train(late)

    def train_named(self, names: Iterable[str]) -> None:
        """`train_unfrozen` of these, whether or not they are unfrozen yet: a checkpoint has their state."""
        wanted = set(names)
        late = [p for p in self._dormant if spec_of(p).name in wanted]
        if late and not self._refusal:
            self._train(late)

    def _train(self, late: Sequence[nn.Parameter]) -> None:
        engine = self._engine
        if engine.gradients.is_reduced:
            raise CallError(
                f"{spec_of(late[0]).name} was unfrozen between two backwards of one micro-batch, whose gradients "
                "are averaged already. Set requires_grad after engine.step()."
            )
        retrain(engine, self._trained, late)
        self._trained += late
        self._dormant = [p for p in self._dormant if p not in set(late)]
        self.late += [spec_of(p).name for p in late]
        self._check = self._new_check()

    # ------------------------------------------------------------------ around an update
    @contextmanager
    def followed(self) -> Iterator[None]:
        """Around an update: what must not be updated is left out. An error is raised by the update, on all
        ranks."""
        self._check.found = found = self._look()
        optimizer = self._engine.optimizer
        optimizer.begin_states(found.resting)
        with _left_out(optimizer.zero, found.resting):
            yield
        if not optimizer.overflow:
            for name in found.resting:
                optimizer.missed[name] = optimizer.missed.get(name, 0) + 1

    def _look(self) -> Found:
        frozen = [p for p in self._trained if not p.requires_grad]
        unfrozen = [p for p in self._dormant if p.requires_grad]
        self._warn_of_others()
        problems = self._structure.changes()
        if not self._refusal:
            without = [p for p in frozen if not self._engine.gradients.has_any(p)]
            return Found(tuple(problems), tuple(spec_of(p).name for p in without))
        flags = [(p, "trained", "frozen") for p in frozen]
        flags += [(p, "frozen", "trained") for p in unfrozen]
        for p, before, now in flags:
            problems.append(
                f"{spec_of(p).name} was {before} at initialize and is {now}"
            )
        return Found(tuple(problems))

    def _warn_of_others(self) -> None:
        begun = [p for p in self._others if p.requires_grad]
        if not begun:
            return
        self._others = [p for p in self._others if not p.requires_grad]
        logger.warning(
            "%d parameters require gradients now, but are in no group of the optimizer, and are not trained "
            "(first: %s). Give them to initialize, frozen, to train them later",
            len(begun),
            spec_of(begun[0]).name,
        )

    def _new_check(self) -> "_Check":
        zero = self._engine.zero
        world = self._engine.world
        check = _Check(
            zero.path_check,
            world.data,
            world.model,
            self._refusal,
        )
        zero.path_check = check
        return check


def refusal_to_follow(zero: ZeroOptimizer) -> str | None:
    """Return why an update cannot leave out a parameter, or train a further one; None: it can."""
    if zero.settings.policy.optimizer is not None:
        return "ranks hold shards of the optimizer's state, which initialize lays out"
    if zero.settings.offload.optimizer != DEVICE:
        return "the optimizer's state is offloaded in groups that initialize lays out"
    collective = [g.name for g in zero.settings.param_groups if g.traits.is_collective]
    if collective:
        return (
            f"the optimizer of {collective[0]} communicates for all of its parameters"
        )
    return None


def _in_groups(engine: EngineParts) -> list[nn.Parameter]:
    groups = engine.optimizer.param_groups
    return [p for group in groups for p in group["params"]]


@contextmanager
def _left_out(zero: ZeroOptimizer, names: Sequence[str]) -> Iterator[None]:
    """Inside, torch's optimizers do not know the parts of these parameters; their state stays."""
    groups = []
    for optimizer in zero.resident.optimizers if names else ():
        groups += optimizer.param_groups
    before = [group["params"] for group in groups]
    out = set(names)
    for group in groups:
        group["params"] = [t for t in group["params"] if t.spec.name not in out]
    try:
        yield
    finally:
        for group, tensors in zip(groups, before):
            group["params"] = tensors


class _Structure:
    """The parameters of a module by object, and where they are."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._places = _places(module)
        self._owners = _owners(module)

    def changes(self) -> list[str]:
        """Sentences about parameters that are new or gone. An unchanged module is compared by identity,
        without names."""
        if all(_is_same(*owner) for owner in self._owners):
            return []
        now = _places(self._module)
        before = self._places
        found = _differences(before, now)
        if not found:  # modules were wrapped or moved: the parameters are the same
            self._places = now
            self._owners = _owners(self._module)
        return found


def _places(module: nn.Module) -> dict[str, nn.Parameter]:
    """All names of parameters, those of tied ones too."""
    named = module.named_parameters(remove_duplicate=False)
    return {name_of(name): p for name, p in named}


def _owners(module: nn.Module) -> list[tuple[nn.Module, list[int], list[int]]]:
    return [(m, _ids(m._parameters), _ids(m._modules)) for m in module.modules()]


def _is_same(owner: nn.Module, parameters: list[int], children: list[int]) -> bool:
    return _ids(owner._parameters) == parameters and _ids(owner._modules) == children


def _ids(members: Mapping[str, Any]) -> list[int]:
    """Objects of a module's dict. Those of `initialize` are kept alive, so no other has their numbers."""
    return list(map(id, members.values()))


def _differences(
    before: Mapping[str, nn.Parameter], now: Mapping[str, nn.Parameter]
) -> list[str]:
    known = {id(p) for p in before.values()}
    present = {id(p) for p in now.values()}
    found = []
    for name, p in now.items():
        if id(p) not in known:
            verb = "replaced" if name in before else "added"
            found.append(f"{name} was {verb} after initialize")
    for name, p in before.items():
        if id(p) in present:
            continue
        other = now.get(name)
        if other is None:
            found.append(f"{name} is no longer in the module")
        elif id(other) in known:
            found.append(f"{name} is tied to {spec_of(other).name} since initialize")
    return found


class _Check(PathCheck):
    """A `PathCheck` of zero/unused.py that compares what ranks found in their modules, too.

    found  on this rank, before the update
    """

    def __init__(self, base: PathCheck, data: Group, model: Group, refusal: str | None):
        super().__init__(base.rule, data, model, base._paths)
        self._base: PathCheck = base
        if isinstance(base, _Check):
            self._base = base._base
        self._refusal = refusal
        self.found = Found()

    def number(self, received: Mapping[str, bool]) -> float:
        """Return the number of `PathCheck`, with what was found. Infinite where a change is refused."""
        number = self._base.number(self._used(received))
        if self.found.refused:
            return math.inf
        if not self.found.resting or number == math.inf:
            return number
        return zlib.crc32(repr((number, self.found.resting)).encode()) & 0xFFFF

    def report(self, received: Mapping[str, bool]) -> None:
        """Raise the error of a change that is refused, or that ranks made differently; else as `PathCheck`.
        Collective over the groups."""
        of_ranks = all_gather_object(self.found, self._data)
        text = self._refused(of_ranks) or _unequal(of_ranks, self._data.ranks)
        text = next(filter(None, all_gather_object(text, self._model)), None)
        if text is not None:
            raise CallError(text)
        self._base.report(self._used(received))

    def _used(self, received: Mapping[str, bool]) -> dict[str, bool]:
        out = set(self.found.resting)
        return {name: has for name, has in received.items() if name not in out}

    def _refused(self, of_ranks: Sequence[Found]) -> str | None:
        problems = list(dict.fromkeys(p for found in of_ranks for p in found.refused))
        if not problems:
            return None
        more = len(problems) - MOST_NAMED
        rest = f" and {more} more" if more > 0 else ""
        flags = f" requires_grad can change during training at ZeRO stage 0 only: {self._refusal}."
        return (
            f"the module changed after initialize: {'; '.join(problems[:MOST_NAMED])}{rest}. The engine's "
            "buffers, gradients and checkpoints are those of the parameters that initialize found, so nothing "
            f"was updated.{flags if self._refusal else ''} Undo the change before engine.step(), or save a "
            "checkpoint, call engine.destroy() and initialize the module again."
        )


def _unequal(of_ranks: Sequence[Found], ranks: Sequence[int]) -> str | None:
    first = set(of_ranks[0].resting)
    for rank, found in zip(ranks, of_ranks):
        if odd := sorted(first.symmetric_difference(found.resting)):
            has_it, lacks_it = (ranks[0], rank) if odd[0] in first else (rank, ranks[0])
            return (
                f"{odd[0]} is frozen on rank {has_it} and has a gradient or requires one on rank {lacks_it}: "
                "ranks would get different weights, so nothing was updated. Set requires_grad alike on all "
                "ranks, right after engine.step()."
            )
    return None


# ------------------------------------------------------------------------------- more trained parameters
@torch.no_grad()
def retrain(
    engine: EngineParts, trained: Sequence[nn.Parameter], late: Sequence[nn.Parameter]
) -> None:
    """Replace the `ZeroOptimizer` of `trained` by one of these and `late`, with the state of the former.
    Collective."""
    # What the former one holds: gradients of micro-batches, pieces, and numbers.
    engine.gradients.hide()
    old = engine.zero
    old.wait_for_weights()
    summed = _gradients_of(old)
    state = {_place(piece): piece.tensor for piece in old.pieces()}
    numbers = old.extra_state()
    for s in old.trained:
        for hook in store_of(s).hooks:
            hook.remove()

    # The new one: what it trains requires gradients while it is made.
    flags = {p: p.requires_grad for p in (*trained, *late)}
    for p in flags:
        p.requires_grad_(True)
    zero = engine.optimizer.remake()
    for p, flag in flags.items():
        p.requires_grad_(flag)
        if type(p) in (nn.Parameter, ManagedParameter):
            p.__class__ = EngineParameter

    # Its state. Moments of the late ones are as before a first update.
    for piece in zero.pieces():
        if _place(piece) in state:
            piece.tensor.copy_(state[_place(piece)])
    zero.load_extra_state(numbers)
    zero.after_load()
    zero.begin_step()
    for s in zero.trained:
        for holder, gradient in zip(s.buckets.holders, s.buckets.gradients):
            before = summed.get(holder.parameter)
            if before is not None:
                gradient.add(before)
    engine.optimizer.zero = engine.zero = zero
    names = [spec_of(p).name for p in late]
    behind = dict.fromkeys(names, zero.resident.num_updates)
    engine.optimizer.restore_steps(engine.optimizer.missed | behind)
    engine.gradients = Gradients(engine)
    engine.backwards.recount()


def _gradients_of(zero: ZeroOptimizer) -> dict[nn.Parameter, torch.Tensor]:
    found = {}
    for s in zero.trained:
        store = store_of(s)
        for holder, gradient in zip(store.holders, store.gradients):
            if gradient.received:
                found[holder.parameter] = gradient.view().clone()
    return found


def _place(piece: Any) -> tuple:
    return piece.kind, piece.spec.name, piece.start, piece.stop
