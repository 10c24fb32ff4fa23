"""Multi-token prediction as the paper writes it, on whole tensors: what ours is compared with.

DeepSeek-V3 (arXiv:2412.19437), section 2.2, with a norm behind each block.
"""

import torch

from . import plain_gpt
from .plain_gpt import TinyConfig, plain_blocks, plain_mlp

KEPT = {"drop": lambda site, x: x, "drop_scores": lambda site, p: p}


def prediction_shapes(config: TinyConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of all depths."""
    h = config.hidden_size
    last = f"decoder.layers.{config.num_layers - 1}."
    of_block = {
        name.removeprefix(last): shape
        for name, shape in plain_gpt.logical_shapes(config).items()
        if name.startswith(last)
    }
    norms = [name for name in of_block if name.startswith("input_layernorm.")]
    leaves = [name.rpartition(".")[2] for name in norms]
    shapes = {}
    for k in range(config.mtp_num_layers):
        depth = f"mtp.layers.{k}"
        shapes[f"{depth}.eh_proj.weight"] = (h, 2 * h)
        for norm in ("enorm", "hnorm", "final_layernorm"):
            shapes |= {f"{depth}.{norm}.{leaf}": (h,) for leaf in leaves}
        shapes |= {
            f"{depth}.transformer_layer.{name}": shape
            for name, shape in of_block.items()
        }
    return shapes


def prediction_weights(config: TinyConfig, seed: int) -> dict[str, torch.Tensor]:
    """Weights of the model and of its depths, float64."""
    generator = torch.Generator().manual_seed(seed + 1)
    weights = plain_gpt.logical_weights(config, seed)
    for name, shape in prediction_shapes(config).items():
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        scale = 0.7 - config.apply_layernorm_1p if "norm.weight" in name else 0.0
        weights[name] = drawn * 1.5 / shape[-1] ** 0.5 + scale
    return weights


def plain_losses(w, config: TinyConfig, batch) -> list[tuple[torch.Tensor, int]]:
    """(sum of the losses, how many count) of the next token and of each depth."""
    tokens = batch.tokens
    s = tokens.shape[1]
    hidden = torch.ones(s, s).triu(1).bool().expand(len(tokens), -1, -1)
    ids = batch.document_ids
    if ids is not None:
        hidden = hidden | (ids[:, :, None] != ids[:, None])
    words = w["embedding.word_embeddings.weight"]
    head = w.get("output_layer.weight", words)
    blocks = (batch.position_ids, hidden, config, *KEPT.values(), lambda layer: None)
    x = words[tokens] * config.embedding_multiplier
    x = plain_blocks(w, "decoder", x, *blocks)
    x = plain_gpt._norm(w, "decoder.final_layernorm", x, config)
    found = [_summed(w, config, x, head, batch, 0)]
    last = config.num_layers - 1
    for k in range(1, config.mtp_num_layers + 1):
        depth = f"mtp.layers.{k - 1}"
        later = torch.zeros_like(tokens)
        later[:, : s - k] = tokens[:, k:]
        e = words[later] * config.embedding_multiplier
        e = plain_gpt._norm(w, f"{depth}.enorm", e, config)
        h = plain_gpt._norm(w, f"{depth}.hnorm", x, config)
        x = torch.cat((e, h), -1) @ w[f"{depth}.eh_proj.weight"].T
        x = plain_gpt._block(
            w,
            f"{depth}.transformer_layer",
            x,
            batch.position_ids,
            hidden | plain_gpt._outside_window(config, last, s),
            plain_gpt._of_layer(config, last),
            *KEPT.values(),
            plain_mlp,
        )
        x = plain_gpt._norm(w, f"{depth}.final_layernorm", x, config)
        found.append(_summed(w, config, x, head, batch, k))
    return found


def _summed(w, config, x, head, batch, k: int) -> tuple[torch.Tensor, int]:
    """The losses of a depth, one by one."""
    logits = x @ head.T * config.logit_multiplier + w.get("output_layer.bias", 0)
    logits = plain_gpt._capped(logits, config.final_logit_softcapping)
    total, count = torch.zeros((), dtype=x.dtype), 0
    ids = batch.document_ids
    for n, row in enumerate(batch.tokens):
        for i in range(len(row) - k):
            if not batch.loss_mask[n, i + k]:
                continue
            if ids is not None and ids[n, i] != ids[n, i + k]:
                continue
            scores = logits[n, i]
            total = total + scores.logsumexp(0) - scores[batch.labels[n, i + k]]
            count += 1
    return total, count


def plain_objective(w, config: TinyConfig, batch, per_token: bool) -> torch.Tensor:
    """What a micro-batch trains; with losses per token the sum, which the step divides."""
    (main, tokens), *depths = plain_losses(w, config, batch)
    weight = config.mtp_loss_scaling_factor / config.mtp_num_layers
    if per_token:
        return main + weight * sum(total for total, _ in depths)
    return main / tokens + weight * sum(total / count for total, count in depths)
