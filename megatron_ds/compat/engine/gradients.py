"""Gradients of an engine between backward and step: `p.grad`, and whole gradients, masters and states.

The gradients of an engine lie in ZeRO's buffers, not in `p.grad`. For programs that clip, log or change them
themselves, `grad` of the engine's parameters shows the buffer where a rank holds the whole gradient:

    stage    between micro-batches              after the last backward of an update
    0        this rank's sum so far             the mean over ranks, which `step` applies
    1        this rank's sum so far             error: each rank holds a shard
    2, 3     None: each rank holds a shard      error: each rank holds a shard

(One data-parallel rank holds whole gradients at every stage.) What is written into `p.grad` counts. Values
are those of the loss divided by the accumulation steps, without the loss scale. The error names the functions
that work at every stage, `full_gradient` and others here: DeepSpeed's `safe_get_full_grad`, ….

Torch's `module.zero_grad()` and `optimizer.zero_grad()` read `grad` of each parameter. On the whole
module, on one around it, or on an optimizer they do what `engine.zero_grad()` does, at every stage; on a part
of the module they zero its gradients where ranks hold whole ones.

Note: scale. Buffers hold gradients times loss scale, divided by the data-parallel ranks. Where that differs
from what is shown, the buffers are scaled in place when `p.grad` is first read, and back before their use.
"""

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, GetSetDescriptorType
from typing import Any, cast

import torch
from torch import nn

from ...errors import ConfigError, MegatronDSError
from ...mpu.collectives import all_gather_object, all_reduce_
from ...mpu.group import Group
from ...mpu.managed_parameter import ManagedParameter, spec_of
from ...zero.buckets import GradBuckets, GradientStore, SlotGradient
from ...zero.layout import SlotPiece
from ...zero.parameter_set import ParameterSet
from ...zero.shard_optimizer import Leaf
from .module_specs import COMPILED
from .parts import EngineParts
from .sharded_names import ShardedNames

Part = tuple[SlotPiece, torch.Tensor]
"""Elements of a parameter, and what a rank holds of them: a flat tensor."""
# The attribute in which autograd accumulates; torch's stub has the value in place of the descriptor.
OWN = cast(GetSetDescriptorType, torch.Tensor.grad)
WEIGHT = "weight"
# The modules with zero_grad().
TORCH = (
    "torch.nn.modules.module",
    "torch.optim.optimizer",
)


class EngineParameter(ShardedNames, ManagedParameter):
    """A parameter of an engine: `grad` is its gradient in the engine's buffers. A copy is a plain one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return memo.setdefault(
            id(self), nn.Parameter(self.detach().clone(), self.requires_grad)
        )

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient; see above. Raises MegatronDSError where this rank has a shard of it only."""
        held = OWN.__get__(self)
        engine = _engine_of(self)
        if held is not None or engine is None:
            return held
        if engine.gradients.is_zeroed_by(self, sys._getframe(1)):
            engine.zero_grad()
            return None
        return engine.gradients.shown(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        engine = _engine_of(self)
        if engine is None or not engine.gradients.assign(self, value):
            OWN.__set__(self, value)


def _engine_of(parameter: nn.Parameter) -> EngineParts | None:
    return parameter.__dict__.get("engine", lambda: None)()


def store_of(s: ParameterSet) -> GradientStore:
    """Return the gradients of a set of `ZeroOptimizer.trained`."""
    assert s.buckets is not None  # of frozen sets alone
    return s.buckets


@dataclass(frozen=True)
class _Place:
    """A trained parameter in its set. index: of its slot."""

    set: ParameterSet
    index: int

    @property
    def store(self) -> GradientStore:
        return store_of(self.set)

    @property
    def gradient(self) -> SlotGradient:
        return self.store.gradients[self.index]

    @property
    def is_whole(self) -> bool:
        """Whether each rank keeps the whole gradient after the reduction."""
        return isinstance(self.store, GradBuckets) and (
            not self.store.sharded or self.ranks.size == 1
        )

    @property
    def ranks(self) -> Group:
        return self.store.ranks.data

    @property
    def pieces(self) -> list[SlotPiece]:
        """The parts that this rank keeps after the reduction."""
        layout = self.set.plan.layout
        store = self.store
        kept = (
            layout.whole_slots()
            if self.is_whole
            else layout.slot_intersections(store.ranks.shard)
        )
        return [piece for piece in kept if piece.slot == self.index]


class Gradients:
    """The gradients of the parameters of one engine."""

    def __init__(self, engine: EngineParts):
        self._engine = weakref.proxy(engine)
        self._places: dict[nn.Parameter, _Place] = {}
        for s in engine.zero.trained:
            for i, holder in enumerate(store_of(s).holders):
                self._places[holder.parameter] = _Place(s, i)
        self._parts = weakref.WeakSet(engine.module.modules())
        self._parts -= {engine.module, getattr(engine.module, COMPILED, engine.module)}
        self._factor = 1.0  # by which the buffers are scaled while they are shown
        self.is_reduced = False  # whether the backward that completes an update is over

    # ------------------------------------------------------------------ p.grad
    def shown(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return a view of the gradient; None before a backward. Raises MegatronDSError where it is a shard."""
        place = self._places.get(parameter)
        if place is None or not place.gradient.received:
            return None
        if self.is_reduced and not place.is_whole:
            stage = self._engine.zero_optimization_stage()
            raise MegatronDSError(
                _NO_GRAD.format(
                    name=spec_of(parameter).name, stage=stage, size=place.ranks.size
                )
            )
        self._check(parameter)
        if not isinstance(place.store, GradBuckets):
            return None
        self._show()
        return place.gradient.view()

    def is_zeroed_by(self, parameter: nn.Parameter, reader: FrameType) -> bool:
        """Return whether torch's zero_grad of more than a part of the module reads a gradient."""
        place = self._places.get(parameter)
        if (
            reader.f_code.co_name != "zero_grad"
            or place is None
            or not place.gradient.received
        ):
            return False
        owner = reader.f_locals.get("self")
        return reader.f_globals.get("__name__") in TORCH and owner not in self._parts

    def assign(self, parameter: nn.Parameter, value: torch.Tensor | None) -> bool:
        """Take `value` as the gradient, None as zero; False where there is no gradient to replace."""
        place = self._places.get(parameter)
        if place is None or not place.gradient.received:
            return False
        if value is None and (
            self.is_reduced
            and not place.is_whole
            or not isinstance(place.store, GradBuckets)
        ):
            return True  # as in DeepSpeed: torch's zero_grad() of the module
        view = self.shown(parameter)
        if view is None:
            raise MegatronDSError(
                f"the gradient of {spec_of(parameter).name} cannot be set between "
                "micro-batches at this ZeRO stage: each rank holds a shard. Set it after "
                "the last backward of an update, with "
                "megatron_ds.utils.safe_set_full_grad."
            )
        if value is None:
            view.zero_()
        elif value is not view:
            view.copy_(value)
        return True

    def begin(self) -> None:
        """A step begins: no gradient was computed yet."""
        self._factor = 1.0
        self.is_reduced = False

    def end_backward(self, completes: bool) -> None:
        """A backward is over. completes: gradients are reduced, where ranks keep whole ones. Collective."""
        self.is_reduced = completes
        if completes:
            for s in self._engine.zero.trained:
                if isinstance(s.buckets, GradBuckets) and not s.buckets.sharded:
                    s.buckets.complete()

    def hide(self) -> None:
        """Buffers hold again what backward and step add to and apply."""
        self._scale(1.0)

    def _show(self) -> None:
        ranks = 1 if self.is_reduced else self._engine.divisor
        self._scale(ranks / self._engine.zero.loss_scale)

    def _scale(self, factor: float) -> None:
        if factor != self._factor:
            for s in self._engine.zero.trained:
                s.buckets.flat.mul_(factor / self._factor)
            self._factor = factor

    def _check(self, parameter: nn.Parameter) -> None:
        """Raises MegatronDSError where the buffers do not hold the gradient of one rank, or the mean."""
        if self._engine.zero.settings.update_rule.keeps_gradients:
            raise MegatronDSError(
                f"the gradient of {spec_of(parameter).name}: a 1-bit optimizer exchanges "
                "compressed momentum, and no rank has the mean of the gradients. Read and "
                "clip gradients with another optimizer."
            )
        if spec_of(parameter).partial_over and self._engine.world.model.size > 1:
            raise MegatronDSError(
                f"the gradient of {spec_of(parameter).name} is a partial sum over the "
                'model-parallel ranks until engine.step(). Use "gradient_clipping", and '
                "engine.get_global_grad_norm() after the step."
            )

    # ------------------------------------------------------------------ whole values, at every stage
    def full(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the whole gradient in fp32; None before a backward, and of a frozen parameter. Collective."""
        place = self._places.get(parameter)
        if place is None or not self._engine.has_gradients:
            return None
        self._check(parameter)
        if self._is_local(place):
            return self.shown(parameter)
        self._complete()
        self._show()
        return self._assembled(
            parameter,
            place,
            [(piece, place.store.grad_of(piece)) for piece in place.pieces],
        )

    def kept(self, parameter: nn.Parameter) -> list[Part] | None:
        """Views of the parts of the gradient that this rank keeps; None as in `full`."""
        place = self._places.get(parameter)
        if place is None or not self._engine.has_gradients:
            return None
        self._check(parameter)
        if self._is_local(place):
            whole = self.shown(parameter)
            if whole is None:
                return None
            flat = whole.view(-1)
            return [(piece, flat[piece.start : piece.stop]) for piece in place.pieces]
        self._complete()
        self._show()
        return [
            (piece, place.store.grad_of(piece)[: piece.stop - piece.start])
            for piece in place.pieces
        ]

    def has_any(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter has received a gradient in this update, on this rank."""
        place = self._places.get(parameter)
        return place is not None and place.gradient.received

    def is_trained(self, parameter: nn.Parameter) -> bool:
        """Return whether the engine's optimizer updates the parameter."""
        return parameter in self._places

    def _is_local(self, place: "_Place") -> bool:
        """Return whether this rank has a whole gradient: the mean, or its sum so far."""
        is_unreduced = isinstance(place.store, GradBuckets) and not self.is_reduced
        return place.is_whole or is_unreduced

    def set_full(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replace the gradient by `value`, the same on all ranks. Collective."""
        place = self._places.get(parameter)
        if place is None or not self._engine.has_gradients:
            raise MegatronDSError(
                "there is no gradient to set: it exists between engine.backward(loss) and "
                "engine.step(), for parameters that are trained."
            )
        _check_shape(parameter, value)
        self._check(parameter)
        if self._is_local(place):
            self.assign(parameter, value)
            return
        self._complete()
        self._show()
        for piece in place.pieces:
            part = value.detach().reshape(-1)[piece.start : piece.stop]
            place.store.grad_of(piece)[: piece.stop - piece.start].copy_(part)

    def _complete(self) -> None:
        for s in self._engine.zero.trained:
            s.buckets.complete()

    def full_state(self, parameter: nn.Parameter, kind: str = WEIGHT) -> torch.Tensor:
        """Return the whole fp32 master ("weight"), or state of the optimizer ("exp_avg", …). Collective."""
        place = self._place_of(parameter)
        self._check_kind(parameter, place, kind)
        found = list(self.states(parameter, kind))
        if not place.set.store.sharded:
            [(_, tensor)] = found
            return tensor.clone().view(parameter.shape)
        return self._assembled(parameter, place, found)

    @torch.no_grad()
    def set_full_state(
        self, parameter: nn.Parameter, value: torch.Tensor, kind: str = WEIGHT
    ) -> None:
        """Replace a master or state by `value`, the same on all ranks. Collective."""
        _check_shape(parameter, value)
        self._check_kind(parameter, self._place_of(parameter), kind)
        zero = self._engine.zero
        zero.before_change()
        for piece, tensor in self.states(parameter, kind):
            tensor.copy_(value.detach().reshape(-1)[piece.start : piece.stop])
        zero.after_load()

    def _place_of(self, parameter: nn.Parameter) -> _Place:
        sets = self._engine.zero.sets
        places = ((s, i, p) for s in sets for i, p in enumerate(s.parameters))
        return next(_Place(s, i) for s, i, p in places if p is parameter)

    def states(self, parameter: nn.Parameter, kind: str) -> Iterator[Part]:
        """(piece, flat tensor without padding) of the parts that this rank updates."""
        place = self._place_of(parameter)
        self._engine.zero.wait_for_weights()
        for leaf in place.set.leaves:
            if leaf.piece.slot == place.index:
                yield leaf.piece, leaf.unpadded(self._state_of(place, leaf)[kind])

    def _state_of(self, place: _Place, leaf: Leaf) -> dict[str, torch.Tensor]:
        state = (
            self._engine.zero._optimizer_of(leaf).state_of(leaf)
            if place.set.buckets is not None
            else ()
        )
        return {WEIGHT: leaf.tensor.detach(), **dict(state)}

    def _check_kind(self, parameter: nn.Parameter, place: _Place, kind: str) -> None:
        """Raises ConfigError on all ranks for an unknown kind, also where a rank has no part. Collective."""
        if kind == WEIGHT:
            return
        leaves = [leaf for leaf in place.set.leaves if leaf.piece.slot == place.index]
        here = {name for leaf in leaves for name in self._state_of(place, leaf)} - {
            WEIGHT
        }
        known = here.union(*all_gather_object(here, place.set.store.ranks.data))
        if kind not in known:
            raise ConfigError(
                f"{spec_of(parameter).name} has no state {kind!r}. It has "
                f"{', '.join(sorted(known)) or 'none'}."
            )

    @torch.no_grad()
    def _assembled(
        self,
        parameter: nn.Parameter,
        place: _Place,
        parts: list[tuple[SlotPiece, torch.Tensor]],
    ) -> torch.Tensor:
        """Return the sum over ranks of their parts: the whole tensor. Collective over the data group."""
        whole = torch.zeros(
            parameter.numel(), dtype=torch.float32, device=self._engine.device
        )
        for piece, tensor in parts:
            whole[piece.start : piece.stop] = tensor[: piece.stop - piece.start].to(
                whole.device
            )
        all_reduce_(whole, place.set.store.ranks.data)
        return whole.view(parameter.shape)


def _check_shape(parameter: nn.Parameter, value: torch.Tensor) -> None:
    if tuple(value.shape) != tuple(parameter.shape):
        raise ConfigError(
            f"a value of shape {list(value.shape)} for {spec_of(parameter).name} of shape "
            f"{list(parameter.shape)}. Give the whole tensor."
        )


_NO_GRAD = (
    "p.grad of {name} at ZeRO stage {stage}: each of {size} data-parallel ranks holds a shard of the "
    "gradient, so clip_grad_norm_(engine.parameters()) and the like would see none. To clip, set "
    '"gradient_clipping" in the config; engine.get_global_grad_norm() has the norm after the step. '
    "To read or change gradients, call megatron_ds.utils.safe_get_full_grad(p) and "
    "safe_set_full_grad(p, value) on all ranks, or use stage 0."
)
