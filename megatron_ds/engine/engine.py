"""`Engine`: a module of the user's, trained in the user's loop with this package's ZeRO, precision and checkpoints.

    loss = engine(batch)        forward
    engine.backward(loss)       gradients, averaged over accumulation steps and data-parallel ranks
    engine.step()               at the boundary of accumulation: clip, update, next learning rate; before it, counts only

Note: averages. The loss of a micro-batch is its mean over the samples of one rank. `backward` weighs it with
1 / (accumulation steps × data-parallel ranks), and gradients are summed: so the update is that of the mean over the whole
batch, as in DeepSpeed.

Note: gradients of nothing. A parameter that a step does not use has the gradient zero, not none: weight decay and the moments
go on, as in DeepSpeed. It must be unused on all ranks.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import RunConfig
from ..errors import MegatronDSError
from ..mpu.customer import DataParallelWorld
from ..progress import Progress
from ..ramps import make_learning_rate
from ..zero.optimizer import StepResult, ZeroOptimizer
from .gathered import full_state_dict, gathered_parameters, save_safetensors
from .module_gathering import ModuleGathering
from .persist import load_checkpoint, save_checkpoint

logger = logging.getLogger(__name__)


class Engine:
    """Made by `initialize`.

    module     the user's, its parameters now views of the optimizer's buffers; at stage 3 they show NaN outside of forward,
               backward and `gathered_parameters`
    optimizer  the `ZeroOptimizer`
    progress   where training stands; `global_steps` and `skipped_steps` are read from it
    """

    def __init__(self, module: nn.Module, config: RunConfig, world: DataParallelWorld, optimizer: ZeroOptimizer,
                 gathering: ModuleGathering | None):
        self.module, self.config, self.world, self.optimizer = module, config, world, optimizer
        self.gathering = gathering
        self.progress = Progress()
        self.accumulation_steps = config.num_microbatches
        self._learning_rate = make_learning_rate(config)
        self._microbatch = 0                    # of this step, those whose step() was called
        self._had_backward = False
        self._last: StepResult | None = None
        self.zero_grad()

    # ------------------------------------------------------------------ training
    def __call__(self, *args, **kwargs):
        """The module's forward. Collective over the data-parallel ranks at stage 3."""
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of this micro-batch's loss, one number. Once per `step`. Collective.

        Losses that are to be trained together are added up first.
        """
        self._check(loss)
        self._had_backward = True
        share = self.accumulation_steps * self.world.data.size
        if self.config.zero.stage >= 2 or self.is_gradient_accumulation_boundary():
            self.optimizer.arm()
        with self.gathering.backward() if self.gathering else nullcontext():
            (loss.float() * (self.optimizer.loss_scale / share)).backward()

    def step(self) -> None:
        """The micro-batch is done; at the boundary of accumulation update the module. Collective."""
        if not self._had_backward:
            raise MegatronDSError("engine.step() came without an engine.backward(loss) before it: gradients of "
                                  "loss.backward() would be neither scaled nor averaged. Call engine.backward(loss) once "
                                  "before each step.")
        self._had_backward = False
        self._microbatch += 1
        if self._microbatch < self.accumulation_steps:
            return
        rate = self._learning_rate(self.progress)
        self._last = self.optimizer.step(rate, self.config.optimizer.weight_decay)
        self.progress = self.progress.after(self.train_batch_size, 0, skipped=self._last.skipped)
        self._report(rate)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Begin the step anew: forget the gradients of its micro-batches. `step` does so by itself."""
        self._microbatch, self._had_backward = 0, False
        self.optimizer.begin_step()
        if self.gathering:
            self.gathering.hide()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at work is the last of its step: whether the next `step()` updates."""
        return self._microbatch + 1 == self.accumulation_steps

    def train(self, mode: bool = True) -> "Engine":
        self.module.train(mode)
        return self

    def eval(self) -> "Engine":
        return self.train(False)

    # ------------------------------------------------------------------ numbers
    @property
    def train_batch_size(self) -> int:
        return self.config.train.global_batch_size

    @property
    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.train.micro_batch_size

    @property
    def global_steps(self) -> int:
        """Steps tried, those skipped for overflow included."""
        return self.progress.step

    @property
    def skipped_steps(self) -> int:
        return self.progress.skipped_steps

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by; 1 but for fp16."""
        return self.optimizer.loss_scale

    def get_lr(self) -> list[float]:
        """The learning rate of the next step, in a list as from torch's schedulers."""
        return [self._learning_rate(self.progress)]

    def get_global_grad_norm(self) -> float | None:
        """Of the last update: norm of the whole averaged gradient before clipping; None before the first."""
        return None if self._last is None else self._last.grad_norm

    @property
    def has_gradients(self) -> bool:
        """Whether micro-batches of a step are done that was not made yet."""
        return self._had_backward or self._microbatch > 0

    # ------------------------------------------------------------------ checkpoints and whole values
    def save_checkpoint(self, directory: str | os.PathLike, tag: str | None = None,
                        client_state: Mapping[str, Any] | None = None) -> Path:
        """Save weights, optimizer, loss scale and progress; the path of what was written. Collective over all ranks.

        tag           saved in a folder of this name, which `load_checkpoint` without a tag then takes; None: in `directory`
                      itself, by the number of steps
        client_state  plain values (JSON) of yours, given back by `load_checkpoint`; those of rank 0 count
        """
        return save_checkpoint(self, directory, tag, client_state or {})

    def load_checkpoint(self, directory: str | os.PathLike, tag: str | None = None, *,
                        load_optimizer_states: bool = True) -> tuple[str | None, dict[str, Any]]:
        """Go on from a checkpoint saved at any stage on any number of ranks. Collective over all ranks.

        Returns (path, client_state); (None, {}) where the directory holds none yet. At the layout that saved, training goes
        on with the same bits. load_optimizer_states False: the weights alone; steps count from where they are.
        """
        return load_checkpoint(self, directory, tag, load_optimizer_states)

    def gathered_parameters(self, parameters: Iterable[nn.Parameter] | nn.Parameter | None = None,
                            modifier_rank: int | None = None) -> AbstractContextManager[None]:
        """A context inside of which parameters of `module` (None: all) hold their whole values. Collective over all ranks.

        modifier_rank  None: to be read only. Else this data-parallel rank may write into them, in place, and on leaving every
                       rank, and the fp32 masters, have what it wrote
        """
        return gathered_parameters(self, parameters, modifier_rank)

    def full_state_dict(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """The whole module's state_dict in CPU tensors on rank 0, {} on the others. Collective over all ranks.

        Tensors are put together one after the other, out of the masters. dtype: of the parameters; None: the module's.
        """
        return full_state_dict(self, dtype)

    def save_safetensors(self, directory: str | os.PathLike, max_shard_bytes: int = 5 * 10**9,
                         dtype: torch.dtype | None = None) -> None:
        """Write the whole module's tensors as Hugging Face does, `from_pretrained` reads them. Collective over all ranks.

        No rank ever holds more than its own state and one tensor. A tied parameter is written once, under its first name.
        max_shard_bytes: of a file; a larger tensor has a file of its own. dtype: as in `full_state_dict`.
        """
        save_safetensors(self, directory, max_shard_bytes, dtype)

    # ------------------------------------------------------------------ within
    def _check(self, loss: torch.Tensor) -> None:
        if self._had_backward:
            raise MegatronDSError("engine.backward was called twice before engine.step(): each call is one micro-batch. Add "
                                  "up the losses and call it once.")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise MegatronDSError(f"engine.backward needs a loss, a tensor of one number, and got {what}. Take its mean.")
        if not loss.requires_grad:
            raise MegatronDSError("the loss does not depend on a parameter that is trained: it was computed under "
                                  "torch.no_grad(), detached, or all that it uses is frozen.")

    def _report(self, rate: float) -> None:
        every = self.config.logging.log_interval
        if every and self.global_steps % every == 0 and self.world.rank == 0:
            logger.info("step %d | skipped %d | lr %.3e | grad norm %.4f | loss scale %g", self.global_steps,
                        self.skipped_steps, rate, self._last.grad_norm, self._last.loss_scale)
