"""`PipelineEngine`: what `initialize` makes of a `PipelineModule`. It takes whole batches, not single micro-batches."""

from collections.abc import Iterator
from typing import Any

import torch

from ...mpu.collectives import all_reduce_
from .engine import Engine
from .loader import RepeatingLoader
from .pipeline_module import PipelineError, PipelineModule, interval_of


class PipelineEngine(Engine):
    """An engine of one stage. See `Engine` for all that is not here."""

    module: PipelineModule
    is_first_stage = is_last_stage = True

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._iterator: Iterator[Any] | None = None
        # The interval of the JSON comes before that of the module.
        interval = interval_of("config", self.config)
        if interval > 0:
            self.module.set_checkpoint_interval(interval)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train on a batch: one (inputs, labels) for each micro-batch, of data_iter or of `training_data=`. Collective.

        Returns the mean loss of all micro-batches and data-parallel ranks, fp32 and detached.
        """
        self.train()
        source = self._source(data_iter)
        losses = []
        for _ in range(self.gradient_accumulation_steps()):
            inputs, labels = self._moved(next(source))
            loss = self._loss(super().forward(inputs), labels)
            super().backward(loss)
            losses.append(loss.detach())
            super().step()
        return self._mean(losses)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Return the mean loss of a batch without training, or the outputs. Collective.

        compute_loss       False, or a module without loss_fn: the outputs, of one micro-batch alone or a list
        return_logits      (loss, outputs of all micro-batches in one tensor)
        reduce_output      "avg", or None: the losses of this rank, one for each micro-batch
        num_micro_batches  None: as many as in training
        bcast_loss         has no effect: every rank has the loss
        """
        was_training = self.training
        self.eval()
        outputs = []
        losses = []
        has_loss = compute_loss and self.module.loss_fn is not None
        with torch.no_grad():
            for _ in range(num_micro_batches or self.gradient_accumulation_steps()):
                inputs, labels = self._moved(next(data_iter))
                outputs.append(super().forward(inputs))
                if has_loss:
                    losses.append(self._loss(outputs[-1], labels))
        self.train(was_training)
        # What is asked for.
        if not has_loss:
            return outputs[0] if len(outputs) == 1 else outputs
        loss = losses if reduce_output is None else self._mean(losses)
        return (loss, torch.cat(outputs)) if return_logits else loss

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Where `train_batch` takes its batches from."""
        self._iterator = iterator

    def set_dataloader(self, loader: Any) -> None:
        """A loader that `train_batch` begins anew at its end."""
        self.training_dataloader = loader
        self._iterator = iter(RepeatingLoader(loader))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises PipelineError: a pipeline is trained by whole batches."""
        raise PipelineError(_instead("forward"))

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises PipelineError."""
        raise PipelineError(_instead("backward"))

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Raises PipelineError."""
        raise PipelineError(_instead("step"))

    def is_pipe_parallel(self) -> bool:
        """Return whether there is more than one stage: no."""
        return False

    def _source(self, given: Iterator[Any] | None) -> Iterator[Any]:
        if given is not None:
            return given
        if self._iterator is None and self.training_dataloader is not None:
            self.set_dataloader(self.training_dataloader)
        if self._iterator is None:
            raise PipelineError(
                "engine.train_batch() without data: give it an iterator of (inputs, labels), or training_data= to "
                "initialize."
            )
        return self._iterator

    def _loss(self, outputs: Any, labels: Any) -> torch.Tensor:
        loss_fn = self.module.loss_fn
        return outputs if loss_fn is None else loss_fn(outputs, labels)

    def _moved(self, batch: Any) -> tuple[Any, Any]:
        """(inputs, labels) on the device. Raises PipelineError for another batch."""
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise PipelineError(
                f"a batch of a pipeline is (inputs, labels), but the data has {type(batch).__name__}."
            )
        inputs, labels = _on(batch, self.device)
        return inputs, labels

    def _mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Over micro-batches and data-parallel ranks."""
        mean = torch.stack([loss.float() for loss in losses]).mean()
        all_reduce_(mean, self.world.data)
        return mean / self.world.data.size


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return tuple(_on(inner, device) for inner in value)
    return value


def _instead(name: str) -> str:
    return (
        f"engine.{name}() of a PipelineModule: train_batch(data_iter) and eval_batch(data_iter) run forward, "
        "backward and step for all micro-batches. For a loop of your own give initialize an nn.Sequential."
    )
