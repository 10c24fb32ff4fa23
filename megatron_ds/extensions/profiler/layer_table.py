"""A table of the layers of a model: parameters, and FLOPs of the forward of a step."""

from dataclasses import dataclass, replace

import torch

from ...config import RunConfig
from ...models import Layer
from ...mpu.context import ParallelContext
from ...mpu.managed_parameter import spec_of
from ...planning.flops import tokens_of
from ...planning.run_model import model_layers


@dataclass(frozen=True)
class LayerRow:
    """Layers that cost alike, over all ranks.

    name        of the layer, or of the kind
    count       number of layers
    parameters  of all of them; tied weights count where they are first used
    forward     FLOPs of their forward in one step; a backward has twice as many
    again       FLOPs of recomputation in one step; None if it is of some blocks of each stage only
    """

    name: str
    count: int
    parameters: int
    forward: float
    again: float | None


def layer_rows(
    config: RunConfig,
    samples: int,
    length: int,
    kept: int | None = None,
    *,
    each: bool = False,
) -> list[LayerRow]:
    """Return the rows for a step over `samples` sequences of `length` tokens, in the order of the model.

    kept: tokens of each sequence that the layers see which drop some; None: all
    each: a row for each layer; else for each kind
    """
    vocab = config.padded_vocab_size
    # Layers are described only: no weights are allocated.
    ctx = ParallelContext(device=torch.device("meta"))
    layers = model_layers(config, ctx)
    rows: dict[str, LayerRow] = {}
    sizes: dict[str, int] = {}
    # Layers of one name share a row. Unless `each` is set, the name is that of their kind.
    for layer in layers:
        if layer.kind not in sizes:
            sizes[layer.kind] = _parameters(layer)
        flops = layer.flops(tokens_of(layer, length, kept), vocab)
        again = _recomputed(
            config, layer, flops.forward, flops.scores / 3, layer is layers[-1]
        )
        name = layer.name if each else _kind_name(layer)
        row = LayerRow(
            name,
            1,
            sizes[layer.kind],
            samples * flops.forward,
            None if again is None else samples * again,
        )
        rows[name] = _joined(rows[name], row) if name in rows else row
    return list(rows.values())


def _kind_name(layer: Layer) -> str:
    name = layer.noun or layer.kind
    return f"{name} (drops tokens)" if layer.drops_tokens else name


def _parameters(layer: Layer) -> int:
    return sum(
        spec_of(p).numel for p in layer.make().parameters() if not spec_of(p).tied_copy
    )


def _recomputed(
    config: RunConfig, layer: Layer, forward: float, scores: float, is_head: bool
) -> float | None:
    """FLOPs that the backward of a layer computes a second time, for one sequence; None if unknown."""
    train = config.train
    if is_head:
        return forward if train.cross_entropy_chunks > 1 else 0.0
    if not layer.is_block or train.recompute_granularity is None:
        return 0.0
    if train.recompute_num_layers is not None:
        return None
    return forward if train.recompute_granularity == "full" else scores


def _joined(a: LayerRow, b: LayerRow) -> LayerRow:
    again = None if a.again is None or b.again is None else a.again + b.again
    return replace(
        a,
        count=a.count + b.count,
        parameters=a.parameters + b.parameters,
        forward=a.forward + b.forward,
        again=again,
    )
