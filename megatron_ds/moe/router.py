"""`Router`: scores of the experts for each token, and the choice of experts for each token.

    z = x Wᵀ (+ b)  logits, in fp32 or fp64                                     [T, E]
    s               softmax over all experts, or sigmoid of each

    choice          by                       weights
    top-k           the k largest of z or s  softmax over the chosen z; pre-softmax: their s; sigmoid:
                    of each token            s / sum of the chosen s
    Sinkhorn        the k largest of each    k = 1: sigmoid(z); k > 1: s
                    token, of exp(z) scaled
                    to equal row and column
                    sums; z in evaluation
    expert choice   the C largest s of each  s
                    expert in each sequence

A bias is added to s, noise to z, for the choice only. With groups of experts the choice is among the best
groups. Of equal scores the first is chosen, so tensor-parallel ranks agree.

Shazeer et al. 2017 (arXiv:1701.06538); Fedus et al. 2021 (arXiv:2101.03961); groups: DeepSeek-AI 2024
(arXiv:2405.04434), section 2.1.2; sigmoid and bias: DeepSeek-AI 2024 (arXiv:2412.19437), section 2.1.2;
Sinkhorn: Clark et al. 2022 (arXiv:2202.01169), section 4.1; expert choice: Zhou et al. 2022
(arXiv:2202.09368), section 3.2.

Letters: T tokens of this rank, E experts, k experts of a token, h hidden size; b sequences of
s tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from ..batch.batch import Batch
from ..config.options.model import ModelConfig
from ..mpu.context import ParallelContext
from ..mpu.param_spec import Init, ParamSpec
from ..mpu.sequence_ranks import SequenceRanks
from ..ops.dropout import sample_keys
from ..ops.keyed_random import random_numbers, shift_right
from ..tensor_parallel.linear import new_shard
from .balance import Balance, show_in_state_dict

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
JITTER = 0.01
TINY = 1e-20
SINKHORN_ITERATIONS = 32


@dataclass(frozen=True)
class Routing:
    """The experts of T tokens. A *slot* is one of the k places of a token; for expert choice k is E.

    experts  int64 [T, k], different for each slot of a token
    weights  [T, k] of the router's dtype, differentiable
    scores   [T, E], sum 1 for each token: for losses and statistics
    logits   [T, E]
    kept     bool [T, k], False where the token is padding or the expert is full; None: all
    planned  number of kept slots that plans assume, where tensors have no values; None: T k
    """

    experts: torch.Tensor
    weights: torch.Tensor
    scores: torch.Tensor
    logits: torch.Tensor
    kept: torch.Tensor | None = None
    planned: int | None = None

    def keeping(self, kept: torch.Tensor | None) -> "Routing":
        """This routing where only the slots of `kept`, bool [T, k], are kept; unchanged for None."""
        if kept is None:
            return self
        return replace(self, kept=kept if self.kept is None else self.kept & kept)


class Router(nn.Module):
    """x [s(/t), b, h] → `Routing` of its T = s(/t) b tokens, in the order of x."""

    def __init__(
        self, config: ModelConfig, num_experts: int, name: str, ctx: ParallelContext
    ):
        super().__init__()
        self.config = config
        self.num_experts = num_experts
        self.name = name
        self.ctx = ctx
        self.dtype = DTYPES[config.moe_router_dtype]
        self.choose = choice_of(config)
        spec = ParamSpec(
            f"{name}.weight",
            (num_experts, config.hidden_size),
            Init("normal", config.init_method_std),
            partial_over=ctx.partial_over,
        )
        self.weight = new_shard(spec, ctx)
        # A bias that is trained; the bias of `Balance` moves without gradients.
        self.bias = None
        if config.moe_router_linear_bias:
            of_bias = replace(spec, name=f"{name}.bias", shape=(num_experts,))
            self.bias = new_shard(
                replace(of_bias, init=Init("zeros"), decay=False), ctx
            )
        self.balance = Balance(config, num_experts, name)
        show_in_state_dict(self)

    def forward(
        self, x: torch.Tensor, batch: Batch, counted: torch.Tensor | None = None
    ) -> Routing:
        """counted: bool [T], False for padding; None: all tokens.

        Each rank routes the tokens that it holds. Expert choice, and in training Sinkhorn, are collective over the
        ranks that divide a sequence; the others communicate nothing.
        """
        noise_kind = self.config.moe_router_noise if batch.training else "none"
        if noise_kind == "jitter":
            width = self.config.moe_input_jitter_eps or JITTER
            x = x.to(self.dtype) * (
                1 - width + 2 * width * self._uniform(batch, x.shape[-1])
            )
        logits = _Logits.apply(x.flatten(0, 1), self.weight, self.dtype)
        if self.bias is not None:
            logits = logits + self.bias.to(self.dtype)
        noise = None
        if noise_kind == "gumbel":
            noise = (
                self._uniform(batch, self.num_experts)
                .flatten(0, 1)
                .log()
                .neg()
                .log()
                .neg()
            )
        tokens = Tokens(batch.size, counted, batch.training, self.ctx.sequence_ranks)
        self.balance.place(logits.device)
        return self.choose(logits, self.config, self.balance.bias, noise, tokens)

    def _uniform(self, batch: Batch, columns: int) -> torch.Tensor:
        """Numbers in (0, 1), [s(/t), b, columns]: functions of seed, layer, sample, position and column."""
        rows, picked = batch.positions(self.ctx.slice.rows(batch.seq_length))
        keys = sample_keys(self.ctx.seed, f"{self.name}.noise", batch.sample_ids)
        numbers = random_numbers(
            keys, len(rows) * columns, batch.tokens.device, first=rows.start * columns
        )
        numbers = numbers.view(len(keys), len(rows), columns)
        if picked is not None:
            numbers = numbers.gather(1, picked[:, :, None].expand(-1, -1, columns))
        return unit_interval(numbers, self.dtype).transpose(0, 1)


class _Logits(torch.autograd.Function):
    # Backward needs x, which autograd would keep in the router's dtype, beside the copy that the layer keeps
    # anyway. The weight is on ctx for the reason in `tensor_parallel.linear._ColumnLinear`.

    @staticmethod
    def forward(ctx, x, weight, dtype):
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.dtype = dtype
        return F.linear(x.to(dtype), weight.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, dz):
        (x,), weight = ctx.saved_tensors, ctx.weight
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        dx = (dz @ weight.to(ctx.dtype)).to(x.dtype) if needs_dx else None
        dw = (dz.t() @ x.to(ctx.dtype)).to(weight.dtype) if needs_dw else None
        return dx, dw, None


def unit_interval(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers in (0, 1) of `dtype`, from random int64 bits."""
    # The upper 23 bits, and a half: never 0 or 1, and exact in fp32.
    return (shift_right(numbers, 41).to(dtype) + 0.5) / (1 << 23)


@dataclass(frozen=True)
class Tokens:
    """What a choice may need of the tokens besides their logits.

    samples   sequences; token t belongs to sequence t modulo `samples`
    counted   bool [T], False for padding; None: all tokens
    training  False in evaluation
    ranks     those that divide the sequences; None: this rank has them whole
    """

    samples: int = 1
    counted: torch.Tensor | None = None
    training: bool = True
    ranks: SequenceRanks | None = None


def choose(
    logits: torch.Tensor,
    config: ModelConfig,
    bias: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    tokens: Tokens | None = None,
) -> Routing:
    """Return the k best experts of each token, from logits [T, E].

    bias: [E], added to the scores for the choice only. noise: [T, E], added to the logits for the choice
    only. tokens: not used.
    """
    k = config.moe_router_topk
    score = SCORES[config.moe_router_score_function]
    is_sigmoid = config.moe_router_score_function == "sigmoid"
    uses_scores = is_sigmoid or config.moe_router_pre_softmax
    # Scores for the choice, in which noise, bias and groups count.
    scores = score(logits)
    ranked = _noisy(logits, noise)
    if uses_scores:
        ranked = score(ranked)
    if bias is not None:
        ranked = ranked + bias.to(ranked.dtype)
    if config.moe_router_num_groups is not None:
        ranked = ranked.masked_fill(~in_best_groups(ranked, config), -torch.inf)
    experts = largest(ranked, k)

    # Weights, in which they do not.
    weights = (scores if uses_scores else logits).gather(1, experts)
    if is_sigmoid and k > 1:
        weights = _shares(weights)
    elif not uses_scores:
        weights = weights.softmax(-1)
    return Routing(
        experts,
        _scaled(weights, config),
        _shares(scores) if is_sigmoid else scores,
        logits,
    )


def choose_by_sinkhorn(
    logits: torch.Tensor,
    config: ModelConfig,
    bias: torch.Tensor | None,
    noise: torch.Tensor | None,
    tokens: Tokens,
) -> Routing:
    """Return the k best experts of each token after `sinkhorn` over the micro-batch; in evaluation before.

    Groups and bias have no effect. Collective over `tokens.ranks` in training: each rank balances all tokens of the
    sequences, in the same order, and keeps its own.
    """
    k = config.moe_router_topk
    ranked = _noisy(logits, noise)
    if tokens.training:
        counted = tokens.counted
        whole = sinkhorn(
            _of_all(ranked, tokens),
            None if counted is None else _of_all(counted[:, None], tokens)[:, 0],
        )
        ranked = _own(whole, tokens)
    experts = largest(ranked, k)
    scores = logits.softmax(-1)
    weights = (logits.sigmoid() if k == 1 else scores).gather(1, experts)
    return Routing(experts, _scaled(weights, config), scores, logits)


def _of_all(values: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Return [T', w] of the tokens of whole sequences, from [T, w] of this rank's. Collective over `tokens.ranks`."""
    if tokens.ranks is None:
        return values
    held = values.view(-1, tokens.samples, values.shape[1])
    return tokens.ranks.gather(held.contiguous(), dim=0).flatten(0, 1)


def _own(values: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Return [T, w] of this rank's tokens, from [T', w] of those of whole sequences."""
    if tokens.ranks is None:
        return values
    whole = values.view(-1, tokens.samples, values.shape[1])
    return tokens.ranks.own(whole, dim=0).flatten(0, 1)


def sinkhorn(logits: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
    """exp(logits) [T, E], rows and columns scaled until rows sum to 1 / T and columns to 1 / E.

    The number of iterations is fixed, because the host would wait for the device to test convergence.
    counted: bool [T]; other rows are 0 and do not count in T. None: all rows
    """
    table = (logits - logits.amax(1, keepdim=True)).exp()
    rows: torch.Tensor | int = len(table)
    if counted is not None:
        table = table * counted[:, None]
        rows = counted.sum().clamp(min=1)
    of_columns = table.new_ones(table.shape[1])
    for _ in range(SINKHORN_ITERATIONS):
        of_rows = 1 / (rows * (table @ of_columns + TINY))
        of_columns = 1 / (len(of_columns) * (of_rows @ table + TINY))
    return of_rows[:, None] * table * of_columns


def choose_tokens(
    logits: torch.Tensor,
    config: ModelConfig,
    bias: torch.Tensor | None,
    noise: torch.Tensor | None,
    tokens: Tokens,
) -> Routing:
    """Each expert takes its C = ceil(k n / E) best tokens of each sequence with n tokens besides padding.

    A token has from 0 to E experts: its first slots, by number, are kept, the others are not. Of equal scores
    the earlier position is taken. Groups and bias have no effect. Collective over `tokens.ranks`.
    """
    # Scores with noise choose; scores without it are weights.
    k = config.moe_router_topk
    score = SCORES[config.moe_router_score_function]
    scores = score(logits)
    ranked = score(_noisy(logits, noise))
    num_experts = ranked.shape[1]
    if tokens.counted is not None:
        ranked = ranked.masked_fill(~tokens.counted[:, None], -1)
    # Experts choose among the tokens of a whole sequence, so ranks that divide it exchange scores.
    table = ranked.view(-1, tokens.samples, num_experts).permute(
        1, 2, 0
    )  # [b, E, s(/t)]
    if tokens.ranks is not None:
        table = tokens.ranks.gather(table.contiguous(), dim=2)  # [b, E, s]
    # Each expert takes as many tokens as its share of the sequence without padding.
    most = ceil(k * table.shape[2] / num_experts)
    lengths = (table[:, 0] >= 0).sum(1)  # [b], without padding
    limits = (k * lengths + num_experts - 1) // num_experts
    within = (
        torch.arange(most, device=table.device) < limits[:, None, None]
    )  # [b, 1, C]
    taken = torch.zeros_like(table, dtype=torch.bool)
    taken.scatter_(2, largest(table, most), within.expand(-1, num_experts, -1))
    # Of the choices each rank keeps those of its own tokens.
    if tokens.ranks is not None:
        taken = tokens.ranks.own(taken, dim=2)
    kept = taken.permute(2, 0, 1).reshape(-1, num_experts)  # [T, E]
    unkept, experts = (~kept).to(torch.uint8).sort(dim=1, stable=True)
    planned = (
        tokens.samples
        * num_experts
        * most
        // (1 if tokens.ranks is None else tokens.ranks.size)
    )
    return Routing(
        experts,
        _scaled(scores.gather(1, experts), config),
        _shares(scores),
        logits,
        unkept == 0,
        planned,
    )


Choice = Callable[
    [torch.Tensor, ModelConfig, torch.Tensor | None, torch.Tensor | None, Tokens],
    Routing,
]
CHOICES: dict[str, Choice] = {
    "sinkhorn": choose_by_sinkhorn,
    "expert_choice": choose_tokens,
}
SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
}


def choice_of(config: ModelConfig) -> Choice:
    """Return the function that chooses, by `moe_router_load_balancing_type`; `choose` if that is a loss."""
    named = [
        CHOICES[kind]
        for kind in config.moe_router_load_balancing_type
        if kind in CHOICES
    ]
    return named[0] if named else choose


def _noisy(logits: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
    return logits.detach() if noise is None else logits.detach() + noise


def _shares(values: torch.Tensor) -> torch.Tensor:
    return values / (values.sum(-1, keepdim=True) + TINY)


def _scaled(weights: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    factor = config.moe_router_topk_scaling_factor
    return weights if factor is None else weights * factor


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices [.., k] of the k largest along the last dimension, descending; of equal ones the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def in_best_groups(ranked: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """bool [T, E], the experts of the best groups. A group's score is the sum of its best k / group_topk."""
    groups = config.moe_router_num_groups
    kept = config.moe_router_group_topk
    assert groups is not None and kept is not None, "rules want both or neither"
    grouped = ranked.view(len(ranked), groups, -1)  # [T, groups, E/groups]
    best = grouped.topk(max(1, config.moe_router_topk // kept), dim=-1).values.sum(-1)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(
        1, largest(best, kept), True
    )
    return chosen[:, :, None].expand_as(grouped).reshape(ranked.shape)
