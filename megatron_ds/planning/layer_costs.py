"""What a layer of each kind costs: the numbers that the model is cut by, and that some schedules look at.

    flops       arithmetic, by planning/flops.py; the embedding, which only looks rows up, costs none
    parameters  how many a layer holds
    uniform     decoder layers alike, nothing else counts
    measured    seconds on this machine (layer_timing.py)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..config import RunConfig
from ..errors import ConfigError
from ..models import MODELS, Layer
from ..mpu.context import ParallelContext
from .flops import attention_flops, layer_flops


@dataclass(frozen=True)
class LayerCost:
    """Of one micro-batch, in any one unit: forward, and the two halves of backward as `pipeline.costs.StageCosts` has them."""

    forward: float
    input_grad: float
    weight_grad: float

    @property
    def total(self) -> float:
        return self.forward + self.input_grad + self.weight_grad


@dataclass(frozen=True)
class Times:
    """How long things take, in any one unit: layers by their kind, and what travels between two stages. What a schedule is
    planned and judged by, whatever the model is cut by.

    source   where the numbers come from, in words
    """

    layers: Mapping[str, LayerCost]
    transfer: float
    source: str


def layer_costs(config: RunConfig, layers: Sequence[Layer]) -> dict[str, LayerCost]:
    """{kind of layer: its cost} by the rule --pipeline-cut. Raises ConfigError for costs that have to be measured."""
    return COSTS[config.parallel.pipeline_cut](config, {layer.kind for layer in layers})


def reckoned_times(config: RunConfig, layers: Sequence[Layer]) -> Times:
    """Without anything measured: how fast the network is, a config does not say."""
    return Times(_by_flops(config, {layer.kind for layer in layers}), 0.0, "estimate: time counted as FLOPs, transfers free")


def _by_flops(config: RunConfig, kinds: set[str]) -> dict[str, LayerCost]:
    model, train = config.model, config.train
    vocab = config.padded_vocab_size
    costs = {}
    for kind in kinds:
        third = layer_flops(model, kind, model.seq_length, vocab) / 3
        scores = attention_flops(model, model.seq_length) / 3 if kind == "block" else 0.0     # these have no weights
        costs[kind] = LayerCost(third, third + scores, third - scores)
    # All blocks of a run recompute, or the first of each stage, which are not known before the cut.
    if "block" in costs and train.recompute_granularity and train.recompute_num_layers is None:
        block = costs["block"]
        again = block.forward if train.recompute_granularity == "full" else attention_flops(model, model.seq_length) / 3
        costs["block"] = replace(block, input_grad=block.input_grad + again)
    return costs


def _by_parameters(config: RunConfig, kinds: set[str]) -> dict[str, LayerCost]:
    ctx = ParallelContext(device=torch.device("meta"))
    layers = {layer.kind: layer for layer in MODELS[config.model.model](config.model, ctx)}
    count = lambda kind: float(sum(p.numel() for p in layers[kind].make().parameters()))
    return {kind: LayerCost(*[count(kind)] * 3) for kind in kinds}


def _uniform(config: RunConfig, kinds: set[str]) -> dict[str, LayerCost]:
    return {kind: LayerCost(*[float(kind == "block")] * 3) for kind in kinds}


def _not_measured(config: RunConfig, kinds: set[str]) -> dict[str, LayerCost]:
    raise ConfigError("--pipeline-cut measured uses times that are measured when a run starts, but there are no measured "
                      "times here. Use --pipeline-cut flops, or give a file of times with --pipeline-costs-path.")


COSTS: Mapping[str, Callable[[RunConfig, set[str]], dict[str, LayerCost]]] = {
    "flops": _by_flops, "parameters": _by_parameters, "uniform": _uniform, "measured": _not_measured}
