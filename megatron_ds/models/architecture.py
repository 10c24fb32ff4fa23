"""`Architecture`: the layers, loss and data of a model, registered in `MODELS` by the model's name.

Code above this package takes all three from the registry and does not depend on the model. A model with the
data and the loss of a GPT is a function from the model section of the configuration to its layers:

    @MODELS.register("mine")
    @language_model
    def my_layers(config: ModelConfig, ctx: ParallelContext) -> list[Layer]: ...

Any other is registered as MODELS.register("mine")(Architecture(layers=my_layers, loss=my_loss,
data=MY_DATA)).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..batch.batch import Batch
from ..config.options.model import ModelConfig
from ..data.kind import DataKind
from ..data.samples.gpt_data import GPT_DATA
from ..mpu.context import ParallelContext
from ..mpu.group import Group
from ..registry import Registry
from ..tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from ..tensor_parallel.logits_in_chunks import LogitsInChunks
from .layer import Layer


@dataclass(frozen=True)
class Loss:
    """The main loss of one micro-batch on the last stage: fp32 scalars on the device.

    objective  to be differentiated; further loss terms are in the ledger of the batch
    total      sum of the losses of the tokens that count on this rank, detached; for the log
    tokens     number of tokens that count, of the whole sequences
    """

    objective: torch.Tensor
    total: torch.Tensor
    tokens: torch.Tensor


def gpt_loss(
    logits: torch.Tensor | LogitsInChunks,
    batch: Batch,
    *,
    tp: Group,
    vocab_size: int,
    label_smoothing: float = 0.0,
    per_token: bool = False,
) -> Loss:
    """Loss of logits [s, b, Vp / t] against `batch.labels` [b, s], where `batch.loss_mask` is not 0.

    The objective is the mean over the counted tokens of this micro-batch (0 when none counts), so every
    micro-batch has the same weight, as in Megatron. Under context parallelism it is the rank's share of that
    mean. `per_token`: the objective is their sum, and the
    optimizer step divides the gradient by the tokens of the whole global batch, so every token has the same
    weight. Label smoothing applies to training alone. The logits are overwritten. Collective over tp.
    """
    smoothing = label_smoothing if batch.training else 0.0
    losses = token_losses(logits, batch, tp, vocab_size, smoothing)
    mask = batch.loss_mask.t().to(losses.dtype)
    total = (losses * mask).sum()
    tokens = batch.counted_tokens
    return Loss(
        total if per_token else total / tokens.clamp(min=1.0), total.detach(), tokens
    )


def token_losses(
    logits: torch.Tensor | LogitsInChunks,
    batch: Batch,
    tp: Group,
    vocab_size: int,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """logits [s, b, Vp / t] → the cross entropy of each token with its label, fp32 [s, b], the same on every rank.

    The logits are overwritten. Collective over tp.
    """
    labels = batch.labels.t()
    if isinstance(logits, LogitsInChunks):
        return logits.cross_entropy(labels, vocab_size, label_smoothing)
    return vocab_parallel_cross_entropy(logits, labels, tp, vocab_size, label_smoothing)


@dataclass(frozen=True)
class Architecture:
    """A callable: (model config, **options) → the list of layers.

    layers  function(model config, ParallelContext) -> list[Layer]
    loss    function(output of the last layer, batch, *, tp, vocab_size, label_smoothing, per_token) -> Loss.
            Further terms of the objective go to `batch.ledger`
            With --cross-entropy-chunks the heads of this package return `LogitsInChunks` in place of logits
    data    makes mock samples, finds samples in a corpus, and collates them into a batch
    fields  fields of the model config that decide shapes or meaning of its weights, besides those that all
            models have
    """

    layers: Callable[..., list[Layer]]
    loss: Callable[..., Loss]
    data: DataKind
    fields: tuple[str, ...] = ()

    def __call__(self, config: ModelConfig, ctx: ParallelContext) -> list[Layer]:
        return self.layers(config, ctx)


class Models(Registry[Architecture]):
    """The registry of architectures."""

    def _check(self, name: str, thing: Architecture) -> None:
        """Raise TypeError for a plain function, which has no loss and no data."""
        if not isinstance(thing, Architecture):
            raise TypeError(
                f"model {name!r} is registered as {thing!r}, which has no loss and no data kind. "
                "Write @language_model below @MODELS.register if it has the loss and data of a GPT; "
                "otherwise register an Architecture."
            )


MODELS = Models("model")


def language_model(layers: Callable[..., list[Layer]]) -> Architecture:
    """Decorator: these layers, with the loss and the data of a GPT."""
    return Architecture(layers, gpt_loss, GPT_DATA)
