"""A routing problem of 8 tokens, 4 experts and 2 experts a token, small enough to be worked out by hand: what
the tests of routers, losses and capacity share."""

import math

import torch

from tests.harness.plain_gpt import TinyConfig

T, E, K = 8, 4, 2

LOGITS = torch.tensor(
    [[2 * math.sin(1.3 * t + 2.1 * e + 0.7) for e in range(E)] for t in range(T)],
    dtype=torch.float64,
).float()
CHOICE = [[3, 0], [0, 3], [2, 0], [2, 1], [1, 3], [3, 0], [0, 3], [2, 0]]
LOAD = [6, 2, 3, 5]


def routing_config(**options) -> TinyConfig:
    """The default router: softmax over the chosen logits."""
    return TinyConfig(**{**dict(num_experts=(E,), moe_router_topk=K), **options})


def by_place(routing_values: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """[T, E], the value of each slot in the column of its expert, 0 elsewhere."""
    table = routing_values.new_zeros(len(experts), E)
    return table.scatter(1, experts, routing_values)
