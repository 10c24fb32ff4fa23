"""DeepSpeed's gates, and its layer `MoE` on one rank.

The values of golden/deepspeed_moe.json are those of DeepSpeed 0.19.8 (torch 2.13, CPU) where `layer_of` makes
its `deepspeed.moe.layer.MoE` and calls `set_deepspeed_parallelism()`; TOP1, TOP2 and TOPK are those of its
functions `top1gating`, `top2gating` and `topkgating` for LOGITS.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_ds.compat.deepspeed.gates import MORE, Draws, route
from megatron_ds.compat.deepspeed.moe_layer import RoutingPlace
from megatron_ds.moe import MoE
from megatron_ds.moe.capacity import Capacity
from megatron_ds.mpu.group import solo

pytestmark = pytest.mark.plan

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "deepspeed_moe.json").read_text()
)
LOGITS = torch.tensor(
    [[2 * math.sin(1.3 * t + 2.1 * e + 0.7) for e in range(4)] for t in range(8)]
)
SWITCH_LOSS, LOSS_OF_TWO = 1.0501792, 1.0022571


def capacity(factor, k, least=0, experts=4):
    return Capacity(factor, least, "probs", "micro-batch", experts, k)


def kept_lists(routing, num_experts=4):
    """The tokens that each expert keeps."""
    experts = (
        routing.experts
        if routing.kept is None
        else routing.experts.masked_fill(~routing.kept, -1)
    )
    return [
        (experts == e).any(1).nonzero().flatten().tolist() for e in range(num_experts)
    ]


def by_expert(routing):
    """Weights [T, E]; 0 where an expert is not chosen or dropped the token."""
    return torch.zeros_like(routing.scores).scatter(1, routing.experts, routing.weights)


# ------------------------------------------------------------------------------------------------------ gates
# Expert 2 has the tokens 2, 3, 7. DeepSpeed keeps [3, 7], the order in which torch.topk leaves equal numbers;
# here the first stay.
TOP1 = (
    1,
    None,
    1.0,
    [[1, 6], [4], [2, 3], [0, 5]],
    SWITCH_LOSS,
    [2, 1, 3, 2],
    {
        (0, 3): 0.3940661,
        (1, 0): 0.4640706,
        (3, 2): 0.5610029,
        (4, 1): 0.8528180,
        (6, 0): 0.4393549,
    },
)
TOP2 = (
    2,
    None,
    1.0,
    [[0, 1, 2, 6], [3, 4], [2, 3, 7], [0, 1, 4, 5]],
    SWITCH_LOSS,
    [6, 2, 3, 5],
    {
        (0, 0): 0.4936159,
        (0, 3): 0.5063841,
        (2, 0): 0.1005172,
        (5, 3): 1.0,
        (6, 0): 1.0,
        (7, 2): 1.0,
    },
)
TOP2_HALF = (
    2,
    None,
    0.5,
    [[1, 6], [3, 4], [2, 3], [0, 5]],
    SWITCH_LOSS,
    [6, 2, 3, 5],
    {(0, 3): 1.0, (3, 1): 0.4109270, (3, 2): 0.5890730, (4, 1): 1.0, (7, 2): 0.0},
)
TOPK = (
    2,
    MORE,
    1.0,
    [[0, 1, 5, 6], [3, 4], [2, 3, 7], [0, 1, 5, 6]],
    LOSS_OF_TWO,
    [6, 2, 3, 5],
    {(0, 0): 0.4936159, (2, 2): 1.0, (4, 1): 1.0, (5, 0): 0.4949419, (6, 3): 0.4948826},
)
TOPK_HALF = (
    2,
    MORE,
    0.5,
    [[1, 6], [3, 4], [2, 7], [1, 5]],
    LOSS_OF_TWO,
    [6, 2, 3, 5],
    {(0, 0): 0.0, (0, 3): 0.0, (1, 0): 0.5035627, (3, 1): 1.0, (5, 3): 1.0},
)


@pytest.mark.parametrize(
    "k, rule, factor, kept, l_aux, counts, weights",
    [TOP1, TOP2, TOP2_HALF, TOPK, TOPK_HALF],
)
def test_gates_have_the_values_of_deepspeed(
    k, rule, factor, kept, l_aux, counts, weights
):
    gated = route(LOGITS, capacity(factor, k), rule)
    assert kept_lists(gated.routing) == kept
    assert (
        gated.l_aux.item() == pytest.approx(l_aux, abs=1e-7)
        and gated.exp_counts.tolist() == counts
    )
    found = by_expert(gated.routing)
    assert {place: found[place].item() for place in weights} == pytest.approx(
        weights, abs=1e-7
    )


def test_an_expert_has_at_least_min_capacity_places_and_all_without_a_factor():
    everything = [[1, 6], [4], [2, 3, 7], [0, 5]]
    for limit in (capacity(1.0, 1, least=4), capacity(None, 1)):
        assert kept_lists(route(LOGITS, limit).routing) == everything


def test_the_number_of_places_is_exact():
    """1.1 * 80 / 8 is 11.000000000000002 in floating point."""
    assert (
        capacity(1.1, 1, experts=8).rows(80) == 11
        and capacity(1.25, 2, experts=8).rows(81) == 26
    )


def test_equal_scores_choose_the_first_experts_and_equal_priorities_keep_the_first_tokens():
    for k in (1, 2, 3):
        gated = route(torch.zeros(8, 4), capacity(1.0, k))
        assert gated.routing.experts.tolist() == [list(range(k))] * 8
        places = 2 * k
        assert kept_lists(gated.routing) == [
            list(range(min(8, places))) if e < k else [] for e in range(4)
        ]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_padding_takes_no_place_and_has_no_weight(k):
    used = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1]).bool()
    gated = route(LOGITS, capacity(0.5, k), used=used)
    # The same priorities without the padding, at the same number of places.
    alone = route(LOGITS[used], capacity(0.5 * 8 / 6, k))
    at = used.nonzero().flatten()
    assert kept_lists(gated.routing) == [
        at[tokens].tolist() for tokens in kept_lists(alone.routing)
    ]
    assert not gated.routing.weights[~used].any()
    assert torch.equal(gated.exp_counts, alone.exp_counts)


def test_random_selection_keeps_every_token_of_a_full_expert_equally_often():
    logits = torch.zeros(8, 4)
    kept = torch.zeros(8)
    for i in range(400):
        gated = route(
            logits,
            capacity(1.0, 1),
            random=Draws((i,)).uniform("selection", logits[:, :1]),
        )
        [tokens, *others] = kept_lists(gated.routing)
        assert len(tokens) == 2 and others == [[], [], []]
        kept[tokens] += 1
    # 100 of 400 with a standard deviation of 8.7
    assert (kept - 100).abs().max() < 30


def test_gumbel_noise_samples_experts_by_their_scores():
    logits = torch.tensor([[0.1, 1.3, -0.4, 0.6]]).expand(6000, 4)
    noise = Draws((3, "layer", 7)).gumbel("choice", logits)
    first = route(logits, capacity(None, 1), noise=noise).exp_counts / 6000
    torch.testing.assert_close(first, logits[0].softmax(0), atol=0.02, rtol=0)
    second = route(logits, capacity(None, 2), noise=noise)
    assert (second.routing.experts[:, 0] == 1).all()  # the first choice has no noise
    others = logits[0].masked_fill(torch.arange(4) == 1, -torch.inf).softmax(0)
    torch.testing.assert_close(
        second.routing.experts[:, 1].bincount(minlength=4) / 6000,
        others,
        atol=0.02,
        rtol=0,
    )


# ------------------------------------------------------------------------------------------ layer on one rank
def waves(shape, step, start):
    n = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(step * n + start).float().view(shape)


def layer_of(options):
    layer = MoE(3, nn.Linear(3, 3), 4, **options)
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(2 * waves((4, 3), 1.3, 0.7))
        for e, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            expert.weight.copy_(waves((3, 3), 0.9 + e, 0.2))
            expert.bias.copy_(waves((3,), 0.5 + e, 0.1))
        if layer.use_residual:
            layer.mlp.weight.copy_(waves((3, 3), 0.6, 0.3))
            layer.mlp.bias.copy_(waves((3,), 0.4, 0.3))
            layer.coefficient.weight.copy_(waves((2, 3), 0.8, 0.4))
            layer.coefficient.bias.copy_(waves((2,), 0.7, 0.3))
    return layer


@pytest.mark.parametrize("case", GOLDEN)
@pytest.mark.parametrize("shape", [(2, 4, 3), (8, 3)])
def test_the_layer_computes_what_deepspeed_computes(case, shape):
    golden = GOLDEN[case]
    layer, x = (
        layer_of(golden["options"]),
        waves((2, 4, 3), 0.77, 0.15).view(shape).requires_grad_(),
    )
    used = golden.get("used_token")
    output, l_aux, counts = layer(
        x, None if used is None else torch.tensor(used).view(shape[:-1])
    )
    (output.square().sum() + l_aux).backward()
    assert output.shape == shape and counts.tolist() == golden["exp_counts"]
    for found, name in (
        (output, "output"),
        (l_aux, "l_aux"),
        (x.grad, "input_gradient"),
        (layer.deepspeed_moe.gate.wg.weight.grad, "gate_gradient"),
    ):
        expected = torch.tensor(golden[name])
        torch.testing.assert_close(
            found.detach().flatten(), expected.flatten(), rtol=1e-5, atol=1e-6
        )


def test_experts_begin_as_copies_with_the_marks_of_the_original():
    expert = nn.Linear(3, 3)
    expert.weight.tensor_model_parallel = True
    layer = MoE(3, expert, 6, ep_size=2)
    copies = list(layer.deepspeed_moe.experts.deepspeed_experts)
    assert len(copies) == 3 and all(
        torch.equal(each.weight, expert.weight) for each in copies
    )
    assert len({each.weight.data_ptr() for each in (*copies, expert)}) == 4
    for p in (each.weight for each in copies):
        assert (
            p.tensor_model_parallel
            and p.allreduce is False
            and p.group_name == "ep_size_2"
        )


def test_noise_is_a_function_of_layer_and_micro_batch_and_used_in_training_alone():
    x = waves((64, 3), 0.37, 0.15)

    def output(name, micro_batch, noise, training=True):
        layer = layer_of(
            dict(k=1, noisy_gate_policy=noise, use_rts=False, drop_tokens=False)
        )
        layer.connect(RoutingPlace(solo("ep"), (0, name), lambda: micro_batch))
        return layer.train(training)(x)[0]

    for noise in ("Jitter", "RSample"):
        first = output("a", 0, noise)
        assert torch.equal(output("a", 0, noise), first)
        assert not torch.equal(output("b", 0, noise), first) and not torch.equal(
            output("a", 1, noise), first
        )
        assert torch.equal(output("a", 0, noise, training=False), output("a", 0, None))


def test_evaluation_has_a_capacity_of_its_own():
    layer = layer_of(
        dict(
            k=1,
            use_rts=False,
            capacity_factor=0.5,
            eval_capacity_factor=4.0,
            min_capacity=0,
        )
    )
    x = waves((8, 3), 0.77, 0.15)
    dropped = lambda: (layer(x)[0] == 0).all(1).sum().item()
    assert dropped() == 4 and layer.eval() and dropped() == 0


def test_random_selection_is_the_default_of_one_expert():
    layer = layer_of(dict(capacity_factor=0.5, min_capacity=0))
    x = waves((64, 3), 0.77, 0.15)
    kept = []
    for micro_batch in range(3):
        layer.connect(RoutingPlace(solo("ep"), (0, "a"), lambda now=micro_batch: now))
        kept.append((layer(x)[0] != 0).any(1))
    assert kept[0].sum() == kept[1].sum() == kept[2].sum() < 64
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept[1], kept[2])


def test_16_bit_layers_gate_in_fp32():
    layer = layer_of(
        dict(k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
    ).bfloat16()
    x = waves((8, 3), 0.77, 0.15).bfloat16()
    output, l_aux, _ = layer(x)
    whole = layer.float()
    expected, loss, _ = whole(x.float())
    assert output.dtype == torch.bfloat16 and l_aux.dtype == torch.float32
    assert l_aux.item() == loss.item()
    torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.01)
