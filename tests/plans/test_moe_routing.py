"""Routers against values worked out by hand, and against plain Python."""

import math

import pytest
import torch

from megatron_ds.moe.router import choose, largest
from tests.harness.golden_routing import CHOICE, LOAD, LOGITS, E, by_place, routing_config

exactly = dict(rtol=0, atol=1e-6)                       # values are given with six digits


def load(routing) -> list[int]:
    return routing.experts.flatten().bincount(minlength=E).tolist()


def of_token(routing, token: int) -> dict[int, float]:
    return dict(zip(routing.experts[token].tolist(), routing.weights[token].tolist()))


def test_the_logits_are_the_golden_ones():
    torch.testing.assert_close(LOGITS[0], torch.tensor([1.288435, 0.669976, -1.964905, 1.313973]), **exactly)


@pytest.mark.parametrize("options, first, sixth", [
    ({}, {0: .493616, 3: .506384}, {0: .494942, 3: .505058}),
    (dict(moe_router_pre_softmax=True), {0: .384130, 3: .394066}, {0: .431925, 3: .440754}),
    (dict(moe_router_score_function="sigmoid"), {0: .498634, 3: .501366}, None)], ids=str)
def test_weights_of_the_chosen_experts(options, first, sixth):
    routing = choose(LOGITS, routing_config(**options))
    assert routing.experts.tolist() == CHOICE and load(routing) == LOAD
    assert of_token(routing, 0) == pytest.approx(first, abs=1e-6)
    assert sixth is None or of_token(routing, 5) == pytest.approx(sixth, abs=1e-6)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_scores_sum_to_1_for_each_token(function):
    config = routing_config(moe_router_score_function=function)
    scores = choose(LOGITS, config).scores
    torch.testing.assert_close(scores.sum(1), torch.ones(len(LOGITS)))
    if function == "softmax":
        torch.testing.assert_close(scores.sum(0), torch.tensor([1.944991, 1.653405, 2.456274, 1.945330]),
                                   **exactly)


def test_a_bias_moves_the_choice_and_not_the_weights():
    config = routing_config(moe_router_score_function="sigmoid")
    bias = torch.tensor([0, 0.3, 0, -0.3])
    routing, without = choose(LOGITS, config, bias), choose(LOGITS, config)
    assert load(routing) == [5, 6, 4, 1]
    moved = [t for t in range(8) if set(routing.experts[t].tolist()) != set(without.experts[t].tolist())]
    assert moved == [0, 2, 4, 5, 6, 7]
    assert of_token(routing, 0) == pytest.approx({0: .542336, 1: .457664}, abs=1e-6)
    assert of_token(routing, 2) == pytest.approx({1: .168507, 2: .831493}, abs=1e-6)
    torch.testing.assert_close(routing.scores, without.scores, rtol=0, atol=0)


def test_experts_come_from_the_best_groups():
    config = routing_config(moe_router_pre_softmax=True, moe_router_num_groups=2, moe_router_group_topk=1)
    routing = choose(LOGITS, config)
    assert load(routing) == [3, 3, 5, 5] and set(routing.experts[0].tolist()) == {0, 1}
    p = LOGITS.softmax(-1)
    best = p.view(8, 2, 2).sum(2).argmax(1)                    # of a group: its best 2 of 2
    assert [sorted(row) for row in routing.experts.tolist()] == [[2 * g, 2 * g + 1] for g in best.tolist()]
    torch.testing.assert_close(routing.weights, p.gather(1, routing.experts))


def test_a_bias_also_moves_the_choice_of_groups():
    config = routing_config(moe_router_score_function="sigmoid", moe_router_num_groups=2,
                            moe_router_group_topk=1)
    routing = choose(LOGITS, config, torch.tensor([9.0, 9.0, 0, 0]))
    assert load(routing) == [8, 8, 0, 0]


def test_one_expert_a_token_has_its_score_as_weight():
    for options, score in ((dict(moe_router_pre_softmax=True), LOGITS.softmax(-1)),
                           (dict(moe_router_score_function="sigmoid"), LOGITS.sigmoid())):
        routing = choose(LOGITS, routing_config(moe_router_topk=1, **options))
        assert routing.experts.flatten().tolist() == [row[0] for row in CHOICE]
        torch.testing.assert_close(routing.weights[:, 0], score.amax(1), rtol=0, atol=0)


def test_the_scaling_factor_multiplies_all_weights():
    plain, scaled = (choose(LOGITS, routing_config(moe_router_topk_scaling_factor=f)) for f in (None, 2.5))
    torch.testing.assert_close(scaled.weights, 2.5 * plain.weights, rtol=0, atol=0)


def test_of_equal_values_the_first_is_chosen_whatever_the_width():
    for width in (4, 17, 64, 257):
        values = torch.zeros(3, width)
        values[1, width // 2:] = 1
        assert largest(values, 3).tolist() == [[0, 1, 2], [width // 2 + i for i in range(3)], [0, 1, 2]] \
            if width > 4 else largest(values, 2).tolist() == [[0, 1], [2, 3], [0, 1]]
    assert choose(torch.ones(2, E), routing_config()).experts.tolist() == [[0, 1], [0, 1]]


def test_all_experts_of_each_token_are_their_weighted_sum():
    routing = choose(LOGITS, routing_config(moe_router_topk=E))
    torch.testing.assert_close(by_place(routing.weights, routing.experts), LOGITS.softmax(-1))


@pytest.mark.parametrize("options", [{}, dict(moe_router_pre_softmax=True),
                                     dict(moe_router_score_function="sigmoid"),
                                     dict(moe_router_score_function="sigmoid", moe_router_topk=1)], ids=str)
def test_gradients_of_weights_and_scores_are_those_of_finite_differences(options):
    logits = LOGITS.double().requires_grad_()

    def values(z):
        routing = choose(z, routing_config(**options))
        return routing.weights, routing.scores

    assert torch.autograd.gradcheck(values, (logits,))


def test_extreme_logits_give_finite_weights():
    logits = torch.tensor([[1e4, -1e4, 0, 0], [-1e4] * 4, [-200.0, -201, -202, -203]])
    for options in ({}, dict(moe_router_pre_softmax=True), dict(moe_router_score_function="sigmoid")):
        routing = choose(logits, routing_config(**options))
        assert routing.weights.isfinite().all() and routing.scores.isfinite().all(), options
    assert math.isclose(choose(logits, routing_config()).weights[2].sum().item(), 1, rel_tol=1e-6)
