"""`EngineParts`: what the gradients and backwards of an engine use of the engine itself."""

from typing import Any, Protocol

import torch
from torch import nn

from ...config import RunConfig
from ...zero.optimizer import ZeroOptimizer
from ..deepspeed.external_groups import DataParallelWorld


class EngineParts(Protocol):
    """An engine, for its own parts. `EngineStatus` has all of these."""

    module: nn.Module
    settings: RunConfig
    zero: ZeroOptimizer
    world: DataParallelWorld
    gradients: Any
    gathering: Any
    optimizer: Any
    backwards: Any
    divisor: int

    @property
    def device(self) -> torch.device:
        """Where the module is."""

    @property
    def has_gradients(self) -> bool:
        """Whether an update has begun."""

    def zero_grad(self) -> None:
        """Discard gradients where the accumulation permits it."""

    def zero_optimization_stage(self) -> int:
        """Stage of ZeRO."""

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an update."""

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch is the last of an update."""

    def fp16_enabled(self) -> bool:
        """Return whether weights are fp16, so that losses are scaled."""
