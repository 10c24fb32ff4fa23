"""Experts in evaluation: a capacity of its own, no noise, no counting."""

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.progress.ramps import Progress
from megatron_ds.training.build import build_replica
from megatron_ds.training.step import evaluate, train_step
from tests.harness.layout_comparison import mock_samples, open_loader, parse_layout
from tests.harness.layout_runs import GLOBAL_BATCH
from tests.harness.moe_runs import job_of
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

NOISE = (
    "--moe-router-noise gumbel --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type seq_aux_loss --moe-expert-capacity-factor 0.6"
).split()


def evaluated(job, layout, steps=2):
    """(an evaluation after some steps, whether it left all routers as they were)."""
    request = parse_layout(layout, mbs="1")
    config = parse([*job, *request.flags], world_size=request.world_size)
    samples = mock_samples(config, 4 * GLOBAL_BATCH, seed=1)

    def main(rank, world):
        mesh = Mesh(
            config.grid(request.world_size), rank, world.connect, torch.device("cpu")
        )
        replica = build_replica(config, mesh)
        loader = open_loader(config, samples, mesh)
        for step in range(steps):
            progress = Progress(step=step, samples=step * GLOBAL_BATCH)
            train_step(
                replica,
                replica.batches.training(loader, progress, GLOBAL_BATCH),
                progress,
                learning_rate=1e-3,
                weight_decay=0.0,
            )
        memory = lambda: {
            piece.spec.name: piece.tensor.clone()
            for piece in replica.step_state.pieces()
        }
        before = memory()
        result = evaluate(
            replica,
            loader,
            first_sample=0,
            iterations=2,
            global_batch_size=GLOBAL_BATCH,
        )
        loader.close()
        tallies = [
            balance.tally.sum().item() for balance in replica.step_state.balances
        ]
        moved = any(t.any() for t in before.values())
        assert moved if steps > 1 else steps or not moved, (
            "steps move a bias; one may find equal loads"
        )
        return result, all(
            torch.equal(before[n], t) for n, t in memory().items()
        ) and not any(tallies)

    ranks = run_ranks(request.world_size, main)
    assert all(result.loss == ranks[0][0].loss for result, _ in ranks)
    return ranks[0][0], all(same for _, same in ranks)


@pytest.mark.parametrize(
    "limit", [[], ["--moe-eval-capacity-factor", "0.8"]], ids=["dropless", "limited"]
)
def test_evaluation_has_its_own_capacity_no_noise_no_losses_and_leaves_routers_as_they_are(
    limit,
):
    job = job_of(*NOISE, *limit, without=("--eod-mask-loss",))
    (result, is_same) = evaluated(job, "mbs=1")
    assert is_same, "evaluation moved a bias, or counted"
    assert not any("balancing" in name for name in result.metrics)
    dropped = [mean for name, mean in result.metrics.items() if "dropped" in name]
    assert all(mean > 0 for mean in dropped) and bool(dropped) == bool(limit)
    for layout in ("tp=2,sp=1,dp=2,ep=2,mbs=2", "dp=4,ep=4,zero=3"):
        other, is_same = evaluated(job, layout)
        assert is_same and other.loss == pytest.approx(result.loss, rel=1e-6)
        for name in result.metrics:
            if "dropped" in name:
                assert other.metrics[name] == pytest.approx(
                    result.metrics[name], rel=1e-9
                )


def test_evaluation_has_no_noise():
    quiet = [flag for flag in NOISE if flag not in ("--moe-router-noise", "gumbel")]
    noisy, plain = (
        evaluated(job_of(*flags), "mbs=1", steps=0)[0].loss for flags in (NOISE, quiet)
    )
    assert noisy == plain
    noisy, plain = (
        evaluated(job_of(*flags), "mbs=1", steps=1)[0].loss for flags in (NOISE, quiet)
    )
    assert noisy != plain, "training has noise"
