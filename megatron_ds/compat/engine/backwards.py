"""`Backwards`: the backwards of one engine, by engine.backward(loss) or, as torch has it, loss.backward().

Before a backward adds gradients, ZeRO is armed where its gradients are to be reduced, and at stage 3 layers
are gathered. `engine.backward` does so before it calls autograd. For loss.backward() hooks on the outputs of
the module's forward do it when the backward reaches them, and a callback of autograd ends it:

    loss.backward()    loss → … → output of engine(…): begin → layers, parameters → callback: end

Note: the factor. `engine.backward` multiplies the loss. loss.backward() cannot, so each contribution to a
parameter is multiplied instead, which is the same for every graph: gradients are linear in the loss.

Note: other engines. A backward that engine A runs may go through the outputs of engine B (a GAN). Autograd
numbers its runs; hooks of B see that the run is A's and do nothing.
"""

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...errors import MegatronDSError
from .module_specs import tensors_in
from .parts import EngineParts

_RUNS: set[int] = set()  # autograd's runs that an engine's `backward` began
_DIRECT: dict[
    int, list["Backwards"]
] = {}  # those of loss.backward(), with the engines they reached


class Backwards:
    """Backwards of one engine, which owns the object: what has begun, has been reduced, and is complete."""

    def __init__(self, engine: EngineParts):
        self._engine = weakref.proxy(engine)
        self._is_armed = self._is_mixed = self._is_scaled = self.are_direct = False
        self.are_unsynced = False  # whether all since the last step() were in no_sync
        self._run: int | None = None  # of a loss.backward() under way
        self._gathering: AbstractContextManager = nullcontext()

    def begin(self) -> None:
        """An update begins."""
        self._leave()
        self._is_armed = False  # whether a backward of this update has begun to reduce
        self._is_mixed = False  # whether another engine's loss added to its gradients
        self.are_direct = True  # whether all of the update were loss.backward()
        self._contributions = self._count()  # after the last backward of this engine

    def recount(self) -> None:
        """The gradients so far have moved to other buffers."""
        self._contributions = self._count()

    def has_foreign_gradients(self) -> bool:
        """Return whether losses of other engines have added gradients since the update began."""
        return self._is_mixed or self._count() != self._contributions

    def run(self, loss: torch.Tensor, retain_graph: bool) -> None:
        """The backward of a loss that is multiplied with its factor. Collective."""
        runs: list[int] = []

        def begins(_: torch.Tensor) -> None:
            runs.append(torch._C._current_graph_task_id())
            _RUNS.update(runs)

        self._leave()
        self.are_direct = False
        hook = loss.register_hook(begins)
        completes = self._prepare()
        try:
            with (
                self._engine.gathering.backward()
                if self._engine.gathering
                else nullcontext()
            ):
                loss.backward(retain_graph=retain_graph)
        finally:
            hook.remove()
            _RUNS.difference_update(runs)
        self._finish(completes)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale; the next loss.backward() is that of a scaled loss."""
        self._is_scaled = True
        return loss * self._engine.zero.loss_scale

    def watch(self, output: Any) -> None:
        """Find out when loss.backward() reaches the outputs of a forward."""
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._reached)

    # ------------------------------------------------------------------ within
    def _reached(self, _: torch.Tensor) -> None:
        # Only the first gradient of a run of loss.backward() passes.
        run = torch._C._current_graph_task_id()
        if run in _RUNS or run == self._run:
            return
        engine = self._engine
        # The mean over ranks and micro-batches, which `backward` would apply to the loss.
        factor = 1.0 / (engine.divisor * engine.gradient_accumulation_steps())
        if engine.fp16_enabled() and not self._is_scaled:
            raise MegatronDSError(
                "loss.backward() with fp16: the loss is not multiplied with the loss scale "
                f"({engine.zero.loss_scale:g}), and small gradients would be zero. Call "
                "engine.backward(loss), or engine.scale(loss).backward()."
            )
        # The run becomes this engine's.
        self._leave()
        self._run = run
        self._is_scaled = False
        # Engines that one loss reaches share the run.
        others = _DIRECT.setdefault(run, [])
        others.append(self)
        completes = self._prepare()
        for one in others if len(others) > 1 else ():
            one._is_mixed = True
        self._set_factor(factor)
        # Stage 3 gathers layers until the run ends.
        if engine.gathering:
            self._gathering = engine.gathering.backward()
            self._gathering.__enter__()
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: self._ends(completes)
        )

    def _ends(self, completes: bool) -> None:
        self._leave()
        self._finish(completes)

    def _leave(self) -> None:
        """End a loss.backward() of this engine, also one that an error has cut off: autograd then calls no
        callback, and the next backward ends it."""
        if self._run is None:
            return
        gathering = self._gathering
        self._gathering = nullcontext()
        gathering.__exit__(None, None, None)
        self._set_factor(1.0)
        _DIRECT.pop(self._run, None)
        self._run = None

    def _prepare(self) -> bool:
        """Arm ZeRO before a backward of this engine; whether that completes the gradients of the update."""
        engine = self._engine
        self._is_mixed = self.has_foreign_gradients()
        engine.gradients.hide()
        is_first = not engine._backwards
        self.are_unsynced = engine._in_no_sync and (is_first or self.are_unsynced)
        engine._backwards += 1
        completes = (
            engine.is_gradient_accumulation_boundary() and not engine._in_no_sync
        )
        # Whole gradients are reduced in the last backward of an update, sharded ones in every backward.
        if self._is_armed and engine.settings.zero.stage < 2:
            engine.zero.reopen()
            self._is_armed = False
        if engine.settings.zero.stage >= 2 or completes:
            engine.zero.arm()
            self._is_armed = True
        return completes

    def _finish(self, completes: bool) -> None:
        self._contributions = self._count()
        self._engine.gradients.end_backward(completes)

    def _set_factor(self, factor: float) -> None:
        for s in self._engine.zero.trained:
            s.buckets.factor = factor

    def _count(self) -> int:
        """Gradient contributions that parameters received so far, in all steps."""
        return sum(s.buckets.contributions for s in self._engine.zero.trained)
