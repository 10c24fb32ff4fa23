"""`Status`: what a program asks an engine about batch sizes, precision, ranks and progress, under DeepSpeed's names.

What DeepSpeed has as a method is one here; counters and ranks are attributes, as there.
"""

from typing import Any

import torch

from ..errors import ConfigError
from ..mpu.launch import read_launch


class Status:
    """The read-only half of `Engine`."""

    # ------------------------------------------------------------------ batch sizes
    def train_batch_size(self) -> int:
        """Samples of one update: micro-batch × accumulation steps × data-parallel ranks."""
        return self._micro_batch_size * self._accumulation_steps * self.world.data.size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one update, on each rank."""
        return self._accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)"""
        return self.train_batch_size(), self._micro_batch_size, self._accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """From the next update on, by another number of accumulation steps. Call it between updates, on all ranks."""
        once = self._micro_batch_size * self.world.data.size
        if train_batch_size < 1 or train_batch_size % once:
            raise ConfigError(f"a train_batch_size of {train_batch_size} is not a multiple of {once} = micro-batch "
                              f"{self._micro_batch_size} × {self.world.data.size} data-parallel ranks. Use a multiple.")
        self._check_between_updates("set_train_batch_size")
        self._accumulation_steps = train_batch_size // once

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """From the next update on; the accumulation steps stay. A loader made earlier keeps its batches."""
        if micro_batch_size < 1:
            raise ConfigError(f"a micro-batch of {micro_batch_size} samples: use 1 or more.")
        self._check_between_updates("set_train_micro_batch_size")
        self._micro_batch_size = micro_batch_size

    # ------------------------------------------------------------------ progress
    @property
    def global_steps(self) -> int:
        """Updates tried, those skipped for overflow included."""
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
        """Of the last update: norm of the whole averaged gradient before clipping; None before the first."""
        return None if self._last is None else self._last.grad_norm

    # ------------------------------------------------------------------ numbers of the optimizer
    def get_lr(self) -> list[float]:
        """The learning rates of the next update, one for each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Of all parameter groups, from the next update on, until a scheduler changes it."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Betas, or the momentum, of each parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    # ------------------------------------------------------------------ configuration
    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        return self.settings.zero.stage

    def fp16_enabled(self) -> bool:
        return self.settings.optimizer.fp16

    def bfloat16_enabled(self) -> bool:
        return self.settings.optimizer.bf16

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes during training: fp16 without a fixed one."""
        return self.fp16_enabled() and not self.settings.optimizer.loss_scale

    def loss_scale(self) -> float:
        """What the next loss is multiplied by; 1 but for fp16. (DeepSpeed's returns the configured one, 0 for dynamic.)"""
        return self.zero.loss_scale

    def gradient_clipping(self) -> float:
        """Largest norm of the gradient; 0: no clipping."""
        return self.settings.optimizer.clip_grad

    def steps_per_print(self) -> int:
        """Updates between lines of progress; 0: none."""
        return self.settings.logging.log_interval

    def wall_clock_breakdown(self) -> bool:
        """Always False: the phases of a step are not timed, which would synchronise with the device."""
        return False

    # ------------------------------------------------------------------ ranks
    @property
    def device(self) -> torch.device:
        """Where the module computes."""
        return self.world.device

    @property
    def world_size(self) -> int:
        return self.world.world.size

    @property
    def global_rank(self) -> int:
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """Of the processes on this machine."""
        return read_launch().local_rank

    @property
    def dp_world_size(self) -> int:
        """Ranks that get different samples."""
        return self.world.data.size
