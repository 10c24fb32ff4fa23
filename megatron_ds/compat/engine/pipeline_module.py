"""`PipelineModule`: DeepSpeed's module of a list of layers, run as one stage.

    module = PipelineModule(
        [TiedLayerSpec("words", nn.Embedding, 50, 32), LayerSpec(Block, 32), nn.Linear(32, 50)],
        num_stages=1,
        loss_fn=loss,
    )
    engine, *_ = initialize(model=module, …)
    loss = engine.train_batch(batches)

An engine does not split a module over ranks into stages: all ranks are data-parallel, and ZeRO, also stage 3, divides
the state. More than one stage is refused. Parameters have DeepSpeed's names: `3.weight` of the layer with the number 3,
`tied_modules.words.weight` of tied layers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...config.options.option import shown
from ...errors import CallError, ConfigError

Layer = Callable[[Any], Any]
BLOCK = "pipeline"
INTERVAL = "activation_checkpoint_interval"


class PipelineError(CallError):
    """A call that a pipeline engine does not have."""


class LayerSpec:
    """A layer that is made by the module: its class and the arguments of its constructor."""

    def __init__(
        self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any
    ):
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ConfigError(
                f"LayerSpec({typename!r}): give the class of a torch module, then the arguments of its constructor."
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Make the layer. log has no effect."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that is one with the others of the same key: the first is made, and all use it.

    forward_fn  forward_fn(module, inputs) in place of the module's forward; None: that
    tied_weight_attr  has no effect: the whole layer is one
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: Sequence[str] | str = ("weight",),
        **module_kwargs: Any,
    ):
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = tied_weight_attr


class PipelineModule(nn.Module):
    """Runs its layers one after the other. Several inputs are one tuple, which each layer takes as it is.

    layers       modules, `LayerSpec`s and functions, or an nn.Sequential
    num_stages   1, or a topology with one stage
    loss_fn      loss_fn(outputs, labels), for `engine.train_batch`; None: the outputs are the loss
    seed_layers  call seed_fn(base_seed + number) before each layer is made; by default torch.manual_seed
    activation_checkpoint_interval  layers that are recomputed together in the backward; 0: none are
    activation_checkpoint_func      called as func(function, *inputs); None: torch's checkpoint, not re-entrant
    checkpointable_layers           names of the only classes that are recomputed; None: those with parameters
    partition_method, dynamic_shape have no effect with one stage
    """

    def __init__(
        self,
        layers: Iterable[LayerSpec | nn.Module | Layer],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ):
        super().__init__()
        _check_stages(num_stages, topology)
        self.loss_fn = loss_fn
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func or partial(
            checkpoint, use_reentrant=False
        )
        self.checkpointable_layers = checkpointable_layers
        self.tied_modules = nn.ModuleDict()
        seed = (seed_fn or torch.manual_seed) if seed_layers else None
        # The layers, in the order in which DeepSpeed makes them.
        self.forward_funcs: list[Layer] = []
        for number, layer in enumerate(layers):
            if seed is not None:
                seed(base_seed + number)
            self.forward_funcs.append(self._layer(number, layer))

    def forward(self, forward_input: Any) -> Any:
        """Return the outputs of the last layer."""
        every = self.activation_checkpoint_interval
        if every <= 0 or not self.training:
            return _run(self.forward_funcs, forward_input)
        for first in range(0, len(self.forward_funcs), every):
            functions = self.forward_funcs[first : first + every]
            run = partial(_run_packed, functions)
            inputs = _packed(forward_input)
            if self._is_recomputed(functions):
                forward_input = self.activation_checkpoint_func(run, *inputs)
            else:
                forward_input = run(*inputs)
        return forward_input

    def set_checkpoint_interval(self, interval: int) -> None:
        """Set how many layers are recomputed together; 0: none are."""
        self.activation_checkpoint_interval = interval

    def num_pipeline_stages(self) -> int:
        """One."""
        return 1

    def _layer(self, number: int, layer: LayerSpec | nn.Module | Layer) -> Layer:
        """Return the function of a layer, which is registered under its number."""
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            tied = self.tied_modules[layer.key]
            return tied if layer.forward_fn is None else partial(layer.forward_fn, tied)
        module = layer.build() if isinstance(layer, LayerSpec) else layer
        if isinstance(module, nn.Module):
            self.add_module(str(number), module)
        elif not callable(module):
            raise ConfigError(
                f"PipelineModule: layer {number} is {type(module).__name__}. Give a torch module, a LayerSpec or a "
                "function."
            )
        return module

    def _is_recomputed(self, functions: Sequence[Layer]) -> bool:
        if self.checkpointable_layers is not None:
            return all(
                type(function).__name__ in self.checkpointable_layers
                for function in functions
            )
        return any(map(_has_parameters, functions))


def interval_of(name: str, block: Mapping[str, Any]) -> int:
    """Return how many layers the JSON recomputes together; 0 where it has no number. Raises ConfigError for another
    value.

    name: of the config, for messages
    """
    inner = block.get(BLOCK)
    interval = inner.get(INTERVAL, 0) if isinstance(inner, Mapping) else 0
    if isinstance(interval, bool) or not isinstance(interval, int):
        raise ConfigError(
            f'{name}: "{BLOCK}.{INTERVAL}" is {shown(interval)}; it must be an integer, 0 for no recomputation.'
        )
    return interval


def _check_stages(num_stages: int | None, topology: Any) -> None:
    """Raises ConfigError unless there is one stage."""
    if num_stages is None and topology is None:
        raise ConfigError(
            "PipelineModule needs num_stages or topology. Give num_stages=1."
        )
    stages = num_stages
    if topology is not None:
        stages = topology.get_dim("pipe") or 1
        if topology.get_dim("model") > 1:
            raise ConfigError(
                f"PipelineModule: the topology splits layers over {topology.get_dim('model')} tensor-parallel ranks. "
                "Give num_stages=1, and mpu= to initialize."
            )
    if stages != 1:
        raise ConfigError(
            f"PipelineModule with {stages} stages: an engine runs all layers on each rank. Give num_stages=1, with "
            '"zero_optimization": {"stage": 3} where the layers need the memory of several ranks; all ranks are then '
            "data-parallel. pretrain_gpt.py splits this package's models with --pipeline-model-parallel-size."
        )


def _packed(inputs: Any) -> tuple[Any, ...]:
    return inputs if isinstance(inputs, tuple) else (inputs,)


def _run_packed(functions: Sequence[Layer], *inputs: Any) -> Any:
    return _run(functions, inputs[0] if len(inputs) == 1 else inputs)


def _run(functions: Sequence[Layer], value: Any) -> Any:
    for function in functions:
        value = function(value)
    return value


def _has_parameters(function: Layer) -> bool:
    parts: Iterator[Any] = iter((function, *getattr(function, "args", ())))
    return any(
        isinstance(part, nn.Module) and next(part.parameters(), None) is not None
        for part in parts
    )
