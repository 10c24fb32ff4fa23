"""Sums of a layer with experts: demand before drops, in one all-reduce for losses, balance and metrics."""

import pytest
import torch

from megatron_ds.batch.ledger import Ledger
from megatron_ds.models import MODELS
from megatron_ds.moe.balance import Balance
from megatron_ds.moe.mixture import MixtureOfExperts
from megatron_ds.mpu.group import solo
from tests.harness.model_runs import context_of
from tests.harness.moe_runs import model_of
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import SEQ_LENGTH, tiny_job

pytestmark = pytest.mark.threads

SAMPLES, H, E, K = 3, 32, 4, 2
EVERY_LOSS = (
    "--moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss "
    "--moe-aux-loss-coeff 0.1 0.2 0.3 --moe-z-loss-coeff 1e-3"
).split()
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias".split()
HALF = ["--moe-expert-capacity-factor", "0.5"]
MOST = 6  # 0.5 · K · SEQ_LENGTH / E


def layer_run(tp_size, *flags):
    """Of each rank: (gradient of the router, ledger, balance, calls by (operation, axes) in the forward).

    One forward and backward of a layer with sequence parallelism."""
    job = [
        *tiny_job("llama", "fp32", True, 0.0, 2, SAMPLES, 1),
        *f"--num-experts {E} --moe-router-dtype fp64 --micro-batch-size {SAMPLES}".split(),
        *flags,
    ]
    config = model_of(job)
    whole = torch.randn(
        SEQ_LENGTH, SAMPLES, H, generator=torch.Generator().manual_seed(1)
    )

    def main(rank, world):
        tp = (
            world.group("tp", tuple(range(tp_size)), rank)
            if tp_size > 1
            else solo("tp")
        )
        ctx = context_of(tp, sequence_parallel=tp_size > 1)
        mlp = MixtureOfExperts(config, E, "decoder.layers.0.mlp", ctx, output_std=0.1)
        draw = torch.Generator().manual_seed(2)
        for p in mlp.parameters():
            p.data.normal_(std=0.4, generator=draw)
        mlp.router.weight.data[3] += 0.3 * torch.sign(
            whole.mean((0, 1))
        )  # demand is uneven
        ledger = Ledger()
        batch = MODELS["gpt"].data.blank(SAMPLES, SEQ_LENGTH).with_ledger(ledger)
        tp.traffic.clear()
        mlp(whole.chunk(tp_size)[rank].clone(), batch)
        calls = {key[:2]: count for key, count in tp.traffic.calls.items()}
        entries = ledger.take()
        terms = [
            e.weight * e.value / max(float(e.count), 1)
            for e in entries
            if e.weight is not None
        ]
        if terms:
            sum(terms).backward()
        return mlp.router.weight.grad, entries, mlp.router.balance, calls

    return run_ranks(tp_size, main)


@pytest.mark.parametrize(
    "flags", [[*EVERY_LOSS, *BIAS], [*EVERY_LOSS, *BIAS, *HALF], []], ids=len
)
def test_all_sums_of_a_layer_travel_in_one_all_reduce(flags):
    """And are those of one process; each rank's gradient is that of its own tokens."""
    [(gradient, entries, _, calls)] = layer_run(1, *flags)
    assert not calls
    ranks = layer_run(2, *flags)
    drops = "--moe-expert-capacity-factor" in flags
    for _, found, _, calls in ranks:
        assert calls["all_reduce", "tp"] == 1
        # numbers of rows; with drops also experts and weights together
        assert calls["all_gather", "tp"] == 1 + drops
        for ours, alone in zip(found, entries, strict=True):
            assert (ours.name, ours.weight) == (alone.name, alone.weight)
            torch.testing.assert_close(ours.value, alone.value, rtol=1e-12, atol=0)
            assert float(ours.count) == float(alone.count)
    if flags:
        assert len([e for e in entries if e.weight is not None]) == 4
        torch.testing.assert_close(
            sum(rank[0] for rank in ranks), gradient, rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(
    "padded", [[], ["--moe-pad-expert-input-to-capacity"]], ids=len
)
def test_balance_and_largest_load_are_those_of_demand_before_drops(tp_size, padded):
    """Every expert keeps all that it may of each sequence, so that loads after drops are equal: they would
    move no bias."""
    [(_, _, balance, _)] = layer_run(1, *EVERY_LOSS, *BIAS)
    demand = balance.tally.tolist()
    assert sum(demand) == SAMPLES * SEQ_LENGTH * K and len(set(demand)) > 1
    for _, entries, balance, _ in layer_run(
        tp_size, *EVERY_LOSS, *BIAS, *HALF, *padded
    ):
        found = {
            e.name.removeprefix("decoder.layers.0 "): e.value.item() / float(e.count)
            for e in entries
        }
        assert found["dropped"] == 1 - SAMPLES * E * MOST / sum(demand)
        assert found["max load"] == pytest.approx(max(demand) * E / sum(demand))
        assert balance.tally.tolist() == demand
        balance.update(balance.tally)
        mean = sum(demand) / E
        signs = [(mean > d) - (mean < d) for d in demand]
        torch.testing.assert_close(
            balance.bias, 1e-3 * torch.tensor(signs, dtype=torch.float32)
        )
        torch.testing.assert_close(balance.share, torch.tensor(demand) / sum(demand))


def test_decisions_follow_whole_numbers_however_many_and_however_divided():
    """Beside 2**25 an fp32 number cannot tell 1 more, and a mean of fp32 shares would be rounded."""
    config = model_of(
        [
            *tiny_job("llama", "fp32", True, 0.0, 2, 1, 1),
            "--num-experts",
            "4",
            *BIAS,
            "--moe-router-load-balancing-type",
            "global_aux_loss",
        ]
    )
    parts = torch.tensor(
        [
            [1 << 24, 1 << 24, 7, 1],
            [(1 << 24) + 1, 1 << 24, (1 << 25) - 8, (1 << 25) - 1],
        ]
    )
    total, found = parts.sum(0), []
    for order in ([0, 1], [1, 0]):
        balance = Balance(config, E, "router")
        balance.place(torch.device("cpu"))
        batch = MODELS["gpt"].data.blank(1, SEQ_LENGTH).with_ledger(Ledger())
        for row in parts[order].double():
            balance.count(row, batch)
        balance.update(balance.tally)
        found.append((balance.bias, balance.share))
    torch.testing.assert_close(
        found[0][0], torch.tensor([-1e-3, 0, 1e-3, 0]), rtol=0, atol=0
    )
    assert (
        total.sum() == E << 25 and found[0][1].tolist() == (total / (E << 25)).tolist()
    )
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_a_layer_that_backward_runs_again_counts_once():
    config = model_of(
        [*tiny_job("llama", "fp32", True, 0.0, 2, 1, 1), "--num-experts", "4", *BIAS]
    )
    mlp = MixtureOfExperts(
        config, E, "decoder.layers.0.mlp", context_of(), output_std=0.1
    )
    for p in mlp.parameters():
        torch.nn.init.normal_(p)
    ledger = Ledger()
    x, batch = (
        torch.randn(SEQ_LENGTH, 1, H),
        MODELS["gpt"].data.blank(1, SEQ_LENGTH).with_ledger(ledger),
    )
    mlp(x, batch)
    tally = mlp.router.balance.tally.clone()
    ledger.close()
    assert tally.any() and ledger.take()
    mlp(x, batch)
    assert torch.equal(mlp.router.balance.tally, tally) and not ledger.take()
