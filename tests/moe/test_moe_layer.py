"""Models with experts equal plain ones that compute token after token, whatever the layout."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_ds.errors import ConfigError
from megatron_ds.models import MODELS
from megatron_ds.moe import router
from megatron_ds.moe.dispatch import Dispatch, Groups
from megatron_ds.moe.router import Routing
from megatron_ds.ops.permute import combine
from tests.harness.bert_runs import random_bert_batch, run_bert
from tests.harness.gpt_runs import make_batch, run_gpt
from tests.harness.layout_runs import GLOBAL_BATCH, stray
from tests.harness.model_runs import context_of
from tests.harness.plain_bert import (
    TinyBert,
    bert_shapes,
    plain_bert,
    plain_bert_losses,
)
from tests.harness.plain_gpt import (
    LLAMA,
    TinyConfig,
    logical_weights,
    plain_gpt,
    plain_loss,
)
from tests.harness.plain_moe import PlainMoE, moe_shapes, moe_weights, plain_expert
from tests.harness.tiny_jobs import TOLERANCE, tiny_job
from tests.models.test_gpt_layouts import LAYOUTS, assert_equal_runs

pytestmark = pytest.mark.threads

GPT = dict(num_experts=(5,))
SWIGLU = dict(**LLAMA, num_experts=(4,), moe_ffn_hidden_size=14)
LOSSES = dict(
    moe_router_load_balancing_type=("aux_loss", "seq_aux_loss"),
    moe_aux_loss_coeff=(0.3, 0.2),
    moe_z_loss_coeff=0.1,
)
KINDS = {
    "biases": GPT,
    "swiglu, before softmax, losses": dict(
        **SWIGLU, **LOSSES, moe_router_pre_softmax=True
    ),
    "sigmoid, groups, scaled, losses": dict(
        **{**SWIGLU, "num_experts": (6,)},
        **LOSSES,
        moe_router_score_function="sigmoid",
        moe_router_num_groups=3,
        moe_router_group_topk=2,
        moe_router_topk_scaling_factor=2.5,
    ),
    "shared": dict(**GPT, moe_shared_expert_intermediate_size=10),
    "shared with gate": dict(
        **SWIGLU, moe_shared_expert_intermediate_size=10, moe_shared_expert_gate=True
    ),
    "residual pyramid": dict(
        num_experts=(2, 5), moe_layer_freq="[1,0,1]", mlp_type="residual"
    ),
    "one expert of four": dict(
        **SWIGLU, moe_router_topk=1, moe_router_pre_softmax=True
    ),
    "capacity": dict(**GPT, moe_expert_capacity_factor=0.7, **LOSSES),
    "capacity by position": dict(
        **SWIGLU, moe_expert_capacity_factor=0.5, moe_token_drop_policy="position"
    ),
    "capacity of the micro-batch": dict(
        **GPT,
        moe_expert_capacity_factor=0.6,
        moe_min_capacity=8,
        moe_capacity_scope="micro-batch",
    ),
}


@cache
def reference(kind: str, training: bool = True):
    """(config, weights, batch, run of the plain model, its experts)."""
    config = TinyConfig(**KINDS[kind])
    weights, batch = moe_weights(config, seed=1), make_batch(config, training=training)
    return config, weights, batch, *plain_run(config, weights, batch)


def plain_run(config, weights, batch):
    weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
    moe = PlainMoE(training=batch.training)
    logits = plain_gpt(
        weights, config, batch.tokens, batch.position_ids, feed_forward=moe
    )
    loss = plain_loss(logits, batch.labels, batch.loss_mask) + moe.objective
    loss.backward()
    # A smaller difference would leave the choice to rounding.
    assert moe.margin > 1e-5
    return (
        loss.item(),
        logits.detach(),
        {name: w.grad for name, w in weights.items()},
    ), moe


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpt_with_experts_equals_a_plain_one_forward_and_backward(kind, layout):
    config, weights, batch, expected, moe = reference(kind)
    ours = run_gpt(config, weights, batch, **layout)
    assert_equal_runs(ours, expected)
    found = {
        e.name: (e.value / e.count).item() for e in ours[0].entries if e.weight is None
    }
    for layer, load in moe.load.items():
        name, demand = layer.removesuffix(".mlp"), moe.demand[layer]
        assert found[f"{name} max load"] == pytest.approx(
            max(demand) * len(demand) / sum(demand)
        )
        if config.moe_expert_capacity_factor is not None:
            slots = batch.tokens.numel() * config.moe_router_topk
            assert (
                found[f"{name} dropped"] == pytest.approx(1 - sum(load) / slots)
                and sum(load) < slots
            )


@pytest.mark.parametrize("kind", ["biases", "shared with gate", "capacity"])
def test_evaluation_has_a_capacity_of_its_own_and_no_loss_terms(kind):
    config, weights, batch, (_, expected, _), moe = reference(kind, training=False)
    loss, logits, _ = run_gpt(config, weights, batch, tp_size=2, sequence_parallel=True)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
    slots = batch.tokens.numel() * config.moe_router_topk
    assert all(sum(load) == slots for load in moe.load.values())
    assert not [entry for entry in loss.entries if entry.weight is not None]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputation_changes_no_bit_and_counts_once(granularity, layout):
    config = replace(
        TinyConfig(**KINDS["capacity"]), hidden_dropout=0.2, moe_router_noise="jitter"
    )
    weights, batch = moe_weights(config, seed=1), make_batch(config)
    plain, again = (
        run_gpt(config, weights, batch, recompute_granularity=g, **layout)
        for g in (None, granularity)
    )
    assert again[0].objective.item() == plain[0].objective.item() and torch.equal(
        again[1], plain[1]
    )
    assert all(torch.equal(grad, plain[2][name]) for name, grad in again[2].items())
    entries = lambda run: [
        (e.name, e.value.item(), float(e.count)) for e in run[0].entries
    ]
    assert entries(again) == entries(plain)
    assert (
        len([name for name, *_ in entries(again) if name == "router z-loss"])
        == config.num_layers
    )


def test_micro_batches_of_any_size_give_the_same_with_rules_of_sequences():
    config = TinyConfig(
        **{
            **KINDS["capacity"],
            "moe_router_load_balancing_type": ("seq_aux_loss",),
            "moe_aux_loss_coeff": (0.3,),
            "moe_z_loss_coeff": None,
        }
    )
    weights, batch = moe_weights(config, seed=1), make_batch(config)
    terms = lambda loss: sum(
        e.value.item() / e.count for e in loss.entries if e.weight is not None
    )
    loss, logits, _ = run_gpt(config, weights, batch)
    parts = [run_gpt(config, weights, part) for part in batch.split(1)]
    torch.testing.assert_close(
        torch.cat([logits for _, logits, _ in parts]), logits, rtol=1e-5, atol=1e-5
    )
    assert sum(terms(part) for part, *_ in parts) / 3 == pytest.approx(
        terms(loss), rel=1e-6
    )


@pytest.mark.parametrize("kind", ["jitter", "gumbel"])
def test_noise_is_the_same_in_every_layout_and_micro_batch(kind):
    noisy = replace(
        TinyConfig(**KINDS["swiglu, before softmax, losses"]),
        moe_router_noise=kind,
        moe_input_jitter_eps=0.5,
    )
    weights, batch = moe_weights(noisy, seed=1), make_batch(noisy)
    _, logits, grads = run_gpt(noisy, weights, batch, seed=7)
    for layout in LAYOUTS[1:]:
        _, split, split_grads = run_gpt(noisy, weights, batch, seed=7, **layout)
        torch.testing.assert_close(split, logits, rtol=1e-4, atol=1e-5)
        name = "decoder.layers.1.mlp.router.weight"
        torch.testing.assert_close(split_grads[name], grads[name], rtol=1e-4, atol=1e-6)
    alone = [run_gpt(noisy, weights, part, seed=7)[1] for part in batch.split(1)]
    torch.testing.assert_close(torch.cat(alone), logits, rtol=1e-4, atol=1e-5)
    for other, seed in ((noisy, 8), (replace(noisy, moe_router_noise="none"), 7)):
        assert not torch.allclose(
            run_gpt(other, weights, batch, seed=seed)[1], logits, atol=1e-2
        )


@pytest.mark.parametrize("kind", ["jitter", "gumbel"])
def test_a_rank_draws_the_noise_of_its_own_rows_only(kind, monkeypatch):
    config = replace(TinyConfig(**KINDS["biases"]), moe_router_noise=kind)
    weights, batch = moe_weights(config, seed=1), make_batch(config)
    drawn, draw = [], router.random_numbers
    monkeypatch.setattr(
        router,
        "random_numbers",
        lambda keys, count, *args, **options: (
            drawn.append(len(keys) * count),
            draw(keys, count, *args, **options),
        )[1],
    )
    columns = config.hidden_size if kind == "jitter" else config.num_experts[0]
    for tp_size in (1, 2):
        run_gpt(config, weights, batch, tp_size=tp_size, sequence_parallel=tp_size > 1)
        each = batch.tokens.numel() * columns // tp_size
        assert drawn == [each] * tp_size * config.num_layers
        drawn.clear()


# Closed forms


def as_experts(dense: dict, config, copies: int) -> dict:
    """Weights of a dense model, each feed-forward `copies` times."""
    weights = moe_weights(config, seed=9)
    for name in weights:
        if ".experts." in name:
            weights[name] = dense[name.replace(".experts.", ".")].expand(
                copies, *weights[name].shape[1:]
            )
        elif ".router." not in name:
            weights[name] = dense[name]
    return weights


@pytest.mark.parametrize(
    "options",
    [
        dict(num_experts=(1,), moe_router_topk=1, moe_router_pre_softmax=True),
        dict(num_experts=(4,), moe_router_topk=2),
        dict(num_experts=(4,), moe_router_topk=4, moe_router_pre_softmax=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("style", [{}, LLAMA], ids=["gpt2", "llama"])
def test_equal_experts_with_weights_that_sum_to_1_are_a_dense_feed_forward(
    style, options
):
    dense, config = TinyConfig(**style), TinyConfig(**style, **options)
    weights, batch = logical_weights(dense, seed=3), make_batch(dense)
    _, expected, dense_grads = run_gpt(dense, weights, batch)
    _, logits, grads = run_gpt(
        config, as_experts(weights, config, config.num_experts[0]), batch, tp_size=2
    )
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for name, grad in grads.items():
        if ".experts." in name:  # the gradient of their common value
            torch.testing.assert_close(
                grad.sum(0),
                dense_grads[name.replace(".experts.", ".")],
                rtol=1e-4,
                atol=1e-5,
            )


def test_a_capacity_that_nothing_reaches_is_dropless():
    config = TinyConfig(**KINDS["biases"])
    weights, batch = moe_weights(config, seed=1), make_batch(config)
    free = run_gpt(config, weights, batch)
    huge = run_gpt(replace(config, moe_expert_capacity_factor=9.0), weights, batch)
    assert torch.equal(free[1], huge[1]) and all(
        torch.equal(g, huge[2][n]) for n, g in free[2].items()
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_expert_without_tokens_has_gradients_of_zero(layout):
    config = TinyConfig(**GPT)
    weights, batch = moe_weights(config, seed=1), make_batch(config)
    name = "decoder.layers.1.mlp"
    # The norm's bias alone decides: experts 2 and 4 have the largest logits for every token.
    weights["decoder.layers.1.pre_mlp_layernorm.weight"] *= 0
    bias = weights["decoder.layers.1.pre_mlp_layernorm.bias"]
    weights[f"{name}.router.weight"] = torch.tensor([0.0, -1, 2, -1, 1])[:, None] * bias
    _, logits, grads = run_gpt(config, weights, batch, **layout)
    torch.testing.assert_close(
        logits.double(),
        plain_gpt(
            weights, config, batch.tokens, batch.position_ids, feed_forward=PlainMoE()
        ),
        rtol=1e-5,
        atol=1e-5,
    )
    for linear in (
        "linear_fc1.weight",
        "linear_fc1.bias",
        "linear_fc2.weight",
        "linear_fc2.bias",
    ):
        grad = grads[f"{name}.experts.{linear}"]
        assert [bool(g.any()) for g in grad] == [False, False, True, False, True], (
            linear
        )


def test_losses_reach_the_router_alone_through_its_scores():
    """Their gradient is the difference between a run with them and one without."""
    config, weights, batch, (_, _, expected), _ = reference("capacity")
    silent = replace(config, moe_aux_loss_coeff=(0.0, 0.0), moe_z_loss_coeff=None)
    (_, _, without), _ = plain_run(silent, weights, batch)
    with_terms, plain = (
        run_gpt(config, weights, batch)[2],
        run_gpt(silent, weights, batch)[2],
    )
    name = f"decoder.layers.{config.num_layers - 1}.mlp.router.weight"
    difference = expected[name] - without[name]
    assert difference.abs().max() > 1e-3
    torch.testing.assert_close(
        (with_terms[name] - plain[name]).double(), difference, rtol=1e-4, atol=1e-6
    )
    last = f"decoder.layers.{config.num_layers - 1}.mlp.experts.linear_fc2.weight"
    assert torch.equal(with_terms[last], plain[last])


# Bidirectional models: padding, and experts that choose their tokens

BERT = dict(num_experts=(4,), moe_z_loss_coeff=0.1)
BERTS = {
    "top-k with losses": dict(
        **BERT,
        moe_router_load_balancing_type=("aux_loss", "seq_aux_loss"),
        moe_aux_loss_coeff=(0.3, 0.2),
    ),
    "capacity": dict(**BERT, moe_expert_capacity_factor=0.6),
    "expert choice": dict(**BERT, moe_router_load_balancing_type=("expert_choice",)),
    "expert choice, sigmoid": dict(
        **BERT,
        moe_router_load_balancing_type=("expert_choice",),
        moe_router_topk=1,
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=1.5,
    ),
}


@cache
def bert_reference(kind):
    config = TinyBert(**BERTS[kind])
    shapes = moe_shapes(config, bert_shapes(config), "encoder")
    weights = moe_weights(config, seed=3, shapes=shapes)
    batch = random_bert_batch(config.vocab_size, (3, 4, 5), 12)
    tracked = {name: w.clone().requires_grad_() for name, w in weights.items()}
    moe = PlainMoE(batch.padding)
    logits, order = plain_bert(
        tracked,
        config,
        batch.tokens,
        batch.position_ids,
        batch.token_types,
        batch.padding,
        feed_forward=moe,
    )
    loss = (
        sum(
            plain_bert_losses(
                logits, order, batch.labels, batch.loss_mask, batch.sentence_order
            )
        )
        + moe.objective
    )
    loss.backward()
    assert moe.margin > 1e-5 and batch.padding.any()
    grads = {name: w.grad for name, w in tracked.items()}
    return config, weights, batch, (loss.item(), logits.detach(), grads), moe


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", BERTS)
def test_a_bert_with_experts_equals_a_plain_one_and_routes_no_padding(kind, layout):
    config, weights, batch, expected, moe = bert_reference(kind)
    ours = run_bert(config, weights, batch, **layout)
    here = ~batch.padding  # padding's own logits are of no use to anything
    masked = lambda run: (run[0], run[1] * here[:, :, None], run[2])
    assert_equal_runs(masked(ours), masked(expected))
    found = {
        e.name: (e.value / e.count).item() for e in ours[0].entries if e.weight is None
    }
    for layer, load in moe.load.items():
        name, demand, tokens = (
            layer.removesuffix(".mlp"),
            moe.demand[layer],
            int(here.sum()),
        )
        assert found[f"{name} max load"] == pytest.approx(
            max(demand) * len(demand) / sum(demand)
        )
        assert (
            (f"{name} dropped" in found)
            == (kind == "capacity")
            == (sum(load) < sum(demand))
        )
        if kind == "top-k with losses":
            assert sum(load) == tokens * config.moe_router_topk


def test_padding_has_no_effect_on_other_tokens():
    for options in (
        BERTS["top-k with losses"],
        BERTS["expert choice"],
        dict(**BERT, moe_router_load_balancing_type=("sinkhorn",)),
    ):
        config = TinyBert(**options)
        weights = moe_weights(
            config, 3, moe_shapes(config, bert_shapes(config), "encoder")
        )
        batch = random_bert_batch(config.vocab_size, (3, 4, 5), 12)
        other = replace(batch, tokens=batch.tokens.where(~batch.padding, 1))
        assert (other.tokens != batch.tokens).any()
        first, second = (run_bert(config, weights, b) for b in (batch, other))
        assert torch.equal(first[1][~batch.padding], second[1][~batch.padding])
        assert first[0].objective.item() == second[0].objective.item()


def test_a_choice_by_sinkhorn_trains_as_the_plain_model_with_that_choice():
    """The same choices, given by hand, and their gradients."""
    config = TinyConfig(
        **GPT, moe_router_load_balancing_type=("sinkhorn",), moe_router_topk=1
    )
    weights, batch = moe_weights(config, seed=1), make_batch(config)
    tracked = {name: w.clone().requires_grad_() for name, w in weights.items()}
    logits = plain_gpt(
        tracked, config, batch.tokens, batch.position_ids, feed_forward=_SinkhornMoE()
    )
    loss = plain_loss(logits, batch.labels, batch.loss_mask)
    loss.backward()
    expected = (
        loss.item(),
        logits.detach(),
        {name: w.grad for name, w in tracked.items()},
    )
    for layout in LAYOUTS:
        assert_equal_runs(run_gpt(config, weights, batch, **layout), expected)
    evaluated = replace(batch, training=False)
    plain = replace(
        config,
        moe_router_load_balancing_type=("none",),
        moe_router_score_function="sigmoid",
    )
    assert torch.equal(
        run_gpt(config, weights, evaluated)[1], run_gpt(plain, weights, evaluated)[1]
    )


class _SinkhornMoE:
    """One expert a token, of the table whose rows and columns are scaled in turn many times."""

    def __call__(self, w, name, x, config):
        logits = x @ w[f"{name}.router.weight"].T
        table = logits.detach().flatten(0, 1).exp()
        for _ in range(500):
            table = table / table.sum(1, keepdim=True)
            table = table / table.sum(0)
        best = table.argmax(1).view(x.shape[:2])
        rows = []
        for i, of_sequence in enumerate(best.tolist()):
            for t, e in enumerate(of_sequence):
                y = plain_expert(w, f"{name}.experts", e, x[i, t], config)
                rows.append(logits[i, t, e].sigmoid() * y)
        return torch.stack(rows).view_as(x)


def test_expert_choice_is_refused_in_causal_models():
    config = TinyConfig(**GPT, moe_router_load_balancing_type=("expert_choice",))
    with pytest.raises(ConfigError, match="a causal model may not see"):
        for layer in MODELS["gpt"](config, context_of()):
            layer.make()


def test_a_sum_over_slots_reads_no_further_than_the_last_that_is_kept():
    """Experts that are the identity: a token is multiplied by the sum of its kept weights."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(6, 8, generator=draw, dtype=torch.float64)
    weights = torch.rand(6, 4, generator=draw, dtype=torch.float64)
    experts = torch.stack([torch.randperm(4, generator=draw) for _ in range(6)])
    for most in (0, 1, 3, 4):
        kept = (
            torch.arange(4) < torch.tensor([0, 1, 2, 3, 4, 1]).clamp(max=most)[:, None]
        )
        tokens, factors = x.clone().requires_grad_(), weights.clone().requires_grad_()
        routing = Routing(experts, factors, factors, factors, kept)
        dispatch = Dispatch(routing, 4, Groups.of(context_of()))
        y = dispatch.back(dispatch.arrive(dispatch.send(tokens)))
        torch.testing.assert_close(y, x * (weights * kept).sum(1, keepdim=True))
        y.backward(x)
        torch.testing.assert_close(tokens.grad, y.detach())
        torch.testing.assert_close(factors.grad, kept * x.square().sum(1, keepdim=True))
        assert dispatch._place.shape[1] == most
        assert sum(dispatch.runs.counts) == kept.sum()


def test_backward_of_the_sum_over_slots_has_few_rows_in_fp32_at_a_time():
    tokens, k, width = 64, 8, 256
    rows = torch.randn(tokens * k, width).bfloat16().requires_grad_()
    weights, order = torch.rand(tokens, k).requires_grad_(), torch.randperm(tokens * k)
    y = combine(rows, weights, order, order.argsort().view(tokens, k))
    slope = torch.randn(tokens, width).bfloat16()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        y.backward(slope)
    changes = [
        e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    held = torch.tensor(
        [e.nbytes() for e in sorted(changes, key=lambda e: e.start_ns())]
    ).cumsum(0)
    assert rows.nbytes <= held.max() < 2 * rows.nbytes
    by_hand = slope[order // k].float()
    assert torch.equal(rows.grad, (by_hand * weights.flatten()[order, None]).bfloat16())
    dots = (
        torch.zeros(tokens * k)
        .index_put((order,), (by_hand * rows.float()).sum(1))
        .view(tokens, k)
    )
    torch.testing.assert_close(weights.grad, dots)


@pytest.mark.parametrize("layout", ["dp=2,cp=2,zero=1", "tp=2,cp=2,sp=1"])
def test_sinkhorn_of_divided_sequences_trains_like_one_process(layout):
    """Ranks that divide the sequences balance all of their tokens, in the order of one process."""
    job = [
        *tiny_job("llama", "fp32", True, 0.0, 2, GLOBAL_BATCH, 3),
        *"--num-experts 4 --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn".split(),
    ]
    difference, _ = stray(job, layout, 3)
    assert difference.is_within(TOLERANCE["fp32"]), difference
