"""One transformer block, normalisation first: x + attention(norm(x)), then x + mlp(norm(x)), dropout before each sum."""

import torch
from torch import nn

from ..data.batch import Batch
from ..ops.norm import NORMS
from .attention import SelfAttention
from .hidden_dropout import HiddenDropout
from .layer import LayerFlops, Placement, pick
from .mlp import MLP
from .recompute import check_granularity, recompute
from .rotary import Rotary


class Block(nn.Module):
    """x [s(/t), b, h] → the same shape. name: global, of the layer; causal: no token sees a later one."""

    def __init__(self, config, name: str, placement: Placement, *, rotary: Rotary | None, granularity: str | None = None,
                 causal: bool = True):
        super().__init__()
        output_std = config.init_method_std / (2 * config.num_layers) ** 0.5    # Radford et al. 2019 (GPT-2), section 2.3
        self.input_layernorm = make_norm(config, f"{name}.input_layernorm", placement)
        self.self_attention = SelfAttention(config, f"{name}.self_attention", placement, rotary=rotary,
                                            output_std=output_std, causal=causal)
        self.pre_mlp_layernorm = make_norm(config, f"{name}.pre_mlp_layernorm", placement)
        self.mlp = MLP(config, f"{name}.mlp", placement, output_std=output_std)
        self.attention_dropout = HiddenDropout(config.hidden_dropout, f"{name}.self_attention", placement)
        self.mlp_dropout = HiddenDropout(config.hidden_dropout, f"{name}.mlp", placement)
        self.set_recompute(granularity)

    def set_recompute(self, granularity: str | None) -> None:
        """What is forgotten in forward and computed again in backward: None, "selective" or "full"."""
        self.granularity = check_granularity(granularity)
        self.self_attention.recompute_core = granularity == "selective"

    def forward(self, x: torch.Tensor, batch: Batch, cache=None) -> torch.Tensor:
        if self.granularity == "full" and cache is None:                        # a cache must not be filled twice
            return recompute(self._forward, x, batch)
        return self._forward(x, batch, cache)

    def _forward(self, x, batch, cache=None):
        attended = self.self_attention(self.input_layernorm(x), batch, cache)
        x = x + self.attention_dropout(attended, batch)
        return x + self.mlp_dropout(self.mlp(self.pre_mlp_layernorm(x), batch), batch)


def block_flops(config, seq_length: int, vocab_size: int, *, causal: bool = True) -> LayerFlops:
    """Megatron's formula for a transformer block; causal attention counts half of its full matrix."""
    s, h = seq_length, config.hidden_size
    queries, keys_values = config.num_attention_heads * config.head_dim, 2 * config.query_groups * config.head_dim
    projections = 6 * (h * (queries + keys_values) + queries * h)
    feed_forward = 6 * h * config.ffn_size * (3 if config.is_gated else 2)
    scores = 12.0 * (0.5 if causal else 1.0) * s * s * config.num_attention_heads * config.head_dim
    return LayerFlops(float(s * (projections + feed_forward)), scores)


def make_norm(config, name: str, placement: Placement) -> nn.Module:
    """With sequence parallelism a norm sees a slice of the sequence, so its gradient is a partial sum."""
    norm = pick(NORMS, "normalization", config.normalization)
    return norm(config.hidden_size, name=name, eps=config.norm_epsilon, dtype=placement.dtype, device=placement.device,
                partial_grad=placement.sequence_parallel)
