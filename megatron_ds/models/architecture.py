"""`Architecture`: what a run takes from the name of a model; nothing above this package asks which model it
trains.

A model with the data and the loss of a GPT is a function from the model section of the configuration to its
layers:

    @MODELS.register("mine")
    @language_model
    def my_layers(config: ModelConfig, ctx: ParallelContext) -> list[Layer]: ...

Any other is registered as MODELS.register("mine")(Architecture(layers=my_layers, loss=my_loss,
data=MY_DATA)).
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..config.model_options import ModelConfig
from ..data.kind import DataKind
from ..data.samples.gpt_data import GPT_DATA
from ..mpu.context import ParallelContext
from ..registry import Registry
from .layer import Layer
from .losses import Loss, gpt_loss


@dataclass(frozen=True)
class Architecture:
    """A callable: (model config, **options) → the list of layers.

    layers  function(model config, ParallelContext) -> list[Layer]
    loss    function(output of the last layer, batch, *, tp, vocab_size, label_smoothing, per_token) -> losses.Loss.
            Further terms of the objective go to `batch.ledger`
    data    makes mock samples, finds samples in a corpus, and collates them into a batch
    fields  fields of the model config that decide shapes or meaning of its weights, beside those of all models
    """

    layers: Callable[..., list[Layer]]
    loss: Callable[..., Loss]
    data: DataKind
    fields: tuple[str, ...] = ()

    def __call__(self, config: ModelConfig, ctx: ParallelContext) -> list[Layer]:
        return self.layers(config, ctx)


class Models(Registry[Architecture]):
    """The registry of architectures."""

    def register(self, name: str, *aliases: str) -> Callable[[Architecture], Architecture]:
        """Raises TypeError for a plain function, which has no loss and no data."""
        add = super().register(name, *aliases)

        def checked(architecture: Architecture) -> Architecture:
            if not isinstance(architecture, Architecture):
                raise TypeError(
                    f"model {name!r} is registered as {architecture!r}, which has no loss and no data kind. "
                    "Write @language_model below @MODELS.register if it has the loss and data of a GPT; "
                    "otherwise register an Architecture."
                )
            return add(architecture)

        return checked


MODELS = Models("model")


def language_model(layers: Callable[..., list[Layer]]) -> Architecture:
    """Decorator: these layers, with the loss and the data of a GPT."""
    return Architecture(layers, gpt_loss, GPT_DATA)
