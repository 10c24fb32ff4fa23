"""Routers against values worked out by hand, and against plain Python."""

import math

import pytest
import torch

from megatron_ds.moe.router import (
    DTYPES,
    Router,
    Tokens,
    choice_of,
    choose,
    largest,
    sinkhorn,
)
from tests.harness.golden_routing import (
    CHOICE,
    LOAD,
    LOGITS,
    E,
    K,
    by_place,
    routing_config,
)
from tests.harness.gpt_runs import make_batch
from tests.harness.model_runs import context_of

pytestmark = pytest.mark.plan

exactly = dict(rtol=0, atol=1e-6)  # values are given with six digits


def load(routing) -> list[int]:
    return routing.experts.flatten().bincount(minlength=E).tolist()


def of_token(routing, token: int) -> dict[int, float]:
    return dict(zip(routing.experts[token].tolist(), routing.weights[token].tolist()))


def test_the_logits_are_the_golden_ones():
    torch.testing.assert_close(
        LOGITS[0], torch.tensor([1.288435, 0.669976, -1.964905, 1.313973]), **exactly
    )


@pytest.mark.parametrize(
    "options, first, sixth",
    [
        ({}, {0: 0.493616, 3: 0.506384}, {0: 0.494942, 3: 0.505058}),
        (
            dict(moe_router_pre_softmax=True),
            {0: 0.384130, 3: 0.394066},
            {0: 0.431925, 3: 0.440754},
        ),
        (dict(moe_router_score_function="sigmoid"), {0: 0.498634, 3: 0.501366}, None),
    ],
    ids=str,
)
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
        torch.testing.assert_close(
            scores.sum(0),
            torch.tensor([1.944991, 1.653405, 2.456274, 1.945330]),
            **exactly,
        )


def test_a_bias_moves_the_choice_and_not_the_weights():
    config = routing_config(moe_router_score_function="sigmoid")
    bias = torch.tensor([0, 0.3, 0, -0.3])
    routing, without = choose(LOGITS, config, bias), choose(LOGITS, config)
    assert load(routing) == [5, 6, 4, 1]
    moved = [
        t
        for t in range(8)
        if set(routing.experts[t].tolist()) != set(without.experts[t].tolist())
    ]
    assert moved == [0, 2, 4, 5, 6, 7]
    assert of_token(routing, 0) == pytest.approx({0: 0.542336, 1: 0.457664}, abs=1e-6)
    assert of_token(routing, 2) == pytest.approx({1: 0.168507, 2: 0.831493}, abs=1e-6)
    torch.testing.assert_close(routing.scores, without.scores, rtol=0, atol=0)


def test_experts_come_from_the_best_groups():
    config = routing_config(
        moe_router_pre_softmax=True, moe_router_num_groups=2, moe_router_group_topk=1
    )
    routing = choose(LOGITS, config)
    assert load(routing) == [3, 3, 5, 5] and set(routing.experts[0].tolist()) == {0, 1}
    p = LOGITS.softmax(-1)
    best = p.view(8, 2, 2).sum(2).argmax(1)  # of a group: its best 2 of 2
    assert [sorted(row) for row in routing.experts.tolist()] == [
        [2 * g, 2 * g + 1] for g in best.tolist()
    ]
    torch.testing.assert_close(routing.weights, p.gather(1, routing.experts))


def test_a_bias_also_moves_the_choice_of_groups():
    config = routing_config(
        moe_router_score_function="sigmoid",
        moe_router_num_groups=2,
        moe_router_group_topk=1,
    )
    routing = choose(LOGITS, config, torch.tensor([9.0, 9.0, 0, 0]))
    assert load(routing) == [8, 8, 0, 0]


def test_one_expert_a_token_has_its_score_as_weight():
    for options, score in (
        (dict(moe_router_pre_softmax=True), LOGITS.softmax(-1)),
        (dict(moe_router_score_function="sigmoid"), LOGITS.sigmoid()),
    ):
        routing = choose(LOGITS, routing_config(moe_router_topk=1, **options))
        assert routing.experts.flatten().tolist() == [row[0] for row in CHOICE]
        torch.testing.assert_close(routing.weights[:, 0], score.amax(1), rtol=0, atol=0)


def test_the_scaling_factor_multiplies_all_weights():
    plain, scaled = (
        choose(LOGITS, routing_config(moe_router_topk_scaling_factor=f))
        for f in (None, 2.5)
    )
    torch.testing.assert_close(scaled.weights, 2.5 * plain.weights, rtol=0, atol=0)


def test_of_equal_values_the_first_is_chosen_whatever_the_width():
    for width in (4, 17, 64, 257):
        values = torch.zeros(3, width)
        values[1, width // 2 :] = 1
        assert (
            largest(values, 3).tolist()
            == [[0, 1, 2], [width // 2 + i for i in range(3)], [0, 1, 2]]
            if width > 4
            else largest(values, 2).tolist() == [[0, 1], [2, 3], [0, 1]]
        )
    assert choose(torch.ones(2, E), routing_config()).experts.tolist() == [
        [0, 1],
        [0, 1],
    ]


def test_all_experts_of_each_token_are_their_weighted_sum():
    routing = choose(LOGITS, routing_config(moe_router_topk=E))
    torch.testing.assert_close(
        by_place(routing.weights, routing.experts), LOGITS.softmax(-1)
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(moe_router_pre_softmax=True),
        dict(moe_router_score_function="sigmoid"),
        dict(moe_router_score_function="sigmoid", moe_router_topk=1),
    ],
    ids=str,
)
def test_gradients_of_weights_and_scores_are_those_of_finite_differences(options):
    logits = LOGITS.double().requires_grad_()

    def values(z):
        routing = choose(z, routing_config(**options))
        return routing.weights, routing.scores

    assert torch.autograd.gradcheck(values, (logits,))


def test_extreme_logits_give_finite_weights():
    logits = torch.tensor([[1e4, -1e4, 0, 0], [-1e4] * 4, [-200.0, -201, -202, -203]])
    for options in (
        {},
        dict(moe_router_pre_softmax=True),
        dict(moe_router_score_function="sigmoid"),
    ):
        routing = choose(logits, routing_config(**options))
        assert routing.weights.isfinite().all() and routing.scores.isfinite().all(), (
            options
        )
    assert math.isclose(
        choose(logits, routing_config()).weights[2].sum().item(), 1, rel_tol=1e-6
    )


def test_groups_are_compared_by_the_scores_that_weigh():
    """Logits sum to more in the second group, probabilities in the first."""
    logits = torch.tensor([[3.0, -5, 1, 0]])
    grouped = dict(moe_router_num_groups=2, moe_router_group_topk=1)
    assert sorted(choose(logits, routing_config(**grouped)).experts[0].tolist()) == [
        2,
        3,
    ]
    before = choose(logits, routing_config(moe_router_pre_softmax=True, **grouped))
    assert sorted(before.experts[0].tolist()) == [0, 1]


def test_noise_moves_the_choice_as_if_it_were_added_to_the_logits_and_not_the_weights():
    noise = torch.linspace(-3, 3, 32).view(8, E).flip(0).sin() * 3
    for options in (
        {},
        dict(moe_router_pre_softmax=True),
        dict(moe_router_score_function="sigmoid"),
    ):
        config = routing_config(**options)
        routing, shifted = (
            choose(LOGITS, config, noise=noise),
            choose(LOGITS + noise, config),
        )
        assert routing.experts.tolist() == shifted.experts.tolist() != CHOICE
        torch.testing.assert_close(
            routing.scores, choose(LOGITS, config).scores, rtol=0, atol=0
        )
        everything = choose(LOGITS, routing_config(**{**options, "moe_router_topk": E}))
        if options.get("moe_router_pre_softmax"):
            chosen = by_place(everything.weights, everything.experts).gather(
                1, routing.experts
            )
            torch.testing.assert_close(routing.weights, chosen, rtol=0, atol=0)


# Sinkhorn


def by_sinkhorn(logits, tokens=None, **options):
    config = routing_config(moe_router_load_balancing_type=("sinkhorn",), **options)
    return choice_of(config)(logits, config, None, None, tokens or Tokens())


def plain_sinkhorn(logits, tolerance=1e-9):
    """Rows and columns scaled in turn until columns stay."""
    table = logits.double().exp()
    while True:
        table = table / table.sum(1, keepdim=True) / len(table)
        columns = table.sum(0)
        table = table / columns / table.shape[1]
        if (columns * table.shape[1] - 1).abs().max() < tolerance:
            return table


def test_sinkhorn_gives_equal_sums_and_the_golden_row():
    table = sinkhorn(LOGITS)
    golden = torch.tensor([0.0455539, 0.0315661, 0.0010741, 0.0468109])
    torch.testing.assert_close(
        table[0], golden, rtol=2e-4, atol=0
    )  # stopped where columns move by 1e-4
    torch.testing.assert_close(table.sum(1), torch.full((8,), 0.125))
    torch.testing.assert_close(table.sum(0), torch.full((4,), 0.25))
    torch.testing.assert_close(
        table.double(), plain_sinkhorn(LOGITS), rtol=1e-5, atol=1e-8
    )


def test_sinkhorn_of_large_logits_is_finite():
    for logits in (LOGITS * 100, LOGITS + 500, LOGITS - 500, torch.full((3, E), -1e4)):
        assert sinkhorn(logits).isfinite().all()
    torch.testing.assert_close(
        sinkhorn(LOGITS + 64), sinkhorn(LOGITS), rtol=1e-4, atol=1e-7
    )


def test_sinkhorn_chooses_in_training_only_and_balances_the_load():
    logits = LOGITS + torch.tensor([4.0, 0, 0, 0])  # everything prefers expert 0
    chosen = plain_sinkhorn(logits).sort(1, descending=True).indices[:, :K]
    routing, evaluated = (
        by_sinkhorn(logits),
        by_sinkhorn(logits, Tokens(training=False)),
    )
    assert routing.experts.tolist() == chosen.tolist()
    assert (
        evaluated.experts.tolist() == choose(logits, routing_config()).experts.tolist()
    )
    assert load(evaluated)[0] == 8 > load(routing)[0]


def test_sinkhorn_weights_are_softmax_or_for_one_expert_sigmoid():
    routing, one = by_sinkhorn(LOGITS), by_sinkhorn(LOGITS, moe_router_topk=1)
    torch.testing.assert_close(
        routing.weights, LOGITS.softmax(1).gather(1, routing.experts)
    )
    torch.testing.assert_close(one.weights, LOGITS.sigmoid().gather(1, one.experts))
    assert not routing.experts.requires_grad
    logits = LOGITS.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: by_sinkhorn(z).weights, (logits,))


def test_sinkhorn_is_not_moved_by_padding():
    counted = torch.tensor([True, False, True, True, True, False, True, True])
    padded = LOGITS.clone()
    padded[~counted] = torch.tensor([9.0, -9, 3, 1])
    table = sinkhorn(padded, counted)
    torch.testing.assert_close(table[counted], sinkhorn(LOGITS[counted]))
    assert not table[~counted].any()
    assert sinkhorn(LOGITS, torch.zeros(8, dtype=torch.bool)).isfinite().all()


# Expert choice


def by_experts(logits, samples=1, counted=None, **options):
    config = routing_config(
        moe_router_load_balancing_type=("expert_choice",), **options
    )
    return choice_of(config)(logits, config, None, None, Tokens(samples, counted))


def chosen_pairs(routing) -> set[tuple[int, int]]:
    """(token, expert)"""
    return {
        (t, routing.experts[t, j].item()) for t, j in routing.kept.nonzero().tolist()
    }


def plainly_chosen(scores, samples, counted, k) -> set[tuple[int, int]]:
    pairs = set()
    for sample in range(samples):
        tokens = [t for t in range(sample, len(scores), samples) if counted[t]]
        for expert in range(scores.shape[1]):
            capacity = -(-k * len(tokens) // scores.shape[1])
            best = sorted(tokens, key=lambda t, e=expert: -scores[t, e].item())[
                :capacity
            ]  # a stable sort
            pairs |= {(t, expert) for t in best}
    return pairs


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    "experts, k, samples, length",
    [(4, 2, 1, 8), (5, 1, 3, 7), (3, 3, 2, 5), (8, 2, 2, 3)],
)
def test_each_expert_takes_its_best_tokens_of_each_sequence(
    experts, k, samples, length, function
):
    draw = torch.Generator().manual_seed(experts)
    # quarters, so that many are equal
    logits = (
        torch.randint(-4, 5, (length * samples, experts), generator=draw).double() / 4
    )
    counted = torch.rand(length * samples, generator=draw) < 0.7
    scores = logits.softmax(1) if function == "softmax" else logits.sigmoid()
    options = dict(moe_router_topk=k, moe_router_score_function=function)
    for mask in (None, counted):
        routing = by_experts(logits, samples, mask, **options)
        everything = torch.ones(len(logits), dtype=torch.bool) if mask is None else mask
        assert chosen_pairs(routing) == plainly_chosen(scores, samples, everything, k)
        assert all(
            sorted(row) == list(range(experts)) for row in routing.experts.tolist()
        )
        torch.testing.assert_close(routing.weights, scores.gather(1, routing.experts))
        # kept slots come first, so that slots behind them need no memory
        assert not (routing.kept.int().diff(dim=1) > 0).any()
    assert by_experts(logits, samples, None, **options).kept.sum() == routing.planned


def test_padding_does_not_move_the_choice_of_experts():
    counted = torch.tensor([True] * 5 + [False] * 3)
    other = LOGITS.clone()
    other[5:] = 9
    assert chosen_pairs(by_experts(other, 1, counted)) == chosen_pairs(
        by_experts(LOGITS[:5])
    )
    assert not chosen_pairs(by_experts(LOGITS, 1, torch.zeros(8, dtype=torch.bool)))

    # Layouts and noise


def routed(config, batch, rows=slice(None), seed=3):
    router = Router(config, E, "decoder.layers.1.mlp.router", context_of(seed=seed))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.normal_(generator=draw)
    x = torch.randn(10, 3, config.hidden_size, generator=draw)
    routing = router(x[:, rows], batch)
    return routing.logits.view(10, -1, E), routing.experts.view(10, -1, K)


@pytest.mark.parametrize("noise", ["jitter", "gumbel"])
def test_noise_belongs_to_seed_layer_and_token(noise):
    config = routing_config(moe_router_noise=noise, moe_input_jitter_eps=0.5)
    batch = make_batch(config)
    logits, experts = routed(config, batch)
    plain, plain_experts = routed(routing_config(), batch)
    assert (experts != plain_experts).any() and torch.equal(logits, plain) == (
        noise == "gumbel"
    )
    # Two divisions into micro-batches draw the same, another seed does not.
    for size in (1, 2, 3):
        parts = [
            routed(config, part, slice(i, i + size))
            for i, part in zip(range(0, 3, size), batch.split(size))
        ]
        torch.testing.assert_close(
            torch.cat([part for part, _ in parts], 1), logits, rtol=1e-5, atol=1e-6
        )
        assert torch.equal(torch.cat([part for _, part in parts], 1), experts)
    assert (routed(config, batch, seed=4)[1] != experts).any()


@pytest.mark.parametrize("noise", ["jitter", "gumbel"])
def test_evaluation_has_no_noise(noise):
    batch = make_batch(routing_config(), training=False)
    noisy, plain = (
        routed(routing_config(moe_router_noise=kind), batch) for kind in (noise, "none")
    )
    assert torch.equal(noisy[0], plain[0]) and torch.equal(noisy[1], plain[1])


def test_jitter_has_its_width_and_gumbel_noise_its_mean():
    config = routing_config(moe_router_noise="jitter", moe_input_jitter_eps=0.25)
    router = Router(config, E, "router", context_of())
    numbers = router._uniform(make_batch(config, b=40, s=50), 60)
    assert 0 < numbers.min() < 1e-4 and 1 - 1e-4 < numbers.max() < 1
    assert numbers.mean().item() == pytest.approx(0.5, abs=3e-3)
    gumbel = -(-numbers.log()).log()
    assert gumbel.mean().item() == pytest.approx(0.5772, abs=2e-2)
    assert gumbel.isfinite().all() and numbers.unique().numel() > 0.98 * numbers.numel()


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_the_router_keeps_no_wide_copy_of_its_input_and_has_the_gradients_of_autograd(
    dtype,
):
    config = routing_config(moe_router_dtype=dtype)
    router, wide, saved = Router(config, E, "router", context_of()), DTYPES[dtype], []
    with torch.no_grad():
        router.weight.normal_(generator=torch.Generator().manual_seed(0))
    router, batch = router.bfloat16(), make_batch(config)
    x = (
        torch.randn(*batch.tokens.t().shape, config.hidden_size)
        .bfloat16()
        .requires_grad_()
    )
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t) or t, lambda t: t
    ):
        logits = router(x, batch).logits
    assert logits.dtype == wide
    assert not any(t.dtype == wide and t.numel() == x.numel() for t in saved)
    slope = torch.randn_like(logits)
    expected = torch.nn.functional.linear(x.to(wide), router.weight.to(wide)).flatten(
        0, 1
    )
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    gradients, wanted = (
        torch.autograd.grad(z, (x, router.weight), slope) for z in (logits, expected)
    )
    assert all(map(torch.equal, gradients, wanted))
