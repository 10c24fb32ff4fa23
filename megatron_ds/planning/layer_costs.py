"""Cost of each kind of layer, by which the model is cut into stages and some schedules are planned.

    flops       arithmetic, by each layer's own formula; the embedding only looks rows up and costs nothing
    parameters  number of parameters of a layer
    uniform     1 for a decoder block, 0 for other layers
    measured    seconds on this machine

Measuring: one layer of each kind is built, run forward and backward a few times, and freed; an activation is
sent through all pipeline ranks. All ranks measure at the same time, as they will compute at the same time,
and take the mean over all ranks, so that all cut the model alike. A backward is measured twice: if the
weights need no gradient, it is the input half alone; the difference to a whole backward is the weight half.
The loss counts as part of the head.
"""

import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from ..batch.batch import Batch
from ..batch.ledger import Ledger
from ..config import RunConfig
from ..errors import ConfigError
from ..host.regular_file import read_text
from ..models import MODELS, Layer
from ..models.gpt import further_fields
from ..mpu.agree import on_one_rank
from ..mpu.collectives import all_gather_object
from ..mpu.context import ParallelContext
from ..mpu.group import Group
from ..mpu.mesh import Mesh
from ..mpu.pipeline_channels import channels_over
from ..pipeline.backward import attach
from ..tensor_parallel.init import initialize
from .run_model import blank_batch, boundary_shape

logger = logging.getLogger(__name__)
REPEATS = 5
WARM_UP = 2
SOURCE = "by times measured here"


@dataclass(frozen=True)
class LayerCost:
    """Cost of one micro-batch: forward and halves of backward; in FLOPs, parameters, layers or seconds."""

    forward: float
    input_grad: float
    weight_grad: float

    @property
    def total(self) -> float:
        """The sum of the three costs."""
        return self.forward + self.input_grad + self.weight_grad


@dataclass(frozen=True)
class Times:
    """Times by which schedules are planned and compared, in one unit. Independent of the rule --pipeline-cut.

    layers: by kind of layer. transfer: of an activation between two stages. source: of the numbers, as text
    """

    layers: Mapping[str, LayerCost]
    transfer: float
    source: str


def layer_costs(config: RunConfig, layers: Sequence[Layer]) -> dict[str, LayerCost]:
    """{kind of layer: its cost} by the rule --pipeline-cut. Raises ConfigError for "measured"."""
    if config.parallel.pipeline_cut == "measured":
        raise ConfigError(
            "--pipeline-cut measured uses times that are measured when a run starts, but there "
            "are no measured times here. Use --pipeline-cut flops, or give a file of times "
            "with --pipeline-costs-path."
        )
    return COSTS[config.parallel.pipeline_cut](config, _by_kind(layers))


def estimated_times(config: RunConfig, layers: Sequence[Layer]) -> Times:
    """Times without a measurement: FLOPs for layers, 0 for transfers, as no speed of a network is known."""
    return Times(
        _by_flops(config, _by_kind(layers)),
        0.0,
        "estimate: time counted as FLOPs, transfers free",
    )


def _by_kind(layers: Sequence[Layer]) -> dict[str, Layer]:
    return {layer.kind: layer for layer in layers}


def _by_flops(config: RunConfig, layers: Mapping[str, Layer]) -> dict[str, LayerCost]:
    model = config.model
    train = config.train
    vocab = config.padded_vocab_size
    head = [*layers][-1]
    costs = {}
    for kind, layer in layers.items():
        flops = layer.flops(model.seq_length, vocab)
        # Scores and frozen weights have no weight half.
        forward = flops.forward
        scores = flops.scores / 3
        no_half = scores + flops.frozen / 2
        # What a backward computes again by itself is in one loop with the gradients of the weights.
        cost = LayerCost(
            forward,
            forward + scores + 2 * flops.again,
            max(0.0, forward - no_half - flops.again),
        )
        # With recompute_num_layers only the first blocks of each stage recompute, which are not known before
        # the cut.
        if (
            layer.is_block
            and train.recompute_granularity
            and train.recompute_num_layers is None
        ):
            again = (
                cost.forward - flops.again
                if train.recompute_granularity == "full"
                else scores
            )
            cost = replace(cost, input_grad=cost.input_grad + again)
        # The product is computed again, in one loop for all gradients.
        if kind == head and train.cross_entropy_chunks != 1:
            cost = LayerCost(
                cost.forward, cost.forward + cost.input_grad + cost.weight_grad, 0.0
            )
        costs[kind] = cost
    return costs


def _by_parameters(
    config: RunConfig, layers: Mapping[str, Layer]
) -> dict[str, LayerCost]:
    on_one_rank = MODELS[config.model.model](
        config.model, ParallelContext(device=torch.device("meta"))
    )
    whole = {layer.name: layer for layer in on_one_rank}
    count = lambda layer: float(
        sum(p.numel() for p in whole[layer.name].make().parameters())
    )
    return {kind: LayerCost(*[count(layer)] * 3) for kind, layer in layers.items()}


def _uniform(config: RunConfig, layers: Mapping[str, Layer]) -> dict[str, LayerCost]:
    return {
        kind: LayerCost(*[float(layer.is_block)] * 3) for kind, layer in layers.items()
    }


COSTS: Mapping[
    str, Callable[[RunConfig, Mapping[str, Layer]], dict[str, LayerCost]]
] = {"flops": _by_flops, "parameters": _by_parameters, "uniform": _uniform}


# ------------------------------------------------------------------ measured times
def measured_times(config: RunConfig, mesh: Mesh, ctx: ParallelContext) -> Times | None:
    """Measured times of layers in seconds, the same on all ranks; None unless --pipeline-cut is "measured".

    Read from --pipeline-costs-path if that file has times of such a run; otherwise measured, and written
    there. Collective over the world.
    """
    if config.parallel.pipeline_cut != "measured":
        return None
    path = config.parallel.pipeline_costs_path
    run = _run_key(config, mesh.device)
    world = mesh.group("world")
    # Hosts may have different paths, or none, so all ranks take part.
    stored = lambda: read_costs(Path(path), run) if path else None
    if found := on_one_rank(world, stored):
        return found
    mine = time_layers(config, ctx)
    transfer = time_transfer(config, mesh.group("pp"), ctx)
    of_all = all_gather_object(
        (transfer, {kind: astuple(cost) for kind, cost in mine.items()}), world
    )
    layers = {
        kind: LayerCost(
            *map(statistics.fmean, zip(*(rank[kind] for _, rank in of_all)))
        )
        for kind in mine
    }
    agreed = Times(layers, statistics.fmean(seconds for seconds, _ in of_all), SOURCE)
    store = lambda: write_costs(Path(path), run, agreed) if path else None
    on_one_rank(world, store)
    return agreed


def read_costs(path: Path, run: dict) -> Times | None:
    """Return the times in a file; None if there is no file or its times are of a run unlike `run`.

    Raises ConfigError for a file that cannot be read.
    """
    if not path.exists():
        return None
    try:
        document = json.loads(read_text(path, ConfigError))
        found = document["of"]
        parts = LayerCost.__dataclass_fields__
        layers = {
            kind: LayerCost(*(float(row[part]) for part in parts))
            for kind, row in document["seconds"].items()
        }
        times = Times(layers, float(document["transfer_seconds"]), SOURCE)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--pipeline-costs-path {path} contains no measured times ({type(error).__name__}: "
            f"{error}). Remove the file; the next run measures them again."
        ) from None
    # Times of another model, layout or device do not apply to this run.
    differing = [
        f"{name} {found.get(name)} there, {value} here"
        for name, value in run.items()
        if found.get(name) != value
    ]
    if differing:
        logger.warning(
            "--pipeline-costs-path %s has times of another run (%s); they are measured again",
            path,
            "; ".join(differing),
        )
    return None if differing else times


def write_costs(path: Path, run: dict, times: Times) -> None:
    """Write the times; the file appears whole or not at all. run: what `read_costs` compares"""
    rows = {kind: asdict(cost) for kind, cost in times.layers.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    document = {"of": run, "seconds": rows, "transfer_seconds": times.transfer}
    beside.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


def time_layers(config: RunConfig, ctx: ParallelContext) -> dict[str, LayerCost]:
    """{kind of layer: seconds of one micro-batch} on this rank. Collective over the tensor-parallel group."""
    model = config.model
    tp = ctx.tp
    device = ctx.device
    architecture = MODELS[model.model]
    layers = architecture(model, ctx)
    # The place of this rank among those that divide the weights of a layer.
    groups = {axis: ctx.group(axis) for axis in ("tp", "etp", "ep")}
    coordinates = {axis: (group.rank, group.size) for axis, group in groups.items()}
    x = _activation(config, ctx)
    ledger = Ledger()
    batch = blank_batch(config, ctx.slice, device).with_ledger(ledger)
    loss = lambda y: _with_terms(
        architecture.loss(y, batch, tp=tp, vocab_size=model.vocab_size).objective,
        ledger,
    )
    output = lambda y: _with_terms(y, ledger)
    # One layer of each kind, whose weights are freed before the next.
    costs = {}
    first = layers[0].kind
    last = layers[-1].kind
    for kind, layer in {layer.kind: layer for layer in layers}.items():
        module = layer.make()
        initialize(list(module.parameters()), config.train.seed, coordinates)
        given = None if kind == first else x
        costs[kind] = _time_layer(
            module, given, batch, loss if kind == last else output, device
        )
        del module
    return costs


def _with_terms(y: torch.Tensor, ledger: Ledger) -> torch.Tensor:
    """Return y with the loss terms that the layer has added, whose backward is part of its own."""
    terms = [
        entry
        for entry in ledger.take()
        if entry.weight is not None and entry.value.requires_grad
    ]
    if not terms:
        return y
    gradients = [entry.gradient(1.0, None) for entry in terms]
    return attach(y, [entry.value for entry in terms], gradients)


def time_transfer(config: RunConfig, pp: Group, ctx: ParallelContext) -> float:
    """Seconds of a transfer of an activation from a pipeline rank to the next; 0 for a single rank.

    The activation passes through all ranks, one after another, without other transfers. Collective over `pp`.
    """
    if pp.size == 1:
        return 0.0
    channels = channels_over(pp)
    x = _activation(config, ctx)
    device = ctx.device
    behind = (pp.rank - 1) % pp.size
    ahead = (pp.rank + 1) % pp.size
    rounds = []
    for _ in range(WARM_UP + REPEATS):
        start = _now(device)
        if pp.rank == 0:
            channels.send("act", ahead, x)
        received = channels.recv("act", behind, tuple(x.shape), x.dtype, device).wait()
        if pp.rank:
            channels.send("act", ahead, received)
        channels.drain()
        rounds.append(_now(device) - start)
    return min(rounds[WARM_UP:]) / pp.size


def _activation(config: RunConfig, ctx: ParallelContext) -> torch.Tensor:
    """Hidden states as stages send them: [s(/t), b, h]."""
    values = torch.randn(
        boundary_shape(config), generator=torch.Generator().manual_seed(0)
    )
    # Equal tokens would all choose the same experts.
    return values.to(ctx.device, ctx.dtype)


def _time_layer(
    module: nn.Module,
    x: torch.Tensor | None,
    batch: Batch,
    finish: Callable,
    device: torch.device,
) -> LayerCost:
    """Return the times of one layer. x: its input; None if it reads tokens, so its backward has no input half."""

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

    # Alternating, so that a machine whose speed changes treats both alike; the minimum is the undisturbed
    # time.
    times = [(run(True), run(False)) for _ in range(WARM_UP + REPEATS)][WARM_UP:]
    forward = min(whole[0] for whole, _ in times)
    both = min(whole[1] for whole, _ in times)
    inputs = 0.0 if x is None else min(half[1] for _, half in times)
    return LayerCost(forward, min(inputs, both), max(both - inputs, 0.0))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _run_key(config: RunConfig, device: torch.device) -> dict:
    """Return the settings and the device on which the times depend."""
    m = config.model
    train = config.train
    parallel = config.parallel
    # The time of a product on a CPU depends on the number of threads.
    chip = f"cpu, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        chip = torch.cuda.get_device_name(device)
    return {
        "hidden_size": m.hidden_size,
        "ffn_size": m.ffn_size,
        "heads": m.num_attention_heads,
        "groups": m.query_groups,
        "head_dim": m.head_dim,
        "activation": m.activation,
        "normalization": m.normalization,
        "seq_length": m.seq_length,
        "vocab_size": config.padded_vocab_size,
        "model": m.model,
        "experts": [
            list(m.experts),
            m.expert_ffn_size,
            m.moe_router_topk,
            m.moe_expert_capacity_factor,
            m.moe_pad_expert_input_to_capacity,
            m.dense_width,
            config.grid().ep,
            config.grid().etp,
        ],
        "further": [getattr(m, name) for name in further_fields()],
        "dropout": [m.hidden_dropout, m.attention_dropout],
        "micro_batch_size": train.micro_batch_size,
        "recompute": train.recompute_granularity,
        "cross_entropy_chunks": train.cross_entropy_chunks,
        "mlp_tiles": train.tiled_mlp,
        "tensor_parallel": parallel.tensor_model_parallel_size,
        "pipeline_parallel": parallel.pipeline_model_parallel_size,
        "context_parallel": [parallel.context_parallel_size, *parallel.cp_comm_type],
        "sequence_parallel": parallel.sequence_parallel,
        "dtype": config.optimizer.params_dtype,
        "device": chip,
    }
