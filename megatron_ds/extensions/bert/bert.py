"""BERT from config: every token sees every other; some tokens are masked and predicted from the rest.

Devlin et al. 2019 (arXiv:1810.04805), normalization first as in Shoeybi et al. 2019 (arXiv:1909.08053),
section 5.3, where large models with the original order stop learning. Parameter names are those of Megatron's
BERT.
"""

from functools import partial

import torch.nn.functional as F

from ...batch.batch import Batch
from ...config.options.model import ModelConfig
from ...models.architecture import MODELS, Architecture, Loss, gpt_loss
from ...models.attention import make_rotary
from ...models.block import block_layers
from ...models.embedding import WORD_EMBEDDINGS, Embedding
from ...models.heads import FinalNorm
from ...models.layer import Layer
from ...mpu.context import ParallelContext
from ...mpu.group import Group
from .data import BERT_DATA
from .heads import BertHeads, BertOutput, bert_head_flops

SEGMENTS = 2


def bert_layers(config: ModelConfig, ctx: ParallelContext) -> list[Layer]:
    """Return the layers of a BERT in forward order. Without a binary head there are no segments."""
    rotary = make_rotary(config)
    tied = None if config.untie_embeddings_and_output_weights else WORD_EMBEDDINGS
    segments = SEGMENTS if config.bert_binary_head else 0
    norm = "encoder.final_layernorm"
    return [
        Layer(
            "embedding",
            partial(Embedding, config, ctx, tied=tied, token_types=segments),
            "bert_embedding",
            noun="embedding",
        ),
        *block_layers(config, "encoder.layers", ctx, rotary=rotary, causal=False),
        Layer(norm, partial(FinalNorm, config, ctx, norm), "norm", noun="final norm"),
        Layer(
            "output_layer",
            lambda weight=None: BertHeads(config, ctx, tied=tied, weight=weight),
            "bert_head",
            tied_to=None if tied is None else "embedding",
            flops=partial(bert_head_flops, config),
            noun="output heads",
        ),
    ]


def bert_loss(
    output: BertOutput,
    batch: Batch,
    *,
    tp: Group,
    vocab_size: int,
    label_smoothing: float = 0.0,
    per_token: bool = False,
) -> Loss:
    """`gpt_loss` of the masked tokens. The ledger gets the cross entropy of the segments' order ("sop loss").

    Samples whose `sentence_order` is -1 have no order to predict and do not count in it. Collective over tp.
    """
    loss = gpt_loss(
        output.logits,
        batch,
        tp=tp,
        vocab_size=vocab_size,
        label_smoothing=label_smoothing,
        per_token=per_token,
    )
    if output.order is not None:
        assert batch.sentence_order is not None  # of data of BERT with pairs
        total = F.cross_entropy(
            output.order.float(), batch.sentence_order, ignore_index=-1, reduction="sum"
        )
        batch.ledger.add("sop loss", total, (batch.sentence_order >= 0).sum().float())
    return loss


MODELS.register("bert")(
    Architecture(
        layers=bert_layers, loss=bert_loss, data=BERT_DATA, fields=("bert_binary_head",)
    )
)
