"""`Architecture`: all that a run takes from the name of a model, so that nothing above this room asks which model it trains.

To add one: a function from the model section of the configuration to a list of layers, a loss, what it reads, and

    MODELS.register("mine")(Architecture(layers=my_layers, loss=my_loss, data=MY_DATA))
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..data.kind import DataKind
from ..registry import Registry
from .layer import Layer


@dataclass(frozen=True)
class Architecture:
    """Called, it gives the list of layers.

    layers  function(model config, *, tp, sequence_parallel, dtype, device, seed, recompute_granularity,
            recompute_num_layers) -> list[Layer]
    loss    function(what the last layer returns, batch, *, tp, vocab_size, label_smoothing, per_token) -> losses.Loss
    data    how its samples are made up, found in a corpus, and put into a batch
    terms   function(model config) -> names of what the objective holds beside the tokens' loss, in the order of `Loss.terms`
    causal  no token sees a later one: half of the scores are no work
    head    kind of its last layer
    fields  of the model config that decide shapes or meaning of its weights, beside those of all models
    """

    layers: Callable[..., list[Layer]]
    loss: Callable
    data: DataKind
    terms: Callable[[object], tuple[str, ...]] = lambda config: ()
    causal: bool = True
    head: str = "head"
    fields: tuple[str, ...] = ()

    def __call__(self, config, **options) -> list[Layer]:
        return self.layers(config, **options)


MODELS: Registry[Architecture] = Registry("model")
