"""Cost of each kind of layer: the numbers by which the model is cut into stages, and which some schedules read.

    flops       arithmetic, by each layer's own formula; the embedding only looks rows up and costs nothing
    parameters  how many a layer holds
    uniform     every decoder block counts one, other layers nothing
    measured    seconds on this machine (layer_timing.py)
"""

import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from ..config import RunConfig
from ..data.batch import Batch
from ..errors import ConfigError
from ..models import MODELS, Layer
from ..mpu.agree import on_one_rank
from ..mpu.channels import Channels
from ..mpu.collectives import all_gather_object
from ..mpu.context import ParallelContext
from ..mpu.group import Group, coordinates_of
from ..mpu.mesh import Mesh
from ..tensor_parallel.init import initialize
from .run_model import blank_batch


@dataclass(frozen=True)
class LayerCost:
    """Cost of one micro-batch in any one unit: forward, and the two halves of backward as in `pipeline.costs.StageCosts`."""

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


logger = logging.getLogger(__name__)
REPEATS, WARM_UP = 5, 2
SOURCE = "by times measured here"


def measured_times(config: RunConfig, mesh: Mesh, ctx: ParallelContext) -> Times | None:
    """In seconds, the same on all ranks; None where the model is cut by something else.

    Read from --pipeline-costs-path where that holds times of such a run; else measured, and written there. Collective over the
    world.
    """
    if config.parallel.pipeline_cut != "measured":
        return None
    path, what = config.parallel.pipeline_costs_path, _what(config, mesh.device)
    world = mesh.group("world")
    if path and (found := on_one_rank(world, lambda: read_costs(Path(path), what))):
        return found
    mine = time_layers(config, ctx)
    transfer = time_transfer(config, mesh.group("pp"), ctx)
    everybody = all_gather_object((transfer, {kind: astuple(cost) for kind, cost in mine.items()}), world)
    layers = {kind: LayerCost(*map(statistics.fmean, zip(*(rank[kind] for _, rank in everybody)))) for kind in mine}
    agreed = Times(layers, statistics.fmean(seconds for seconds, _ in everybody), SOURCE)
    if path:
        on_one_rank(world, lambda: write_costs(Path(path), what, agreed))
    return agreed


def read_costs(path: Path, what: dict) -> Times | None:
    """The times in a file, None where there is none or they are of another run. Raises ConfigError where it cannot be read."""
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        told, parts = document["of"], LayerCost.__dataclass_fields__
        layers = {kind: LayerCost(*(float(row[part]) for part in parts)) for kind, row in document["seconds"].items()}
        times = Times(layers, float(document["transfer_seconds"]), SOURCE)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--pipeline-costs-path {path} contains no measured times ({type(error).__name__}: {error}). Remove "
                          "the file; the next run measures them again.") from None
    differing = [f"{name} {told.get(name)} there, {value} here" for name, value in what.items() if told.get(name) != value]
    if differing:
        logger.warning("--pipeline-costs-path %s has times of another run (%s); they are measured again", path,
                       "; ".join(differing))
    return None if differing else times


def write_costs(path: Path, what: dict, times: Times) -> None:
    rows = {kind: dict(zip(LayerCost.__dataclass_fields__, astuple(cost))) for kind, cost in times.layers.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    document = {"of": what, "seconds": rows, "transfer_seconds": times.transfer}
    beside.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


def time_layers(config: RunConfig, ctx: ParallelContext) -> dict[str, LayerCost]:
    """{kind of layer: seconds of one micro-batch} on this rank. Collective over the tensor-parallel group."""
    model, tp, device = config.model, ctx.tp, ctx.device
    architecture = MODELS[model.model]
    layers = architecture(model, ctx)
    x = _activation(config, ctx)
    batch = blank_batch(config, ctx.slice, device)
    loss = lambda y: architecture.loss(y, batch, tp=tp, vocab_size=model.vocab_size).objective
    costs = {}
    first, last = layers[0].kind, layers[-1].kind
    for kind, layer in {layer.kind: layer for layer in layers}.items():
        module = layer.make()
        initialize(list(module.parameters()), config.train.seed, coordinates_of(tp))
        given = None if kind == first else x
        costs[kind] = _time_layer(module, given, batch, loss if kind == last else lambda y: y, device)
        del module
    return costs


def time_transfer(config: RunConfig, pp: Group, ctx: ParallelContext) -> float:
    """Seconds that an activation takes from a pipeline rank to the next, with nothing else under way; 0 on a single rank.

    It goes round all of them, one after another. Collective over `pp`.
    """
    if pp.size == 1:
        return 0.0
    channels, x, device = Channels(pp), _activation(config, ctx), ctx.device
    behind, ahead = (pp.rank - 1) % pp.size, (pp.rank + 1) % pp.size
    rounds = []
    for _ in range(WARM_UP + REPEATS):
        start = _now(device)
        if pp.rank == 0:
            channels.send("act", ahead, x)
        came = channels.recv("act", behind, tuple(x.shape), x.dtype, device).wait()
        if pp.rank:
            channels.send("act", ahead, came)
        channels.drain()
        rounds.append(_now(device) - start)
    return min(rounds[WARM_UP:]) / pp.size


def _activation(config: RunConfig, ctx: ParallelContext) -> torch.Tensor:
    """What stages send one another: [s(/t), b, h]."""
    part = ctx.slice
    shape = part.hidden_shape(part.batch_length(config.model.seq_length), config.train.micro_batch_size,
                              config.model.hidden_size)
    return torch.ones(shape, dtype=ctx.dtype, device=ctx.device)


def _time_layer(module: nn.Module, x: torch.Tensor | None, batch: Batch, finish: Callable, device: torch.device) -> LayerCost:
    """x: the input; None for a layer that reads tokens, whose backward is all of its weights."""
    def run(weights: bool) -> tuple[float, float]:
        given = None if x is None else x.detach().requires_grad_()
        for p in module.parameters():
            p.requires_grad_(weights)
            p.grad = None
        start = _now(device)
        y = finish(module(given, batch))
        middle = _now(device)
        if y.requires_grad:
            y.backward(None if y.dim() == 0 else torch.ones_like(y))
        return middle - start, _now(device) - middle

    # In turns, so that a machine that grows slower or faster treats both alike; the best of each is what it takes undisturbed.
    times = [(run(True), run(False)) for _ in range(WARM_UP + REPEATS)][WARM_UP:]
    forward = min(whole[0] for whole, _ in times)
    both, inputs = min(whole[1] for whole, _ in times), 0.0 if x is None else min(half[1] for _, half in times)
    return LayerCost(forward, min(inputs, both), max(both - inputs, 0.0))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _what(config: RunConfig, device: torch.device) -> dict:
    """What decides the times: of another such run they would be others."""
    m, train, parallel = config.model, config.train, config.parallel
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return {"hidden_size": m.hidden_size, "ffn_size": m.ffn_size, "heads": m.num_attention_heads, "groups": m.query_groups,
            "head_dim": m.head_dim, "activation": m.activation, "normalization": m.normalization, "seq_length": m.seq_length,
            "vocab_size": config.padded_vocab_size, "model": m.model,
            "dropout": [m.hidden_dropout, m.attention_dropout], "micro_batch_size": train.micro_batch_size,
            "recompute": train.recompute_granularity, "tensor_parallel": parallel.tensor_model_parallel_size,
            "pipeline_parallel": parallel.pipeline_model_parallel_size,
            "sequence_parallel": parallel.sequence_parallel, "dtype": config.optimizer.params_dtype,
            "device": chip}
