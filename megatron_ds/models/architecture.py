"""`Architecture`: all that a run takes from the name of a model, so that nothing above this room asks which model it trains.

To add one that reads and is trained on what a GPT is, a function from the model section of the configuration to its layers:

    @MODELS.register("mine")
    @language_model
    def my_layers(config, *, tp, **options): ...

Any other: MODELS.register("mine")(Architecture(layers=my_layers, loss=my_loss, data=MY_DATA)).
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..data.gpt_data import GPT_DATA
from ..data.kind import DataKind
from ..registry import Registry
from .layer import Layer
from .losses import gpt_loss


@dataclass(frozen=True)
class Architecture:
    """Called, it gives the list of layers.

    layers  function(model config, *, tp, sequence_parallel, dtype, device, seed, recompute_granularity,
            recompute_num_layers) -> list[Layer]
    loss    function(what the last layer returns, batch, *, tp, vocab_size, label_smoothing, per_token) -> losses.Loss
    data    how its samples are made up, found in a corpus, and put into a batch
    terms   function(model config) -> names of what the objective holds beside the tokens' loss, in the order of `Loss.terms`
    fields  of the model config that decide shapes or meaning of its weights, beside those of all models
    """

    layers: Callable[..., list[Layer]]
    loss: Callable
    data: DataKind
    terms: Callable[[object], tuple[str, ...]] = lambda config: ()
    fields: tuple[str, ...] = ()

    def __call__(self, config, **options) -> list[Layer]:
        return self.layers(config, **options)


class Models(Registry[Architecture]):
    def register(self, name: str, *aliases: str) -> Callable[[Architecture], Architecture]:
        """Raises TypeError for a function of layers that nobody made an Architecture of."""
        add = super().register(name, *aliases)

        def checked(thing: Architecture) -> Architecture:
            if not isinstance(thing, Architecture):
                raise TypeError(f"model {name!r} is registered as {thing!r}, which has no loss and no data kind. Write "
                                "@language_model below @MODELS.register, if they are those of a GPT; otherwise register an "
                                "Architecture.")
            return add(thing)

        return checked


MODELS = Models("model")


def language_model(layers: Callable[..., list[Layer]]) -> Architecture:
    """Decorator: these layers, with the loss and the data of a GPT."""
    return Architecture(layers, gpt_loss, GPT_DATA)
