"""`EngineStatus`: the state of an engine, and its batch sizes, precision, ranks and progress under
DeepSpeed's names.

Methods of DeepSpeed are methods here; its counters and ranks are attributes. Functions on checkpoints and
whole values (engine/checkpoint.py, module_values.py) see this half of `Engine`, whose methods they are.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ...config import RunConfig
from ...errors import ConfigError
from ...moe.balance import StepState
from ...mpu.launch import read_launch
from ...progress.ramps import Progress
from ...zero.optimizer import StepResult
from ..deepspeed.external_groups import DataParallelWorld
from .answers import EngineAnswers
from .autotuning_trial import trial_of
from .backwards import Backwards
from .curriculum_length import curriculum_length
from .curriculum_loader import CurriculumLoader
from .data_efficiency import data_efficiency_of
from .dropped_tokens import schedule_of
from .forward_profile import ForwardProfile, profile_wish
from .gradient_sum import sums_gradients
from .gradients import Gradients
from .loader import EngineLoader
from .module_changes import ModuleChanges
from .module_gathering import ModuleGathering
from .monitor import Monitor
from .optimizer import EngineOptimizer
from .step_clock import StepClock
from .throughput import Throughput


class EngineStatus(EngineAnswers):
    """The half of `Engine` that a program reads.

    module      the user's; its parameters are views of the optimizer's buffers. At stage 3 they show NaN
                outside of forward, backward and `gathered_parameters`
    config      DeepSpeed's keys, "auto" values filled; `settings`: the RunConfig made from them
    optimizer   what `initialize` returns; `zero`: its `ZeroOptimizer`
    gathering   stage 3 with several ranks only
    monitor     its curves
    lr_scheduler, training_dataloader   None where there is none
    gradients, backwards   gradients between backward and step; the backwards themselves
    step_state  what routers remember from step to step, beside parameters
    tput_timer         micro-batches, updates and samples per second
    forward_profile    of the FLOPs of one forward
    curriculum_length  the sequence length that the module is given
    trial              what an autotuner's run measures
    data_efficiency    the JSON's curriculum over samples, and random-LTD
    random_ltd_scheduler  tokens that layers keep; None without random-LTD
    changes            what the program changes in the module during training
    clock              the times of the phases of a step
    divisor            of the sum of gradients over data-parallel ranks: their number, or 1
    is_destroyed       whether `destroy` was called
    progress           steps, samples and skipped updates so far
    micro_steps        micro-batches so far, on each rank: calls of `step`
    configured_groups  the parameter groups before any scheduler has changed them
    """

    # Of `Engine`.
    discard_gradients: Callable[[], None]
    is_gradient_accumulation_boundary: Callable[[], bool]
    gathered_parameters: Callable[..., AbstractContextManager[None]]

    def __init__(
        self,
        module: nn.Module,
        config: Mapping[str, Any],
        settings: RunConfig,
        world: DataParallelWorld,
        optimizer: EngineOptimizer,
        gathering: ModuleGathering | None,
        monitor: Monitor,
    ):
        super().__init__()
        # What the engine was made from.
        self.module = module
        self.config = config
        self.settings = settings
        self.world = world
        self.gathering = gathering
        self.monitor = monitor
        self.optimizer = optimizer
        self.zero = optimizer.zero
        # Its parts.
        self.gradients, self.backwards = Gradients(self), Backwards(self)
        self.step_state = StepState([module], world.data, world.device)
        self.lr_scheduler: Any | None = None
        self.training_dataloader: EngineLoader | CurriculumLoader | None = None
        self.progress = Progress()
        self.micro_steps = 0
        # Numbers of the config, to which a loaded checkpoint is compared.
        self.configured_groups = [dict(group) for group in optimizer.param_groups]
        self._micro_batch_size = settings.train.micro_batch_size
        self._accumulation_steps = settings.num_microbatches
        # Where the engine is within an update.
        self._microbatch = 0  # of this update, those whose step() was called
        self._backwards = 0  # since the last step()
        self._last: StepResult | None = None
        self._forced_boundary: bool | None = None
        self._in_no_sync = self._warned_of_loss = self.is_destroyed = False
        self.tput_timer = Throughput(self.train_batch_size())
        wish = profile_wish("config", config)
        self.forward_profile = ForwardProfile(wish, module, world.world.rank)
        # What a sum of gradients over ranks is divided by.
        sums = sums_gradients("config", config)
        self.divisor = 1 if sums else world.data.size
        self.curriculum_length = curriculum_length("config", config, module)
        self.trial = trial_of("config", config)
        self.data_efficiency = data_efficiency_of("config", config)
        size = self.train_batch_size()
        self.random_ltd_scheduler = schedule_of(self.data_efficiency, size)
        # Rank 0 prints its own times.
        is_timed = self.wall_clock_breakdown() and world.world.rank == 0
        self.clock = StepClock(is_timed, world.device)
        vars(optimizer)["zero_grad"] = self.zero_grad
        self.changes = ModuleChanges(self)
        self.discard_gradients()  # begins the first update

    # ------------------------------------------------------------------ batch sizes
    def train_batch_size(self) -> int:
        """Samples of one update: micro-batch × accumulation steps × data-parallel ranks."""
        return self._micro_batch_size * self._accumulation_steps * self.world.data.size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch on each rank."""
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one update, on each rank."""
        return self._accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)"""
        return self.train_batch_size(), self._micro_batch_size, self._accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the accumulation steps from the next update on. Call it between updates, on all ranks."""
        once = self._micro_batch_size * self.world.data.size
        if train_batch_size < 1 or train_batch_size % once:
            raise ConfigError(
                f"a train_batch_size of {train_batch_size} is not a multiple of {once} = "
                f"micro-batch {self._micro_batch_size} × {self.world.data.size} data-parallel "
                "ranks. Use a multiple."
            )
        self._check_between_updates("set_train_batch_size")
        self._accumulation_steps = train_batch_size // once

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """For the next updates; the accumulation steps stay, and existing loaders keep their batches."""
        if micro_batch_size < 1:
            raise ConfigError(
                f"micro_batch_size={micro_batch_size}: a micro-batch has samples. Use 1 or "
                "more."
            )
        self._check_between_updates("set_train_micro_batch_size")
        self._micro_batch_size = micro_batch_size

    def _check_between_updates(self, name: str) -> None:
        if self.has_gradients:
            raise ConfigError(
                f"engine.{name} in the middle of an update: {self._microbatch} of its "
                "micro-batches are done with the previous value, so the mean of the gradients "
                "would be wrong. Call it right after an update."
            )

    # ------------------------------------------------------------------ progress
    @property
    def has_gradients(self) -> bool:
        """Whether an update has begun: micro-batches are done that no update has used."""
        return self._backwards > 0 or self._microbatch > 0

    @property
    def global_steps(self) -> int:
        """Updates, including those skipped for overflow."""
        return self.progress.step

    @property
    def global_samples(self) -> int:
        """Samples of those updates, over all ranks."""
        return self.progress.samples

    @property
    def skipped_steps(self) -> int:
        """Updates skipped because a gradient was not finite."""
        return self.progress.skipped_steps

    def get_global_grad_norm(self) -> float | None:
        """Norm of the averaged gradient of the last update, before clipping; None before the first update."""
        return None if self._last is None else self._last.grad_norm

    # ------------------------------------------------------------------ numbers of the optimizer
    def get_lr(self) -> list[float]:
        """Learning rates of the next update, one for each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameter groups, until a scheduler changes it."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Betas, or the momentum, of each parameter group."""
        return [
            group.get("betas", group.get("momentum"))
            for group in self.optimizer.param_groups
        ]

    # ------------------------------------------------------------------ configuration
    def zero_optimization(self) -> bool:
        """Return whether any state is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """Return the stage of ZeRO, 0 to 3."""
        return self.settings.zero.stage

    def fp16_enabled(self) -> bool:
        """Return whether the module computes in fp16."""
        return self.settings.optimizer.fp16

    def bfloat16_enabled(self) -> bool:
        """Return whether the module computes in bf16."""
        return self.settings.optimizer.bf16

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale changes during training: fp16 without a fixed one."""
        return self.fp16_enabled() and not self.settings.optimizer.loss_scale

    def loss_scale(self) -> float:
        """Factor of the next loss; 1 except with fp16. (DeepSpeed's: as configured, 0 for dynamic.)"""
        return self.zero.loss_scale

    def gradient_clipping(self) -> float:
        """Largest norm of the gradient; 0: no clipping."""
        return self.settings.optimizer.clip_grad

    def steps_per_print(self) -> int:
        """Updates between lines of progress; 0: none."""
        return self.settings.logging.log_interval

    def wall_clock_breakdown(self) -> bool:
        """Return whether the times of forward, backward and step are printed."""
        # Without the feature that measures them there is no such option.
        return getattr(self.settings.logging, "timing_log_level", 0) > 0

    # ------------------------------------------------------------------ ranks
    @property
    def device(self) -> torch.device:
        """The device on which the module computes."""
        return self.world.device

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.world.world.size

    @property
    def global_rank(self) -> int:
        """Rank of this process among all processes."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """Rank of this process among those on its machine."""
        return read_launch().local_rank

    @property
    def dp_world_size(self) -> int:
        """Number of ranks that get different samples."""
        return self.world.data.size
