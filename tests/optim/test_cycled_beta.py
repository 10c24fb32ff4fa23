"""OneCycle changes the learning rate and Adam's beta1 at each step, in scripts and in engines."""

import pytest
import torch

from tests.compat_engine.test_engine_optimizers import (
    ADAMW,
    assert_trained_as,
    on_ranks,
    plainly,
    train,
    without_optimizer,
)
from tests.harness.deepspeed_schedulers import rates_of
from tests.harness.engine_runs import STEPS
from tests.harness.layout_runs import GLOBAL_BATCH, NUM_LAYERS, reference_of
from tests.harness.tiny_jobs import tiny_job

pytestmark = pytest.mark.threads

FEW, ONE = 5, "tp=1,pp=1,dp=1"
CYCLE = (
    "--lr-warmup-iters 0 --lr-decay-style OneCycle --cycle-first-step-size 2 --cycle-second-step-size 1 "
    "--decay-step-size 2 --decay-lr-rate 0.5"
).split()


def job_of(*flags: str) -> list[str]:
    return [
        *tiny_job("gpt2", "fp32", False, 0.0, NUM_LAYERS, GLOBAL_BATCH, FEW),
        *CYCLE,
        *flags,
    ]


def test_beta1_of_the_cycle_is_that_of_the_optimizer():
    weights = lambda *flags: reference_of(job_of(*flags), ONE, FEW).merged[1]
    fixed, level = (
        weights("--no-cycle-momentum", "--adam-beta1", "0.7"),
        weights(
            "--cycle-min-mom", "0.7", "--cycle-max-mom", "0.7", "--adam-beta1", "0.99"
        ),
    )
    cycled = weights("--cycle-min-mom", "0.7", "--cycle-max-mom", "0.8")
    assert all(torch.equal(fixed[name], level[name]) for name in fixed)
    assert any(not torch.equal(fixed[name], cycled[name]) for name in fixed)


@pytest.mark.parametrize("stage, ranks", [(0, 1), (2, 2)])
def test_an_engine_trains_as_torch_with_deepspeeds_numbers(stage, ranks):
    params = dict(
        cycle_min_lr=1e-3,
        cycle_max_lr=2e-2,
        cycle_first_step_size=2,
        cycle_second_step_size=1,
        decay_step_size=2,
        decay_lr_rate=0.3,
        cycle_min_mom=0.4,
    )
    numbers = rates_of("OneCycle", 0.01, STEPS + 1, params)

    def change(step, optimizer):
        for group in optimizer.param_groups:
            group["lr"], group["betas"] = (
                numbers[step][0],
                (numbers[step][1], group["betas"][1]),
            )

    def main(rank, initialized):
        rates, found = train(rank, initialized)
        scheduler = initialized[3]
        scheduler.load_state_dict(scheduler.state_dict())
        assert (
            scheduler.get_last_lr()[0],
            initialized[1].param_groups[0]["betas"],
        ) == (
            pytest.approx(numbers[STEPS][0]),
            (pytest.approx(numbers[STEPS][1]), 0.999),
        )
        return rates, found

    expected, rates = plainly(ADAMW, accumulation=2, ranks=ranks, change=change)
    config = without_optimizer(stage, ranks, 2) | {
        "scheduler": {"type": "OneCycle", "params": params}
    }
    assert_trained_as(on_ranks(ranks, main, config, optimizer=ADAMW), expected, rates)
