"""Which slots an expert keeps where its capacity is limited, and how that does not depend on the layout.

By default the tokens of one sequence compete with each other, and no others: then a sequence is routed alike
whatever the micro-batch, the number of data-parallel ranks, and the division of the sequence over
tensor-parallel ranks, which exchange experts and weights of their tokens before they decide.

    capacity   C = max(least, ceil(factor k s / E))      tokens of an expert in a sequence of s tokens,
                                                         without padding
    priority   "probs": larger weights first, of equal ones the earlier position; "position": the first
               positions, of one token the better choice

Fedus et al. 2021 (arXiv:2101.03961), section 2.2, where the capacity is that of a batch.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import ceil

import numpy as np
import torch

from ..batch.batch import Batch
from ..config.options.model import ModelConfig
from ..host.device_copies import on_device
from ..mpu.context import ParallelContext
from ..mpu.sequence_ranks import SequenceRanks
from .router import Routing


@dataclass(frozen=True)
class Capacity:
    """The limit of each expert of a layer.

    factor  None: no limit
    padded  whether experts compute as many rows as they may keep
    """

    factor: float | None
    least: int
    policy: str
    scope: str
    num_experts: int
    topk: int
    padded: bool = False

    @classmethod
    def of(cls, config: ModelConfig, num_experts: int, training: bool) -> "Capacity":
        """In training or in evaluation."""
        factor = (
            config.moe_expert_capacity_factor
            if training
            else config.moe_eval_capacity_factor
        )
        return cls(
            factor,
            config.moe_min_capacity,
            config.moe_token_drop_policy,
            config.moe_capacity_scope,
            num_experts,
            config.moe_router_topk,
            config.moe_pad_expert_input_to_capacity and factor is not None,
        )

    @property
    def lifted(self) -> "Capacity":
        """No limit: experts keep all their tokens."""
        return replace(self, factor=None, padded=False)

    def rows(self, tokens: int) -> int:
        """Slots that an expert keeps of `tokens` competing tokens, at most one of each token."""
        # The factor as it is written in decimals: 1.1 × 200 / 20 is 11, which products of floats exceed.
        share = Fraction(str(self.factor)) * self.topk * tokens / self.num_experts
        return min(tokens, max(self.least, ceil(share)))

    def sets(self, samples: int) -> int:
        """Number of sets of tokens that compete, in a micro-batch of so many samples."""
        return samples if self.scope == "sequence" else 1

    def planned(self, sets: int, tokens: int) -> int:
        """Slots that all experts keep of `sets` of so many tokens each, if the demand for them is equal."""
        return sets * min(self.topk * tokens, self.num_experts * self.rows(tokens))

    def of_lengths(self, lengths: torch.Tensor, longest: int) -> torch.Tensor:
        """`rows` of each number in lengths, int64 of any shape on any device, none above `longest`."""
        return on_device(torch.tensor(_table(self, longest)), lengths.device)[lengths]


@lru_cache(maxsize=64)
def _table(capacity: Capacity, longest: int) -> np.ndarray:
    return np.array(
        [capacity.rows(tokens) for tokens in range(longest + 1)], dtype=np.int64
    )


def limit(
    routing: Routing, capacity: Capacity, batch: Batch, ctx: ParallelContext
) -> Routing:
    """Return the routing with only those slots that its experts keep. Plans assume equal demand, up to the capacity.

    Collective over the ranks that divide a sequence, where the capacity is limited.
    """
    if capacity.factor is None:
        return routing
    samples = batch.size
    k = routing.experts.shape[1]
    by_sample = lambda t: t.view(-1, samples, k).transpose(0, 1)  # [b, s(/t), k]
    experts = (
        routing.experts
        if routing.kept is None
        else routing.experts.masked_fill(~routing.kept, -1)
    )
    experts = by_sample(experts)
    weights = by_sample(routing.weights.detach())
    ranks = ctx.sequence_ranks
    if ranks is not None:
        experts, weights = _gathered(experts, weights, ranks)
    if capacity.scope == "micro-batch":
        experts, weights = (
            t.transpose(0, 1).reshape(1, -1, k) for t in (experts, weights)
        )
    # Sequences without padding have one capacity.
    most = None
    if routing.kept is not None:
        most = capacity.of_lengths((experts >= 0).any(2).sum(1), experts.shape[1])
    keeps = kept_slots(experts, weights, capacity, most)
    if capacity.scope == "micro-batch":
        keeps = keeps.view(-1, samples, k).transpose(0, 1)
    if ranks is not None:
        keeps = ranks.own(keeps, dim=1)
    planned = capacity.planned(experts.shape[0], experts.shape[1]) // (
        1 if ranks is None else ranks.size
    )
    return replace(
        routing.keeping(keeps.transpose(0, 1).reshape(-1, k)), planned=planned
    )


def _gathered(
    experts: torch.Tensor, weights: torch.Tensor, ranks: SequenceRanks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights [b, s, k] from those of the ranks, [b, s/t, k], together."""
    bits = torch.int64 if weights.dtype is torch.float64 else torch.int32
    both = torch.stack(
        (experts.to(bits), weights.contiguous().view(bits)), 2
    )  # [b, s/t, 2, k]
    both = ranks.gather(both, dim=1)
    return both[:, :, 0].to(experts.dtype), both[:, :, 1].contiguous().view(
        weights.dtype
    )


def kept_slots(
    experts: torch.Tensor,
    weights: torch.Tensor,
    capacity: Capacity,
    most: torch.Tensor | None = None,
) -> torch.Tensor:
    """bool [b, s, k]: of each row of experts int64 [b, s, k] (-1: none), the slots within the capacity.

    most: int64 [b], the capacity in each row; None: that of s tokens
    """
    b, s, k = experts.shape
    flat = experts.reshape(b, s * k)
    # Slots in the order of priority, then, keeping that order, by expert: a slot's place among those of its
    # expert is its distance from the first of them.
    if capacity.policy == "probs":
        order = weights.reshape(b, s * k).argsort(dim=1, descending=True, stable=True)
    else:
        order = torch.arange(s * k, device=flat.device).expand(b, -1)
    by_expert, within = flat.gather(1, order).sort(dim=1, stable=True)
    order = order.gather(1, within)
    here = torch.arange(s * k, device=flat.device).expand(b, -1)
    is_first = torch.ones_like(by_expert, dtype=torch.bool)
    is_first[:, 1:] = by_expert[:, 1:] != by_expert[:, :-1]
    first = here.where(is_first, 0).cummax(1).values
    keeps = (here - first < (capacity.rows(s) if most is None else most[:, None])) & (
        by_expert >= 0
    )
    return torch.zeros_like(keeps).scatter_(1, order, keeps).view(b, s, k)
