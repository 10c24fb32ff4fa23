"""Adam without bias correction and with L2 weight decay, compared with torch's and with the formula."""

import dataclasses

import pytest
import torch

from megatron_ds.config import OptimizerConfig
from megatron_ds.optim.optimizers import OPTIMIZERS

pytestmark = pytest.mark.plan

SETTINGS = OptimizerConfig(lr=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6)


def updated(gradients, lr, decay, **choices):
    """(weights after the updates by the registered optimizer, its state)"""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 7))
    optimizer = OPTIMIZERS["adam"](
        [{"params": [p], "decay": True, "lr_factor": 1.0}],
        dataclasses.replace(SETTINGS, **choices),
    )
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = lr, decay
    for grad in gradients:
        p.grad = grad.clone()
        optimizer.step()
    return p.detach(), optimizer.state[p]


@pytest.fixture
def gradients():
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(1))


def test_weight_decay_in_the_gradient_is_torchs_adam(gradients):
    ours, state = updated(gradients, 0.1, 0.3, decoupled_weight_decay=False)
    p = torch.nn.Parameter(torch.linspace(-1, 1, 7))
    theirs = torch.optim.Adam([p], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    for grad in gradients:
        p.grad = grad.clone()
        theirs.step()
    torch.testing.assert_close(ours, p.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        state["exp_avg_sq"], theirs.state[p]["exp_avg_sq"], rtol=1e-6, atol=1e-7
    )
    other, _ = updated(gradients, 0.1, 0.3)
    assert not torch.allclose(ours, other, atol=1e-3)


@pytest.mark.parametrize("decoupled", [True, False])
def test_without_bias_correction_the_moments_are_used_as_they_are(gradients, decoupled):
    ours, state = updated(
        gradients,
        0.1,
        0.3,
        adam_bias_correction=False,
        decoupled_weight_decay=decoupled,
    )
    assert state["step"] == 5
    p, m, v = (
        torch.linspace(-1, 1, 7).double(),
        torch.zeros(7).double(),
        torch.zeros(7).double(),
    )
    for g in gradients.double():
        g = g if decoupled else g + 0.3 * p
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        p = p * (1 - 0.1 * 0.3 * decoupled) - 0.1 * m / (v.sqrt() + 1e-6)
    torch.testing.assert_close(ours.double(), p, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(ours, updated(gradients, 0.1, 0.3)[0], atol=1e-3)
