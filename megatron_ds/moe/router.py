"""`Router`: scores of the experts for each token, and the choice of k experts for each token.

    z = x Wᵀ        logits, in fp32 or fp64                                     [T, E]
    s               softmax over all experts, or sigmoid of each
    choice          the k largest of s (+ bias, + noise), within the best groups if experts have groups
    weights         softmax over the chosen logits; pre-softmax: their s; sigmoid: s / sum of the chosen s

Of equal scores the expert with the smaller number is chosen, so tensor-parallel ranks agree.

Shazeer et al. 2017 (arXiv:1701.06538); Fedus et al. 2021 (arXiv:2101.03961); groups: DeepSeek-AI 2024
(arXiv:2405.04434), section 2.1.2; sigmoid and bias: DeepSeek-AI 2024 (arXiv:2412.19437), section 2.1.2.

Letters: T tokens of this rank, E experts, k experts of a token, h hidden size.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from ..config.model_options import ModelConfig
from ..data.batch import Batch
from ..mpu.context import ParallelContext
from ..mpu.param_spec import Init, ParamSpec
from ..ops.dropout import random_numbers, sample_keys, shift_right
from ..tensor_parallel.linear import new_shard
from .balance import Balance

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
JITTER = 0.01
TINY = 1e-20


@dataclass(frozen=True)
class Routing:
    """The experts of T tokens. A *slot* is one of the k places of a token.

    experts  int64 [T, k]
    weights  [T, k] of the router's dtype, differentiable
    kept     bool [T, k], False where the token is padding or the expert is full; None: all
    scores   [T, E], sum 1 for each token: for losses and statistics
    logits   [T, E]
    """

    experts: torch.Tensor
    weights: torch.Tensor
    scores: torch.Tensor
    logits: torch.Tensor
    kept: torch.Tensor | None = None

    def keeping(self, kept: torch.Tensor | None) -> "Routing":
        """With fewer slots."""
        return self if kept is None else replace(self, kept=kept if self.kept is None else self.kept & kept)


class Router(nn.Module):
    """x [s(/t), b, h] → `Routing` of its T = s(/t) b tokens, in the order of x."""

    def __init__(self, config: ModelConfig, num_experts: int, name: str, ctx: ParallelContext):
        super().__init__()
        self.config, self.num_experts, self.name, self.ctx = config, num_experts, name, ctx
        self.dtype = DTYPES[config.moe_router_dtype]
        spec = ParamSpec(f"{name}.weight", (num_experts, config.hidden_size),
                         Init("normal", config.init_method_std), partial_over=ctx.partial_over)
        self.weight = new_shard(spec, ctx)
        self.balance = Balance(config, num_experts, name)

    def forward(self, x: torch.Tensor, batch: Batch) -> Routing:
        """No communication: each rank routes the tokens that it holds."""
        noise_kind = self.config.moe_router_noise if batch.training else "none"
        x = x.to(self.dtype)
        if noise_kind == "jitter":
            width = self.config.moe_input_jitter_eps or JITTER
            x = x * (1 - width + 2 * width * self._uniform(batch, x.shape[-1]))
        logits = F.linear(x.flatten(0, 1), self.weight.to(self.dtype))
        noise = None
        if noise_kind == "gumbel":
            noise = self._uniform(batch, self.num_experts).flatten(0, 1).log().neg().log().neg()
        self.balance.place(logits.device)
        return choose(logits, self.config, self.balance.bias, noise)

    def _uniform(self, batch: Batch, columns: int) -> torch.Tensor:
        """Numbers in (0, 1), [s(/t), b, columns]: functions of seed, layer, sample, position and column."""
        rows, picked = batch.positions(self.ctx.slice.rows(batch.seq_length))
        keys = sample_keys(self.ctx.seed, f"{self.name}.noise", batch.sample_ids)
        numbers = random_numbers(keys, rows.stop * columns, batch.tokens.device)
        numbers = numbers.view(len(keys), rows.stop, columns)[:, rows.start:]
        if picked is not None:
            numbers = numbers.gather(1, picked[:, :, None].expand(-1, -1, columns))
        return unit_interval(numbers, self.dtype).transpose(0, 1)


def unit_interval(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers in (0, 1) of `dtype`, from random int64 bits."""
    # The upper 23 bits, and a half: never 0 or 1, and exact in fp32.
    return (shift_right(numbers, 41).to(dtype) + 0.5) / (1 << 23)


def choose(logits: torch.Tensor, config: ModelConfig, bias: torch.Tensor | None = None,
           noise: torch.Tensor | None = None) -> Routing:
    """The k experts of each token, from logits [T, E].

    bias: [E], added to the scores for the choice only. noise: [T, E], added to the logits for the choice only
    """
    k, is_sigmoid = config.moe_router_topk, config.moe_router_score_function == "sigmoid"
    scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
    ranked = scores.detach() if is_sigmoid else logits.detach()
    if noise is not None:
        ranked = ranked + noise
    if bias is not None:
        ranked = ranked + bias.to(ranked.dtype)
    if config.moe_router_num_groups is not None:
        ranked = ranked.masked_fill(~in_best_groups(ranked, config), -torch.inf)
    experts = largest(ranked, k)

    chosen = (scores if is_sigmoid or config.moe_router_pre_softmax else logits).gather(1, experts)
    if is_sigmoid:
        weights = chosen / (chosen.sum(-1, keepdim=True) + TINY) if k > 1 else chosen
        scores = scores / (scores.sum(-1, keepdim=True) + TINY)
    else:
        weights = chosen if config.moe_router_pre_softmax else chosen.softmax(-1)
    if config.moe_router_topk_scaling_factor is not None:
        weights = weights * config.moe_router_topk_scaling_factor
    return Routing(experts, weights, scores, logits)


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices [.., k] of the k largest along the last dimension, descending; of equal ones the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def in_best_groups(ranked: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """bool [T, E], the experts of the best groups. A group's score is the sum of its best k / group_topk."""
    groups, kept = config.moe_router_num_groups, config.moe_router_group_topk
    grouped = ranked.view(len(ranked), groups, -1)                                     # [T, groups, E/groups]
    best = grouped.topk(max(1, config.moe_router_topk // kept), dim=-1).values.sum(-1)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, largest(best, kept), True)
    return chosen[:, :, None].expand_as(grouped).reshape(ranked.shape)
