"""AdEMAMix and its warm-ups are the formulas of the paper, in double precision."""

import pytest
import torch

from megatron_ds.config.parse import parse
from megatron_ds.extensions.optimizers.ademamix import AdEMAMix, SlowMomentum
from tests.harness.plain_optimizers import PlainAdEMAMix

pytestmark = pytest.mark.plan

NUMBERS = dict(lr=0.01, weight_decay=0.1)


def noise(seed):
    return torch.randn(300, generator=torch.Generator().manual_seed(seed))


def steps(optimizer, p, count):
    for step in range(1, count + 1):
        p.grad = noise(step)
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("warmup", [None, 4])
@pytest.mark.parametrize("beta1", [0.9, 0.5])
def test_steps_and_warm_ups_are_those_of_the_formula(warmup, beta1):
    mine, plain = (torch.nn.Parameter(noise(0)) for _ in range(2))
    slow = SlowMomentum(8.0, 0.999, warmup or -1, warmup or -1)
    expected = PlainAdEMAMix(
        [plain], betas=(beta1, 0.95, 0.999), alpha=8.0, warmup=warmup, **NUMBERS
    )
    found = steps(AdEMAMix([mine], slow, betas=(beta1, 0.95), **NUMBERS), mine, 6)
    torch.testing.assert_close(found, steps(expected, plain, 6), rtol=1e-5, atol=1e-6)
    # Without the slow momentum it is AdamW.
    adam = torch.nn.Parameter(noise(0))
    other = steps(torch.optim.AdamW([adam], betas=(beta1, 0.95), **NUMBERS), adam, 6)
    assert (found - other).abs().max() > 1e-3


def test_without_the_slow_momentum_it_is_adam_with_decoupled_decay():
    mine, adam = (torch.nn.Parameter(noise(0)) for _ in range(2))
    found = steps(
        AdEMAMix([mine], SlowMomentum(alpha=0.0), betas=(0.9, 0.95), **NUMBERS), mine, 6
    )
    other = steps(torch.optim.AdamW([adam], betas=(0.9, 0.95), **NUMBERS), adam, 6)
    torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-6)


def test_a_warm_up_ends_with_the_numbers_of_the_flags():
    slow = SlowMomentum(8.0, 0.999, 10, 10)
    assert slow.alpha_at(5) == 4.0
    assert slow.alpha_at(10) == 8.0
    assert slow.beta_at(10, 0.9) == 0.999
    assert 0.9 < slow.beta_at(1, 0.9) < slow.beta_at(9, 0.9) < 0.999


def test_flags_of_the_fork_reach_the_optimizer():
    words = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 9 "
        "--lr 1e-3 --mock-data --vocab-size 61 --optimizer ademamix --ademamix-alpha 8 --ademamix-beta3 0.9999 "
        "--ademamix-alpha-warmup 5 --ademamix-beta3-warmup 6"
    )
    settings = parse(words.split(), env={}).optimizer
    assert (settings.ademamix_alpha, settings.ademamix_beta3) == (8.0, 0.9999)
    assert (settings.ademamix_alpha_warmup, settings.ademamix_beta3_warmup) == (5, 6)
