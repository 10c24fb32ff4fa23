"""A BERT as the papers write it: whole tensors, one head at a time, no parallelism. What ours is compared
with.

Hidden states are [b, s, h]; weights a dictionary of logical tensors {name: tensor}, as of `plain_gpt`, which
has the pieces that every transformer shares written out.
"""

from dataclasses import dataclass

import torch

from .plain_gpt import (
    TinyConfig,
    _linear,
    _norm,
    logical_shapes,
    plain_blocks,
    plain_mlp,
)


@dataclass(frozen=True)
class TinyBert(TinyConfig):
    """BERT's model section with odd sizes."""

    bert_binary_head: bool = True
    model: str = "bert"


def bert_shapes(config: TinyBert) -> dict[str, tuple[int, ...]]:
    """Names and true shapes of every parameter, written out by hand from Megatron's names."""
    h, v = config.hidden_size, config.vocab_size
    shapes = {
        name.replace("decoder.", "encoder."): shape
        for name, shape in logical_shapes(config).items()
    }
    shapes |= {
        "lm_head.dense.weight": (h, h),
        "lm_head.dense.bias": (h,),
        "lm_head.layer_norm.weight": (h,),
        "output_layer.bias": (v,),
    }
    if config.normalization == "LayerNorm":
        shapes["lm_head.layer_norm.bias"] = (h,)
    if config.bert_binary_head:
        shapes |= {
            "embedding.tokentype_embeddings.weight": (2, h),
            "pooler.dense.weight": (h, h),
            "pooler.dense.bias": (h,),
            "binary_head.weight": (2, h),
            "binary_head.bias": (2,),
        }
    return shapes


def bert_weights(config: TinyBert, seed: int) -> dict[str, torch.Tensor]:
    """Weights large enough that every term matters. float64."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda shape: (
        torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
    )
    scale = 0.7 - getattr(config, "apply_layernorm_1p", False)
    return {
        name: draw(shape) * 1.5 + (scale if "norm.weight" in name else 0.0)
        for name, shape in bert_shapes(config).items()
    }


def plain_bert(
    w: dict[str, torch.Tensor],
    config: TinyBert,
    tokens,
    position_ids,
    token_types,
    padding,
    *,
    drop=lambda site, x: x,
    drop_scores=lambda site, p: p,
    kept_by=lambda layer: None,
    feed_forward=plain_mlp,
):
    """(logits [b, s, v], order [b, 2] or None). padding: bool [b, s], True where there is no token; others as
    `plain_gpt`."""
    x = w["embedding.word_embeddings.weight"][tokens]
    if config.position_embedding_type == "learned_absolute":
        x = x + w["embedding.position_embeddings.weight"][position_ids]
    if config.bert_binary_head:
        x = x + w["embedding.tokentype_embeddings.weight"][token_types]
    x = drop("embedding", x)
    hidden = padding[:, None, :].expand(-1, tokens.shape[1], -1)  # [b, query, key]
    x = plain_blocks(
        w,
        "encoder",
        x,
        position_ids,
        hidden,
        config,
        drop,
        drop_scores,
        kept_by,
        feed_forward,
    )
    x = _norm(w, "encoder.final_layernorm", x, config)
    order = None
    if config.bert_binary_head:
        order = _linear(
            w, "binary_head", torch.tanh(_linear(w, "pooler.dense", x[:, 0]))
        )
    y = _norm(w, "lm_head.layer_norm", _gelu(_linear(w, "lm_head.dense", x)), config)
    table = w.get("output_layer.weight", w["embedding.word_embeddings.weight"])
    return y @ table.T + w["output_layer.bias"], order


def plain_bert_losses(logits, order, labels, loss_mask, sentence_order):
    """(mean over the masked tokens, 0 where there is none; mean over the samples) of -log softmax at what is
    true."""
    at = lambda scores, true: (
        torch.logsumexp(scores, -1) - scores.gather(-1, true[..., None])[..., 0]
    )
    words = (at(logits, labels) * loss_mask).sum() / loss_mask.sum().clamp(min=1)
    return words, (
        at(order, sentence_order).mean() if order is not None else torch.zeros(())
    )


def _gelu(x):
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
