"""Which slots an expert keeps, against lists worked out by hand and a plain loop."""

import random

import pytest
import torch

from megatron_ds.moe.capacity import Capacity, kept_slots
from megatron_ds.moe.router import choose
from tests.harness.golden_routing import LOGITS, E, K, routing_config

pytestmark = pytest.mark.plan

WHOLE_PROBS = {
    0.5: [(0, 0), (1, 3), (2, 0), (3, 2), (4, 3), (5, 0), (6, 3), (7, 0)],
    1: [(2, 0), (4, 3), (7, 0)],
    1.25: [(7, 0)],
    4: [],
}
WHOLE_POSITION = {
    0.5: [(2, 0), (4, 3), (5, 0), (5, 3), (6, 0), (6, 3), (7, 0), (7, 2)],
    1: [(6, 0), (6, 3), (7, 0)],
    1.25: [(7, 0)],
    4: [],
}
SEQUENCE_PROBS = {
    0.5: [(0, 0), (1, 3), (2, 0), (3, 2), (4, 3), (5, 0), (6, 3), (7, 0)],
    1: [(2, 0), (4, 3), (7, 0)],
    1.25: [],
}
# Weights before the choice put other tokens first: expert 3 has .394 of token 0 and .439 of token 6.
SEQUENCE_PRE = {
    **SEQUENCE_PROBS,
    0.5: [(0, 0), (0, 3), (2, 0), (3, 2), (4, 3), (5, 0), (5, 3), (7, 0)],
}


def capacity(factor, policy="probs", least=0, experts=E, k=K) -> Capacity:
    return Capacity(factor, least, policy, "sequence", experts, k)


def dropped(sequences: int, limit: Capacity, **options) -> list[tuple[int, int]]:
    """(token, expert) of the golden routing; token t belongs to sequence t modulo `sequences`."""
    routing = choose(LOGITS, routing_config(**options))
    split = lambda t: t.view(-1, sequences, K).transpose(0, 1)
    keeps = (
        kept_slots(split(routing.experts), split(routing.weights), limit)
        .transpose(0, 1)
        .reshape(-1, K)
    )
    return sorted(
        (t, routing.experts[t, j].item()) for t, j in (~keeps).nonzero().tolist()
    )


@pytest.mark.parametrize("factor", WHOLE_PROBS)
def test_the_least_weights_of_all_tokens_are_dropped(factor):
    assert dropped(1, capacity(factor)) == WHOLE_PROBS[factor]


@pytest.mark.parametrize("factor", WHOLE_POSITION)
def test_the_last_of_all_tokens_are_dropped(factor):
    assert dropped(1, capacity(factor, "position")) == WHOLE_POSITION[factor]


@pytest.mark.parametrize("factor", SEQUENCE_PROBS)
def test_the_least_weights_of_each_sequence_are_dropped(factor):
    assert dropped(2, capacity(factor)) == SEQUENCE_PROBS[factor]
    assert (
        dropped(2, capacity(factor), moe_router_pre_softmax=True)
        == SEQUENCE_PRE[factor]
    )


def test_the_last_tokens_of_each_sequence_are_dropped():
    assert dropped(2, capacity(1, "position")) == [(6, 0), (6, 3), (7, 0)]


@pytest.mark.parametrize(
    "s, k, experts, factor, least, expected",
    [
        (4096, 2, 8, 1, 0, 1024),
        (4096, 8, 64, 1.25, 0, 640),
        (2048, 6, 60, 1.1, 0, 226),
        (128, 1, 64, 1, 4, 4),
        (8, 2, 4, 0.5, 0, 2),
        (8, 2, 4, 1.25, 0, 5),
        (100, 2, 20, 1.1, 0, 11),  # 1.1 * 200 is above 220 in floating point
        (3, 2, 2, 100, 0, 3),
        (3, 1, 64, 1, 4, 3),  # at most one slot of each token
        (5, 1, 64, 1e-6, 0, 1),
    ],
    ids=str,
)
def test_the_capacity_of_an_expert(s, k, experts, factor, least, expected):
    assert capacity(factor, least=least, experts=experts, k=k).rows(s) == expected


def test_training_and_evaluation_have_capacities_of_their_own():
    config = routing_config(
        moe_expert_capacity_factor=1.5,
        moe_min_capacity=3,
        moe_token_drop_policy="position",
        moe_capacity_scope="micro-batch",
    )
    assert Capacity.of(config, E, training=True) == Capacity(
        1.5, 3, "position", "micro-batch", E, K
    )
    assert Capacity.of(config, E, training=False).factor is None


def test_of_equal_weights_the_earlier_position_is_kept():
    experts = torch.tensor([[[0, 1], [1, 0], [0, 2], [2, 0]]])
    keeps = kept_slots(
        experts, torch.ones(1, 4, 2), capacity(1, experts=4)
    )  # 2 rows an expert
    assert keeps.tolist() == [
        [[True, True], [True, True], [False, True], [True, False]]
    ]


def plainly_kept(experts, weights, limit: Capacity) -> list:
    """The same, one slot after another."""
    result = []
    for of_tokens, importance in zip(experts, weights):
        s, k = len(of_tokens), len(of_tokens[0])
        slots = [(t, j) for t in range(s) for j in range(k)]
        if limit.policy == "probs":
            slots.sort(key=lambda slot: -importance[slot[0]][slot[1]])  # a stable sort
        taken, kept = {}, [[False] * k for _ in range(s)]
        for t, j in slots:
            expert = of_tokens[t][j]
            if expert >= 0 and taken.setdefault(expert, 0) < limit.rows(s):
                taken[expert] += 1
                kept[t][j] = True
        result.append(kept)
    return result


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_slots_kept_are_those_of_a_plain_loop(policy):
    draw = random.Random(5)
    seen = set()
    for _ in range(60):
        b, s, experts = draw.randint(1, 4), draw.randint(1, 40), draw.randint(1, 9)
        k = draw.randint(1, experts)
        # Few different weights, so that many are equal; some slots are of no expert.
        table = [
            [
                [
                    e if draw.random() < 0.9 else -1
                    for e in draw.sample(range(experts), k)
                ]
                for _ in range(s)
            ]
            for _ in range(b)
        ]
        weights = [
            [[draw.randint(0, 5) / 4 for _ in range(k)] for _ in range(s)]
            for _ in range(b)
        ]
        limit = capacity(
            draw.choice((0.3, 0.7, 1, 1.3, 3)),
            policy,
            draw.choice((0, 0, 4)),
            experts,
            k,
        )
        keeps = kept_slots(torch.tensor(table), torch.tensor(weights), limit).tolist()
        assert keeps == plainly_kept(table, weights, limit), (b, s, experts, k, limit)
        seen |= {kept for row in keeps for kept in row[0]}
    assert seen == {True, False}
