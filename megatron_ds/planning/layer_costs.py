"""Cost of each kind of layer: the numbers by which the model is cut into stages, and which some schedules read.

    flops       arithmetic, by each layer's own formula; the embedding only looks rows up and costs nothing
    parameters  how many a layer holds
    uniform     every decoder block counts one, other layers nothing
    measured    seconds on this machine (layer_timing.py)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..config import RunConfig
from ..errors import ConfigError
from ..models import MODELS, Layer
from ..mpu.context import ParallelContext


@dataclass(frozen=True)
class LayerCost:
    """Cost of one micro-batch in any one unit: forward, and the two halves of backward as in
    `pipeline.instruction.StageCosts`."""

    forward: float
    input_grad: float
    weight_grad: float

    @property
    def total(self) -> float:
        return self.forward + self.input_grad + self.weight_grad


@dataclass(frozen=True)
class Times:
    """Times in any one unit, by which schedules are planned and compared, whatever rule the model is cut by.

    layers    by kind of layer
    transfer  of an activation between two stages
    source    where the numbers come from, as text
    """

    layers: Mapping[str, LayerCost]
    transfer: float
    source: str


def layer_costs(config: RunConfig, layers: Sequence[Layer]) -> dict[str, LayerCost]:
    """{kind of layer: its cost} by the rule --pipeline-cut. Raises ConfigError for costs that must be measured."""
    return COSTS[config.parallel.pipeline_cut](config, _by_kind(layers))


def estimated_times(config: RunConfig, layers: Sequence[Layer]) -> Times:
    """Times without a measurement: FLOPs for layers, 0 for transfers, since a config has no speed of a network."""
    return Times(_by_flops(config, _by_kind(layers)), 0.0, "estimate: time counted as FLOPs, transfers free")


def _by_kind(layers: Sequence[Layer]) -> dict[str, Layer]:
    return {layer.kind: layer for layer in layers}


def _by_flops(config: RunConfig, layers: Mapping[str, Layer]) -> dict[str, LayerCost]:
    model, train = config.model, config.train
    vocab = config.padded_vocab_size
    costs = {}
    for kind, layer in layers.items():
        flops = layer.flops(model.seq_length, vocab)
        third, scores = flops.total / 3, flops.scores / 3                      # scores have no weight half
        cost = LayerCost(third, third + scores, third - scores)
        # All blocks of a run recompute, or the first of each stage, which are not known before the cut.
        if layer.is_block and train.recompute_granularity and train.recompute_num_layers is None:
            again = cost.forward if train.recompute_granularity == "full" else scores
            cost = replace(cost, input_grad=cost.input_grad + again)
        costs[kind] = cost
    return costs


def _by_parameters(config: RunConfig, layers: Mapping[str, Layer]) -> dict[str, LayerCost]:
    whole = _by_kind(MODELS[config.model.model](config.model, ParallelContext(device=torch.device("meta"))))
    count = lambda kind: float(sum(p.numel() for p in whole[kind].make().parameters()))
    return {kind: LayerCost(*[count(kind)] * 3) for kind in layers}


def _uniform(config: RunConfig, layers: Mapping[str, Layer]) -> dict[str, LayerCost]:
    return {kind: LayerCost(*[float(layer.is_block)] * 3) for kind, layer in layers.items()}


def _not_measured(config: RunConfig, layers: Mapping[str, Layer]) -> dict[str, LayerCost]:
    raise ConfigError("--pipeline-cut measured uses times that are measured when a run starts, but there are no measured "
                      "times here. Use --pipeline-cut flops, or give a file of times with --pipeline-costs-path.")


COSTS: Mapping[str, Callable[[RunConfig, Mapping[str, Layer]], dict[str, LayerCost]]] = {
    "flops": _by_flops, "parameters": _by_parameters, "uniform": _uniform, "measured": _not_measured}
