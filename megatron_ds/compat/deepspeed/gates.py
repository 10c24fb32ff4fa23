"""DeepSpeed's gates, of the layer `MoE`: from logits to experts, weights, a loss term and counts.

                 experts of a token          priority for the places of an expert     loss over     weights
    k = 1        the largest score           random (RTS), or the earlier position    the choice    s
    k = 2        the largest score, and of   all first choices before all second      first         s / sum of
                 the others the largest      ones, then the earlier position          choices       kept s
                 logit + Gumbel noise
    k > 2        the k largest scores        the larger score, then the earlier       all k         s / sum of
                                             position                                               kept s

    s = softmax(x Wᵀ), in fp32      C = max(min_capacity, ceil(factor k T / E))      places of an expert
    loss  = E / n Σ_e mean(s_e) mean(c_e)        c_e: 1 for a token with e among its n choices of the table

Means and C are over the T tokens of the rank's call, padding included, as in DeepSpeed: they depend on how
tokens are divided into calls. Of equal scores the expert with the smaller number is chosen; of equal
priorities the earlier token. A second choice whose first choice was dropped gets the whole weight.

Fedus et al. 2021 (arXiv:2101.03961), section 2.2; two experts, and their places: Lepikhin et al. 2020
(arXiv:2006.16668), section 2.2.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ...moe.capacity import Capacity, kept_slots
from ...moe.router import JITTER, Routing, largest, unit_interval
from ...moe.totals import demand_of
from ...ops.keyed_random import random_numbers

Noise = torch.Tensor | None


@dataclass(frozen=True)
class Rule:
    """A row of the table above.

    choose(scores, logits, k, noise)     experts int64 [T, k], from [T, E]
    prioritize(weights, random)          [T, k], from weights [T, k] and random numbers [T, 1] or None
    """

    choose: Callable[[torch.Tensor, torch.Tensor, int, Noise], torch.Tensor]
    prioritize: Callable[[torch.Tensor, Noise], torch.Tensor]
    balances_all: bool = False
    renormalizes: bool = True


def _first(
    scores: torch.Tensor, logits: torch.Tensor, k: int, noise: Noise
) -> torch.Tensor:
    return largest(scores if noise is None else logits + noise, 1)


def _first_and_second(
    scores: torch.Tensor, logits: torch.Tensor, k: int, noise: Noise
) -> torch.Tensor:
    first = largest(scores, 1)
    others = (logits if noise is None else logits + noise).scatter(1, first, -torch.inf)
    return torch.cat((first, largest(others, 1)), 1)


def _in_rank_of_choice(weights: torch.Tensor, random: Noise) -> torch.Tensor:
    return -torch.arange(
        weights.shape[1], dtype=weights.dtype, device=weights.device
    ).expand_as(weights)


ONE = Rule(
    _first,
    lambda weights, random: torch.zeros_like(weights) if random is None else random,
    renormalizes=False,
)
TWO = Rule(_first_and_second, _in_rank_of_choice)
MORE = Rule(
    lambda scores, logits, k, noise: largest(scores, k),
    lambda weights, random: weights,
    balances_all=True,
)
RULES = {1: ONE, 2: TWO}


class Gated(NamedTuple):
    """l_aux: the loss term, a scalar. exp_counts: int64 [E], slots of each expert before drops."""

    routing: Routing
    l_aux: torch.Tensor
    exp_counts: torch.Tensor


def route(
    logits: torch.Tensor,
    capacity: Capacity,
    rule: Rule | None = None,
    *,
    used: torch.Tensor | None = None,
    noise: Noise = None,
    random: Noise = None,
) -> Gated:
    """Return the experts of T tokens with fp32 logits [T, E]. No communication.

    capacity  of an expert; its `topk` is k
    rule      None: that of k
    used      bool [T], False for padding, which gets no expert; None: all tokens
    noise     [T, E], added to the logits for the choice where the rule uses it
    random    [T, 1], the priorities of k = 1; None: by position
    """
    # The choice, and what it costs in balance.
    k = capacity.topk
    rule = rule or RULES.get(k, MORE)
    scores = logits.softmax(-1)
    experts = rule.choose(scores.detach(), logits.detach(), k, noise)
    weights = scores.gather(1, experts)
    routing = Routing(experts, weights, scores, logits)
    counts = _demand(experts, scores, used)
    loss = _balance(routing, k if rule.balances_all else 1, used)
    # Slots of padding and those beyond the capacity are dropped.
    if used is not None:
        of_tokens = used[:, None].expand_as(experts)
        routing = routing.keeping(of_tokens)
        experts = experts.masked_fill(~of_tokens, -1)
    if capacity.factor is not None:
        priority = rule.prioritize(weights.detach(), random)
        routing = routing.keeping(
            kept_slots(experts[None], priority[None], capacity)[0]
        )
    # Dropped slots have no weight.
    if routing.kept is not None:
        weights = weights * routing.kept
    if rule.renormalizes:
        weights = weights / weights.sum(-1, keepdim=True).clamp(
            min=torch.finfo(weights.dtype).eps
        )
    return Gated(replace(routing, weights=weights), loss, counts)


def _balance(routing: Routing, choices: int, used: torch.Tensor | None) -> torch.Tensor:
    """Return the loss term over the first `choices` of each token; a scalar."""
    tokens, num_experts = routing.scores.shape
    demand = _demand(routing.experts[:, :choices], routing.scores, used)
    total = (routing.scores.sum(0) * demand).sum()
    return total * num_experts / (choices * max(tokens, 1) ** 2)


def _demand(
    experts: torch.Tensor, scores: torch.Tensor, used: torch.Tensor | None
) -> torch.Tensor:
    """int64 [E]: slots of each expert among experts [T, n], of tokens that are no padding."""
    return demand_of(
        experts, scores.shape[1], 1, None if used is None else used[:, None]
    )[0]


@dataclass(frozen=True)
class Draws:
    """Random numbers of one call of a layer: functions of the key, the token's place in the call, and the
    column.
    """

    key: tuple[int | str, ...]

    def uniform(self, purpose: str, like: torch.Tensor) -> torch.Tensor:
        """fp32 numbers in (0, 1), of the shape of `like` [T, columns]."""
        numbers = random_numbers([(*self.key, purpose)], like.numel(), like.device)
        return unit_interval(numbers, torch.float32).view(like.shape)

    def gumbel(self, purpose: str, like: torch.Tensor) -> torch.Tensor:
        """fp32 numbers of the Gumbel distribution, of the shape of `like`."""
        return self.uniform(purpose, like).log().neg().log().neg()


@dataclass(frozen=True)
class GateOptions:
    """DeepSpeed's arguments of the gate; `MoE` describes them."""

    k: int
    capacity_factor: float
    eval_capacity_factor: float
    min_capacity: int
    noisy_gate_policy: str | None
    drop_tokens: bool
    use_rts: bool
    top2_2nd_expert_sampling: bool

    def capacity(self, num_experts: int, training: bool) -> Capacity:
        """Return the capacity of the experts of a layer."""
        factor = self.capacity_factor if training else self.eval_capacity_factor
        return Capacity(
            factor if self.drop_tokens else None,
            self.min_capacity,
            "probs",
            "micro-batch",
            num_experts,
            self.k,
        )

    def adds_noise(self, training: bool) -> bool:
        """Return whether the choice is that of noisy logits. For k = 2 also in evaluation, as in DeepSpeed."""
        return {
            1: self.noisy_gate_policy == "RSample" and training,
            2: self.top2_2nd_expert_sampling,
        }.get(self.k, False)


class TopKGate(nn.Module):
    """Tokens [T, h] of the rank → their `Gated`."""

    def __init__(self, hidden_size: int, num_experts: int, options: GateOptions):
        super().__init__()
        self.wg = Fp32Linear(hidden_size, num_experts, bias=False)
        self.options = options

    def forward(
        self, tokens: torch.Tensor, used: torch.Tensor | None, draws: Draws
    ) -> Gated:
        """used: bool [T] or None, see `route`."""
        options = self.options
        training = self.training
        x = tokens.float()
        if options.noisy_gate_policy == "Jitter" and training:
            x = x * (1 - JITTER + 2 * JITTER * draws.uniform("jitter", x))
        logits = self.wg(x)
        noise = draws.gumbel("choice", logits) if options.adds_noise(training) else None
        uses_random = options.k == 1 and options.use_rts and options.drop_tokens
        random = draws.uniform("selection", logits[:, :1]) if uses_random else None
        return route(
            logits,
            options.capacity(logits.shape[1], training),
            used=used,
            noise=noise,
            random=random,
        )


class Fp32Linear(nn.Linear):
    """x Wᵀ in fp32, whatever the format of W."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x fp32 [T, in] → fp32 [T, out]."""
        return F.linear(x, self.weight.float())
