"""GPT from config: decoder-only, normalisation first.

GPT-2/3 style (Radford et al. 2019): learned positions, LayerNorm, GELU, tied head, biases. Llama style (Touvron et al. 2023,
arXiv:2302.13971): rotary positions, RMSNorm, SwiGLU, grouped queries, untied head, no biases. Each choice is a field of
the config, so all mixtures exist too.
"""

from functools import partial

import torch

from ..mpu.group import Group
from .architecture import MODELS, language_model
from .block import Block, block_flops
from .embedding import WORD_EMBEDDINGS, Embedding
from .heads import FinalNorm, LanguageModelHead, head_flops
from .layer import Layer, Placement
from .recompute import check_granularity
from .rotary import Rotary


@MODELS.register("gpt")
@language_model
def gpt_layers(config, *, tp: Group, sequence_parallel: bool = False, dtype: torch.dtype = torch.float32,
               device: torch.device | str = "cpu", seed: int = 0, recompute_granularity: str | None = None,
               recompute_num_layers: int | None = None) -> list[Layer]:
    """The layers of a GPT in forward order; nothing is allocated before a layer's `make()`.

    config                 the model section of the configuration
    seed                   of dropout; the weights are drawn later, by `tensor_parallel.init.initialize`
    recompute_granularity  None, "selective" (core attention) or "full" (whole blocks)
    recompute_num_layers   how many blocks of each pipeline stage recompute, from its first; None for all
    """
    placement = Placement(tp, sequence_parallel, dtype, device, seed)
    check_granularity(recompute_granularity)
    rope = config.position_embedding_type == "rope"
    rotary = Rotary(config.head_dim, config.rotary_percent, config.rotary_base) if rope else None
    tied = None if config.untie_embeddings_and_output_weights else WORD_EMBEDDINGS
    return [
        Layer("embedding", partial(Embedding, config, placement, tied=tied), "embedding"),
        *(Layer(f"decoder.layers.{i}",
                partial(Block, config, f"decoder.layers.{i}", placement, rotary=rotary, granularity=recompute_granularity),
                "block", recompute_num_layers=recompute_num_layers, flops=partial(block_flops, config))
          for i in range(config.num_layers)),
        Layer("decoder.final_layernorm", partial(FinalNorm, config, placement, "decoder.final_layernorm"), "norm"),
        Layer("output_layer", lambda weight=None: LanguageModelHead(config, placement, tied=tied, weight=weight), "head",
              tied_to=None if tied is None else "embedding", flops=partial(head_flops, config)),
    ]
