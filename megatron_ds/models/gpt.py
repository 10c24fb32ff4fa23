"""GPT from config: decoder-only, normalization first.

GPT-2/3 style (Radford et al. 2019): learned positions, LayerNorm, GELU, tied head, biases. Llama style
(Touvron et al. 2023, arXiv:2302.13971): rotary positions, RMSNorm, SwiGLU, grouped queries, untied head, no
biases. Each choice is a field of the config, so all mixtures exist too.
"""

from functools import partial
from typing import Any

from ..config.options.model import ModelConfig
from ..features import Provided
from ..mpu.context import ParallelContext
from .architecture import MODELS, language_model
from .attention import make_rotary
from .block import block_layers
from .embedding import WORD_EMBEDDINGS, Embedding
from .heads import FinalNorm, LanguageModelHead, head_flops
from .layer import Layer

# What options of a wing make of these layers, in runs and in conversions: an object with `layers`, a function (layers,
# config, ctx) → layers, and `fields`, the names of these options, which a checkpoint and its run have alike.
FURTHER: Provided[Any] = Provided("further layers")


def further_fields() -> tuple[str, ...]:
    """Return the names of the options that a wing changes these layers by."""
    further = FURTHER.find()
    return () if further is None else further.fields


@MODELS.register("gpt")
@language_model
def gpt_layers(config: ModelConfig, ctx: ParallelContext) -> list[Layer]:
    """Return the layers of a GPT in forward order; nothing is allocated before a layer's `make()`."""
    rotary = make_rotary(config)
    tied = None if config.untie_embeddings_and_output_weights else WORD_EMBEDDINGS
    norm = "decoder.final_layernorm"
    layers = [
        Layer("embedding", partial(Embedding, config, ctx, tied=tied), "embedding"),
        *block_layers(config, "decoder.layers", ctx, rotary=rotary),
        Layer(norm, partial(FinalNorm, config, ctx, norm), "norm", noun="final norm"),
        Layer(
            "output_layer",
            lambda weight=None: LanguageModelHead(
                config, ctx, tied=tied, weight=weight
            ),
            "head",
            tied_to=None if tied is None else "embedding",
            flops=partial(head_flops, config),
            noun="output head",
        ),
    ]
    further = FURTHER.find()
    return layers if further is None else further.layers(layers, config, ctx)
