"""Experts padded to their capacity: the results of experts that are not, and traffic exactly as planned."""

import pytest
import torch

from megatron_ds.batch.ledger import DISCARDING
from megatron_ds.config import parse
from megatron_ds.models import MODELS
from megatron_ds.moe.capacity import Capacity, limit
from megatron_ds.moe.mixture import MixtureOfExperts
from megatron_ds.moe.padded import PaddedDispatch
from megatron_ds.mpu.columns import columns_of_rows, rows_of_columns
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import SEQ_LENGTH, tiny_job
from tests.planning.test_rank_plan import BATCH, LAYERS, STEPS, check

pytestmark = pytest.mark.threads

PAD = "--moe-pad-expert-input-to-capacity"
MOE = (
    "--num-experts 4 --moe-router-dtype fp64 --moe-aux-loss-coeff 0.01 "
    "--moe-expert-capacity-factor"
).split()
FEW = 4


# ------------------------------------------------------------------ equal to experts that are not padded
@pytest.mark.parametrize("scope", ["sequence", "micro-batch"])
@pytest.mark.parametrize("factor", ["0.5", "1.0", "7"])
def test_a_layer_is_a_sum_over_kept_slots_whatever_empty_places_hold(
    scope, factor, monkeypatch
):
    """In fp64, with biases, which make the results of empty rows other than zero. At the greatest factor half
    of the rows are empty."""
    job = [
        *tiny_job("gpt2", "fp32", True, 0.0, 2, 3, FEW),
        *MOE,
        factor,
        PAD,
        "--moe-capacity-scope",
        scope,
        "--micro-batch-size",
        "3",
    ]
    config, ctx = (
        parse(job, world_size=1).model,
        ParallelContext(dtype=torch.float64),
    )
    mlp = MixtureOfExperts(config, 4, "mlp", ctx, output_std=0.3)
    torch.manual_seed(5)
    for p in mlp.parameters():
        torch.nn.init.normal_(p, std=0.4)
    x = torch.randn(SEQ_LENGTH, 3, 32, dtype=torch.float64).requires_grad_()
    batch = MODELS["gpt"].data.blank(3, SEQ_LENGTH).with_ledger(DISCARDING)
    counts, arrive = [], PaddedDispatch.arrive
    monkeypatch.setattr(
        PaddedDispatch,
        "arrive",
        lambda self, rows: counts.append(self.runs.counts) or arrive(self, rows),
    )

    def plain(x, batch):
        routing = limit(mlp.router(x, batch), Capacity.of(config, 4, True), batch, ctx)
        tokens, y = x.flatten(0, 1), 0
        one, two = mlp.experts.linear_fc1, mlp.experts.linear_fc2
        for e in range(4):
            made = mlp.experts.activation(tokens @ one.weight[e].t() + one.bias[e])
            share = (routing.weights * routing.kept * (routing.experts == e)).sum(
                1, keepdim=True
            )
            y = y + share * (made @ two.weight[e].t() + two.bias[e])
        return y.view_as(x)

    results = []
    for function in (mlp, plain):
        y = function(x, batch)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        results.append(
            (y, *torch.autograd.grad((y * weights).sum(), (x, *mlp.parameters())))
        )
    sets, tokens = (3, SEQ_LENGTH) if scope == "sequence" else (1, 3 * SEQ_LENGTH)
    assert counts == [(sets * min(tokens, int(float(factor) * 2 * tokens / 4)),) * 4]
    assert all(
        torch.allclose(a, b, rtol=1e-10, atol=1e-10)
        for a, b in zip(*results, strict=True)
    )


@pytest.mark.parametrize("size", [2, 3])
def test_rows_and_columns_change_places_forward_and_backward(size):
    whole = torch.arange(5 * size * 2 * size, dtype=torch.float64).view(
        5 * size, 2 * size
    )

    def main(rank, world):
        group = Mesh(
            Grid.fit(size, tp=size), rank, world.connect, torch.device("cpu")
        ).group("tp")
        x = whole.chunk(size)[rank].clone().requires_grad_()
        y = columns_of_rows(x, group)
        back = rows_of_columns(y, group)
        back.backward(whole.chunk(size)[rank] * 3)
        return y, back, x.grad

    for rank, (y, back, grad) in enumerate(run_ranks(size, main)):
        mine = whole.chunk(size)[rank]
        assert torch.equal(y, whole.chunk(size, dim=1)[rank]) and torch.equal(
            back, mine
        )
        assert torch.equal(grad, 3 * mine)


# ------------------------------------------------------------------ as planned
LAYOUTS = [
    "dp=2,ep=2",
    "tp=2,sp=1,dp=2,ep=2,zero=1",
    "tp=2,dp=2,ep=2,zero=3",
    "tp=2,sp=1,pp=2",
    "dp=4,ep=2,pp=2,zero=2,recompute=full",
]


@pytest.mark.parametrize("number, layout", list(enumerate(LAYOUTS)), ids=str)
def test_every_rank_sends_and_holds_what_was_planned(number, layout):
    """To the call and to the byte, with a dense block, shared experts and a bias of the routers. Plans of
    these layers are long: one layout has several with experts."""
    layers = 2 if number else LAYERS
    style = ("llama", "bf16", True, 0.0) if number % 2 else ("gpt2", "fp32", False, 0.1)
    job = [
        *tiny_job(*style, layers, BATCH, STEPS),
        *MOE,
        "1.2",
        PAD,
        *(
            f"--moe-layer-freq [0]+[1]*{layers - 1} --moe-shared-expert-intermediate-size 24 "
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
        ).split(),
    ]
    planned = check(job, layout)
    assert not any(
        operation == "all_to_all" and axes == "ep"
        for operation, axes, _ in planned.calls
    )
