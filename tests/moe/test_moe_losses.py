"""Losses that balance the load, against values worked out by hand."""

import pytest
import torch

from megatron_ds.batch.ledger import Ledger
from megatron_ds.moe.losses import (
    add_losses,
    of_last_step,
    of_micro_batch,
    of_sequences,
    record_load,
)
from megatron_ds.moe.router import Routing, choose
from megatron_ds.moe.totals import Totals, demand_of
from tests.harness.golden_routing import LOAD, LOGITS, E, K, routing_config

pytestmark = pytest.mark.plan

PADDED = torch.tensor([True, True, True, False, True, False, True, True])


def golden(tokens=slice(None), logits=LOGITS, **options) -> Routing:
    return choose(logits[tokens], routing_config(**options))


def totals(routing: Routing, sets=1, counted=None, kept=None) -> Totals:
    """Of one rank; kept: after drops."""
    chosen = (
        routing if counted is None else routing.keeping(counted[:, None].expand(-1, K))
    )
    kept = chosen.keeping(kept).kept
    return Totals.of(chosen, kept, sets, None, counted, squares=True)


def test_the_loss_of_a_micro_batch():
    assert of_micro_batch(totals(golden())).item() == pytest.approx(1.0022571, abs=1e-6)
    halves = [
        of_micro_batch(totals(golden(half))).item() for half in (slice(4), slice(4, 8))
    ]
    assert halves == pytest.approx([1.0402812, 0.9918423], abs=1e-6)


def test_the_loss_of_one_expert_a_token_is_that_of_switch_transformers():
    routing = golden(moe_router_topk=1, moe_router_pre_softmax=True)
    assert of_micro_batch(totals(routing)).item() == pytest.approx(1.0501792, abs=1e-6)


def test_the_loss_of_sequences_is_their_mean():
    each = [of_micro_batch(totals(golden(slice(i, None, 2)))).item() for i in range(2)]
    assert each == pytest.approx([0.9842356, 1.0528715], abs=1e-6)
    assert of_sequences(totals(golden(), 2)).item() == pytest.approx(
        1.0185535, abs=1e-6
    )


def test_the_z_loss():
    ledger = Ledger()
    add_losses(ledger, totals(golden()), routing_config(moe_z_loss_coeff=1e-3))
    [entry] = ledger.take()
    assert entry.value.item() / entry.count == pytest.approx(5.0109611, abs=1e-5)
    assert (entry.name, entry.weight) == ("router z-loss", 1e-3)


def test_each_loss_has_its_weight():
    config = routing_config(
        moe_router_load_balancing_type=("aux_loss", "seq_aux_loss"),
        moe_aux_loss_coeff=(0.5, 0.25),
    )
    ledger = Ledger()
    add_losses(ledger, totals(golden(), 2), config)
    assert [(e.name, round(e.value.item(), 5), e.weight) for e in ledger.take()] == [
        ("load balancing loss", 1.00226, 0.5),
        ("seq load balancing loss", 1.01855, 0.25),
    ]
    add_losses(ledger, totals(golden(), 2), routing_config())
    assert not ledger.take()


@pytest.mark.parametrize(
    "options", [{}, dict(moe_router_score_function="sigmoid")], ids=str
)
def test_the_loss_is_1_at_an_even_load_and_its_gradient_is_that_of_the_scores(options):
    logits = torch.zeros(4, E, dtype=torch.float64)
    routing = golden(logits=logits, **options)
    even = Routing(
        torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]]),
        routing.weights,
        routing.scores,
        logits,
    )
    assert of_micro_batch(totals(even)).item() == pytest.approx(1)
    # A loss that is moved by counts would not be differentiable; at fixed counts it is linear in the scores.
    z = LOGITS.double().requires_grad_()
    of = lambda z, *which: totals(golden(logits=z, **options), *which)
    for value in (
        lambda z: of_micro_batch(of(z)),
        lambda z: of_sequences(of(z, 2, PADDED)),
        lambda z: of_last_step(of(z, 2, PADDED), torch.tensor([5, 1, 0, 2])),
    ):
        assert torch.autograd.gradcheck(value, (z,))


def test_loads_are_counted_by_sequence_and_without_padding():
    assert demand_of(golden().experts, E, 1).tolist() == [LOAD]
    assert totals(golden(), 2).demand.tolist() == [[3, 1, 1, 3], [3, 1, 2, 2]]
    counted = [
        row for row, counts in zip(golden().experts.tolist(), PADDED.tolist()) if counts
    ]
    by_hand = [sum(row.count(e) for row in counted) for e in range(E)]
    assert totals(golden(), 1, PADDED).demand.tolist() == [by_hand]
    assert totals(golden(), 2, PADDED).whole.demand.tolist() == by_hand


def test_padding_does_not_count_in_any_loss():
    last = torch.tensor([5, 1, 0, 2]) / 8
    for loss in (of_micro_batch, of_last_step):
        whole = loss(totals(golden(PADDED)), last)
        torch.testing.assert_close(loss(totals(golden(), 1, PADDED), last), whole)
    first, second = PADDED[0::2], PADDED[1::2]
    sequences = [
        of_micro_batch(totals(golden(LOGITS.new_tensor(range(i, 8, 2)).long()[own])))
        for i, own in enumerate((first, second))
    ]
    torch.testing.assert_close(
        of_sequences(totals(golden(), 2, PADDED)), torch.stack(sequences).mean()
    )
    ledger = Ledger()
    add_losses(
        ledger, totals(golden(), 1, PADDED), routing_config(moe_z_loss_coeff=1.0)
    )
    [entry] = ledger.take()
    assert entry.value.item() / entry.count.item() == pytest.approx(
        LOGITS[PADDED].logsumexp(1).square().mean().item()
    )


def test_a_sequence_of_padding_alone_adds_0():
    counted = torch.tensor([True, False] * 4)
    assert of_sequences(totals(golden(), 2, counted)).item() == pytest.approx(
        0.9842356 / 2, abs=1e-6
    )
    assert (
        of_micro_batch(totals(golden(), 1, torch.zeros(8, dtype=torch.bool))).item()
        == 0
    )


def test_the_loss_with_the_load_of_the_last_step_does_not_depend_on_the_split():
    last = torch.tensor([5, 1, 0, 2]) / 8
    of = lambda tokens: of_last_step(totals(golden(tokens)), last).item()
    p = LOGITS.softmax(-1).mean(0)
    assert of(slice(None)) == pytest.approx((E * (p * last).sum()).item())
    assert (of(slice(4)) + of(slice(4, 8))) / 2 == pytest.approx(of(slice(None)))
    assert of_last_step(totals(golden()), torch.zeros(E)).item() == pytest.approx(1)


def test_metrics_of_a_layer():
    ledger, routing = Ledger(), golden()
    kept = torch.ones(8, K, dtype=torch.bool)
    kept[7] = kept[2, 1] = False
    kept[3] = kept[5] = False  # padding, below
    p = LOGITS.softmax(-1)
    entropy = -(p * p.log()).sum(1)
    for counted, tokens in ((None, 8), (PADDED, 6)):
        demand = (
            LOAD
            if counted is None
            else demand_of(routing.experts[PADDED], E, 1)[0].tolist()
        )
        record_load(ledger, "layer", totals(routing, 2, counted, kept), limited=True)
        found = {e.name: (e.value / e.count).item() for e in ledger.take()}
        dropped, without = (7, 3) if counted is None else (3, 1)
        entropies = entropy if counted is None else entropy[counted]
        assert found == pytest.approx(
            {
                "layer max load": max(demand) / (2 * tokens / E),
                "layer router entropy": entropies.mean().item(),
                "layer dropped": dropped / (2 * tokens),
                "layer without expert": without / tokens,
            }
        )
    record_load(
        ledger,
        "layer",
        totals(routing),
        limited=False,
        bias=torch.tensor([0.1, -0.2, 0.3, 0]),
    )
    entries = ledger.take()
    assert [e.name for e in entries] == [
        "layer bias range",
        "layer max load",
        "layer router entropy",
    ]
    assert entries[0].value.item() == pytest.approx(0.5)
