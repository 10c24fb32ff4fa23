"""The layers of a GPT whose head has further depths."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from ...config.options.model import ModelConfig
from ...models.attention import make_rotary
from ...models.block import block_layer, parts_of_blocks
from ...models.embedding import WORD_EMBEDDINGS, Embedding
from ...models.layer import Layer, LayerFlops
from ...mpu.context import ParallelContext
from .predicting_head import PredictingHead

EMBEDDING = "embedding"


def predicting_layers(
    layers: Sequence[Layer], config: ModelConfig, ctx: ParallelContext
) -> list[Layer]:
    """Return the layers of a GPT, of which the last has the depths and shares the weight of the embedding."""
    *others, head = layers
    blocks = prediction_blocks(config, ctx)
    embedding = partial(Embedding, config, ctx, tied=WORD_EMBEDDINGS)
    shared = [
        replace(layer, make=embedding) if layer.name == EMBEDDING else layer
        for layer in others
    ]
    predicting = replace(
        head,
        make=partial(_make_head, config, ctx, blocks),
        kind="predicting_head",
        tied_to=EMBEDDING,
        flops=partial(_flops, config, head, blocks),
        noun="output head with further predictions",
    )
    return [*shared, predicting]


def prediction_blocks(config: ModelConfig, ctx: ParallelContext) -> list[Layer]:
    """Return the block of each depth, with the options of the model's last block."""
    last = config.num_layers - 1
    parts = parts_of_blocks(config, make_rotary(config))[last]
    return [
        block_layer(
            config,
            ctx,
            last,
            f"mtp.layers.{k}.transformer_layer",
            parts=parts,
        )
        for k in range(config.mtp_num_layers)
    ]


def _make_head(
    config: ModelConfig,
    ctx: ParallelContext,
    blocks: Sequence[Layer],
    weight: nn.Parameter | None = None,
) -> PredictingHead:
    """weight: that of the embedding, if it is on this rank"""
    return PredictingHead(config, ctx, blocks, weight)


def _flops(
    config: ModelConfig,
    head: Layer,
    blocks: Sequence[Layer],
    seq_length: int,
    vocab_size: int,
) -> LayerFlops:
    """Return the products of the head, and of each depth those of its projection, its block and the head."""
    of_head = head.flops(seq_length, vocab_size)
    projection = 12.0 * seq_length * config.hidden_size**2
    of_blocks = [block.flops(seq_length, vocab_size) for block in blocks]
    return LayerFlops(
        of_head.weights * (1 + len(blocks))
        + projection * len(blocks)
        + sum(flops.weights for flops in of_blocks),
        sum(flops.scores for flops in of_blocks),
        sum(flops.again for flops in of_blocks),
    )
