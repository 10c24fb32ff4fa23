"""`Engine`: a user's module, trained in the user's loop with this package's ZeRO, precision and checkpoints.

    loss = engine(batch)        forward
    engine.backward(loss)       gradients, averaged over accumulation steps and data-parallel ranks
    engine.step()               at the boundary of accumulation: clip, update, next learning rate; before it,
                                only counts

Note: averages. The loss of a micro-batch is its mean over the samples of one rank. `backward` weights it with
1 / (accumulation steps × data-parallel ranks), and gradients are summed. The update is therefore that of the
mean over the whole batch, as in DeepSpeed. With "gradient_allreduce_op": "sum" the loss is divided by the
accumulation steps alone.

Note: unused parameters. A parameter that a step does not use has a gradient of zeros, not None: weight decay
and moments apply to it, as in DeepSpeed. Where some ranks use it, the others add zeros; see zero/unused.py.

Note: attributes. An engine is a torch module around the user's; a name that the engine lacks is looked up in
the user's module (`engine.generate`). Names that both have, such as `config` and `device`, are the engine's:
use `engine.module.config`.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ...errors import CallError, ConfigError, MegatronDSError
from . import (
    checkpoint,
    data_efficiency,
    destroying,
    dropped_tokens,
    module_values,
)
from .calls import collective
from .curriculum_loader import CurriculumLoader, curriculum_loader
from .json_settings import drops_last
from .loader import EngineLoader
from .module_specs import name_of
from .optimizer import check_step
from .status import EngineStatus
from .step_clock import BACKWARD, EVERY, FORWARD, STEP

logger = logging.getLogger(__name__)


class Engine(EngineStatus):
    """Made by `initialize`. Its constructor and attributes: see `EngineStatus`."""

    # ------------------------------------------------------------------ training
    @collective
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's forward. Collective over the data-parallel ranks at stage 3.

        "curriculum_learning" of the config adds `curriculum_seqlen` to the arguments while the engine trains.
        """
        kwargs |= self.curriculum_length.arguments(self.global_steps, self.training)
        if self.settings.optimizer.fp16 and self.settings.optimizer.fp16_auto_cast:
            args = _in_fp16(args)
            kwargs = _in_fp16(kwargs)
        if torch.is_grad_enabled() and not self.is_destroyed:
            self.changes.train_unfrozen()
        if self.training:
            self.tput_timer.start()
            if self.random_ltd_scheduler is not None:
                self.random_ltd_scheduler.update_seq(self.global_steps)
        with (
            self.clock.phase(FORWARD),
            self.forward_profile.around_forward(self.global_steps),
            self.trial.around_forward(self.global_steps),
        ):
            output = self.module(*args, **kwargs)
        if (
            torch.is_grad_enabled()
            and self.optimizer.param_groups
            and not self.is_destroyed
        ):
            self.backwards.watch(output)
        return output

    @collective
    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Add the gradient of a loss, one number, to those of this micro-batch. Collective.

        Several calls before one `step` add up: the micro-batch is trained on the sum of the losses. At stages
        0 and 1 each further call costs one more reduction; at the other stages every call is reduced anyway.

        scale_wrt_gas  False: the loss is divided by the accumulation steps already
        Returns the loss divided by the accumulation steps, in its number format, as DeepSpeed does.
        """
        self._check(loss)
        self.changes.train_unfrozen()
        self.monitor.add_loss(loss)
        microbatches = self._accumulation_steps if scale_wrt_gas else 1
        # See "Note: averages" above.
        weight = self.zero.loss_scale / (microbatches * self.divisor)
        with self.clock.phase(BACKWARD):
            self.backwards.run(loss.float() * weight, retain_graph)
        return loss if microbatches == 1 else loss / microbatches

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale, for `engine.scale(loss).backward()`, which fp16 needs."""
        self._check(loss)
        return self.backwards.scaled(loss)

    @collective
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End the micro-batch; at a boundary update, and step the scheduler with `lr_kwargs`. Collective."""
        if self._in_no_sync:
            raise CallError(
                "engine.step() inside of engine.no_sync(): gradients are not averaged over the "
                "ranks yet. Leave no_sync before the last backward of the update, and call step "
                "after it."
            )
        self._check_alive()
        if not self._backwards:
            raise MegatronDSError(
                "engine.step() without a backward before it: no loss of this engine's "
                "outputs was differentiated. Call engine.backward(loss) before each step. "
                "(loss.backward() counts if the loss comes from engine(…), not from "
                "engine.module(…).)"
            )
        # A scheduler that would fail after the update is refused before it.
        updates = self.is_gradient_accumulation_boundary()
        if updates and self.lr_scheduler is not None:
            check_step(self.lr_scheduler, lr_kwargs or {})
        self._backwards = 0
        self._microbatch += 1
        self.micro_steps += 1
        if updates:
            with self.clock.phase(STEP):
                self._update(lr_kwargs or {})
            self._show_times()
        self.tput_timer.stop(updates)
        if updates:
            self.trial.end_update(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that belong to no update of this engine; those of its own micro-batches stay.

        Programs call it in every turn of their loop: before the first micro-batch of an update it drops what
        the losses of other engines left in the module; between micro-batches it has no effect, and `step`
        zeroes gradients after each update. `discard_gradients` restarts an update.
        Raises MegatronDSError where gradients of another engine's loss were added to an update that has
        begun: they cannot be taken out again. (Gradients of loss.backward() are dropped before the first
        `step` of an update, since the loss may be another engine's.)

        Gradients of `no_sync` are dropped where no backward outside of it has followed: a program that leaves
        out the averaging adds gradients up by itself. Raises MegatronDSError where they were added to those of
        an earlier micro-batch, which stay.
        """
        # What may be dropped.
        if not self._microbatch and (not self._backwards or self.backwards.are_direct):
            self._begin_step()
        elif self._backwards and self.backwards.are_unsynced:
            self._drop_unsynced()
        # What may not: an error, or a warning.
        elif self.backwards.has_foreign_gradients():
            raise MegatronDSError(
                f"engine.zero_grad() after micro-batch {self._microbatch + (self._backwards > 0)} of the "
                f"{self._accumulation_steps} of an update: the loss of another engine has added "
                "gradients to this engine's, which cannot be separated. Train each engine's update "
                "without the other's backward in between, set requires_grad_(False) on this module while "
                "the other's loss goes through it, or call "
                "engine.discard_gradients(), which restarts the update."
            )
        elif not self._warned_of_loss and self.global_rank == 0:
            self._warned_of_loss = True
            logger.warning(
                "engine.zero_grad() in the middle of an update has no effect: the gradients of "
                "the micro-batches so far are kept (%d accumulation steps). engine.step() zeroes "
                "gradients after each update; engine.discard_gradients() restarts one",
                self._accumulation_steps,
            )

    def discard_gradients(self) -> None:
        """Restart the update: drop the gradients of its micro-batches, and count them anew."""
        if self.has_gradients:
            self.step_state.forget()
        self._begin_step()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch is the last of its update, so that the next `step()` updates."""
        if self._forced_boundary is not None:
            return self._forced_boundary
        return self._microbatch + 1 >= self._accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether every `step()` updates, from now on. None: accumulation steps are counted."""
        self._forced_boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, `backward` adds to this rank's gradients, which the next `backward` outside averages.

        Stages 0 and 1. Losses are divided by the accumulation steps inside, too, as in DeepSpeed 0.19.8;
        earlier versions did not.
        """
        stage = self.settings.zero.stage
        if stage >= 2 or self._in_no_sync:
            raise CallError(
                "engine.no_sync() cannot be nested."
                if self._in_no_sync
                else f"the no_sync context manager is incompatible with ZeRO stage {stage}: it keeps whole "
                "gradients on each rank, and this stage shards them in each backward. Use stage 0 or 1, or "
                "leave no_sync out: gradients add up without it."
            )
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool | None = None,
        data_sampler: Any | None = None,
        collate_fn: Callable[[list], Any] | None = None,
        num_local_io_workers: int = 0,
    ) -> EngineLoader | CurriculumLoader:
        """Return a loader of this rank's micro-batches of `dataset`, an `EngineLoader`.

        With a curriculum over samples in the config, it is a `CurriculumLoader` of micro-batches for training,
        unless `batch_size`, a sampler or another route than "train" is given.
        """
        pin = self.device.type == "cuda" if pin_memory is None else pin_memory
        # The curriculum orders samples of training alone.
        is_ordered = self.data_efficiency.metrics and data_sampler is None
        if is_ordered and batch_size is None and route == "train":
            return curriculum_loader(
                self.data_efficiency,
                dataset,
                (self.train_micro_batch_size_per_gpu(), self._accumulation_steps),
                self.world.data,
                collate_fn,
                pin_memory=pin,
            )
        return EngineLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            self.world.data,
            drop_last=drops_last("config", self.config),
            sampler=data_sampler,
            collate_fn=collate_fn,
            pin_memory=pin,
            num_workers=num_local_io_workers,
        )

    set_data_post_process_func = data_efficiency.set_data_post_process_func
    set_custom_curriculum_learning_schedule = (
        data_efficiency.set_custom_curriculum_learning_schedule
    )
    random_ltd_initialize = dropped_tokens.random_ltd_initialize

    # ------------------------------------------------------------------ as a torch module
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise AttributeError(
                    f"neither the engine nor its module, {type(module).__name__}, has an "
                    f"attribute {name!r}"
                ) from None
            return getattr(module, name)

    def state_dict(  # type: ignore[override]  # torch's overloads add no argument
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the module's; at stage 3 inside of `gathered_parameters()` only. See `full_state_dict`."""
        if self.gathering and not self.gathering.is_whole:
            raise ConfigError(
                "engine.state_dict() at ZeRO stage 3: no rank holds whole parameters. Use "
                "engine.full_state_dict(), or call it inside of `with "
                "engine.gathered_parameters():`."
            )
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(  # type: ignore[override]  # values are copied, so there is no assign=
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> Any:
        """Load rank 0's values into the module and the fp32 masters of all ranks. Collective.

        Names may be those of the module with or without torch.compile.
        """
        own = {name_of(name): name for name in self.module.state_dict(keep_vars=True)}
        renamed = {
            own.get(name_of(name), name): value for name, value in state_dict.items()
        }
        with self.gathered_parameters(modifier_rank=0):
            return self.module.load_state_dict(renamed, strict=strict)

    # DeepSpeed's names
    module_state_dict = state_dict
    load_module_state_dict = load_state_dict

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> "Engine":
        """Raises ConfigError where .to(), .half() or .cuda() would move parameters out of their buffers."""
        for dtype, device in {(p.dtype, p.device) for p in self.module.parameters()}:
            probe = torch.empty(0, dtype=dtype, device=device)
            if fn(probe) is not probe:
                raise ConfigError(
                    f"the engine's parameters are {dtype} on {device} and cannot be moved: "
                    "they are views of its buffers. Set the number format in the config, and "
                    "move the module before initialize."
                )
        return self

    # ------------------------------------------------------------------ checkpoints and whole values
    save_checkpoint = collective(checkpoint.save_checkpoint)
    load_checkpoint = collective(checkpoint.load_checkpoint)
    destroy = collective(destroying.destroy)
    gathered_parameters = module_values.gathered_parameters
    full_state_dict = collective(module_values.full_state_dict)
    save_safetensors = collective(module_values.save_safetensors)
    # `save_fp16_model` is its former name.
    save_16bit_model = save_fp16_model = collective(module_values.save_16bit_model)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """For programs that call it: `full_state_dict()` on rank 0, None on the others. Collective."""
        state = module_values.without_frozen(
            self, self.full_state_dict(), exclude_frozen_parameters
        )
        return None if self.world.rank else state

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    # ------------------------------------------------------------------ within
    def _drop_unsynced(self) -> None:
        if self._microbatch:
            raise MegatronDSError(
                f"engine.zero_grad() after a backward in engine.no_sync in micro-batch {self._microbatch + 1} of the "
                f"{self._accumulation_steps} of an update: gradients of no_sync were added to those of the "
                "micro-batches before it, which cannot be separated. Leave zero_grad out, or call "
                "engine.discard_gradients(), which restarts the update."
            )
        self.discard_gradients()

    def _begin_step(self) -> None:
        self._microbatch = self._backwards = 0
        self.backwards.begin()
        self.gradients.begin()
        self.zero.begin_step()
        if self.gathering:
            self.gathering.hide()

    def _update(self, lr_kwargs: Mapping[str, Any]) -> None:
        rates = self.get_lr()
        self.gradients.hide()
        with self.changes.followed():
            self._last = self.optimizer.update()
        self.step_state.after_step(applied=not self._last.skipped)
        self.progress = self.progress.after(
            self.train_batch_size(), 0, skipped=self._last.skipped
        )
        if self.lr_scheduler is not None and not self._last.skipped:
            self.lr_scheduler.step(**lr_kwargs)
        self._begin_step()
        loss_scale = self._last.loss_scale if self.fp16_enabled() else None
        self.monitor.end_step(self.global_samples, rates[0], loss_scale)
        every = self.steps_per_print()
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            lr = ", ".join(f"{rate:.3e}" for rate in rates)
            show(
                f"step {self.global_steps} | skipped {self.skipped_steps} | lr {lr} | "
                f"grad norm {self._last.grad_norm:.4f} | loss scale {self._last.loss_scale:g}"
            )

    def _show_times(self) -> None:
        """Print the times of the phases as often as progress, or every ten updates."""
        if not self.clock.is_on:
            return
        self.clock.count_update()
        every = self.steps_per_print() or EVERY
        if self.global_steps % every == 0:
            show(self.clock.line())

    def _check_alive(self) -> None:
        if self.is_destroyed:
            raise MegatronDSError(
                "engine.destroy() was called: this engine trains no more. Its module has "
                "the weights; initialize makes a new engine of it."
            )

    def _check(self, loss: torch.Tensor) -> None:
        self._check_alive()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            is_tensor = isinstance(loss, torch.Tensor)
            what = (
                f"a tensor of shape {list(loss.shape)}"
                if is_tensor
                else type(loss).__name__
            )
            raise MegatronDSError(
                f"engine.backward needs a loss, a tensor of one number, but got {what}. "
                "Take its mean."
            )
        if not self.optimizer.param_groups:
            raise MegatronDSError(
                "this engine has no optimizer, so nothing is trained: its config has no "
                '"optimizer", and initialize got no optimizer=. Add one of them.'
            )
        if not loss.requires_grad:
            raise MegatronDSError(
                "the loss does not depend on a trained parameter: it was computed under "
                "torch.no_grad(), it was detached, or all parameters that it uses are "
                "frozen."
            )


def show(line: str) -> None:
    """Log a line; where the program has configured no logging, write it to stdout, as DeepSpeed does."""
    if logger.hasHandlers():
        logger.info(line)
    else:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _in_fp16(value: Any) -> Any:
    """Return the value with all floating-point tensors in its tuples, lists and dicts cast to fp16."""
    if isinstance(value, torch.Tensor):
        return value.half() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _in_fp16(inner) for key, inner in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(_in_fp16, value))
    return value
