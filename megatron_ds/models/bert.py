"""BERT from config: every token sees every other, some are masked and guessed from the rest.

Devlin et al. 2019 (arXiv:1810.04805), normalisation first as in Shoeybi et al. 2019 (arXiv:1909.08053), section 5.3, where
the original order stops learning in large models. Parameter names are those of Megatron's BERT.
"""

from functools import partial

import torch

from ..data.bert_data import BERT_DATA
from ..mpu.group import Group
from .architecture import MODELS, Architecture
from .bert_heads import BertHeads, bert_head_flops
from .block import Block, block_flops
from .embedding import WORD_EMBEDDINGS, Embedding
from .heads import FinalNorm
from .layer import Layer, Placement
from .losses import bert_loss
from .recompute import check_granularity
from .rotary import Rotary

SEGMENTS = 2


def bert_layers(config, *, tp: Group, sequence_parallel: bool = False, dtype: torch.dtype = torch.float32,
                device: torch.device | str = "cpu", seed: int = 0, recompute_granularity: str | None = None,
                recompute_num_layers: int | None = None) -> list[Layer]:
    """The layers of a BERT in forward order; arguments as of `gpt_layers`. Without binary head there are no segments."""
    placement = Placement(tp, sequence_parallel, dtype, device, seed)
    check_granularity(recompute_granularity)
    rope = config.position_embedding_type == "rope"
    rotary = Rotary(config.head_dim, config.rotary_percent, config.rotary_base) if rope else None
    tied = None if config.untie_embeddings_and_output_weights else WORD_EMBEDDINGS
    segments = SEGMENTS if config.bert_binary_head else 0
    return [
        Layer("embedding", partial(Embedding, config, placement, tied=tied, token_types=segments), "bert_embedding"),
        *(Layer(f"encoder.layers.{i}",
                partial(Block, config, f"encoder.layers.{i}", placement, rotary=rotary, granularity=recompute_granularity,
                        causal=False),
                "block", recompute_num_layers=recompute_num_layers,
                flops=partial(block_flops, config, causal=False))
          for i in range(config.num_layers)),
        Layer("encoder.final_layernorm", partial(FinalNorm, config, placement, "encoder.final_layernorm"), "norm"),
        Layer("output_layer", lambda weight=None: BertHeads(config, placement, tied=tied, weight=weight), "bert_head",
              tied_to=None if tied is None else "embedding", flops=partial(bert_head_flops, config)),
    ]


MODELS.register("bert")(Architecture(
    layers=bert_layers, loss=bert_loss, data=BERT_DATA,
    terms=lambda config: ("sop loss",) if config.bert_binary_head else (), fields=("bert_binary_head",)))
