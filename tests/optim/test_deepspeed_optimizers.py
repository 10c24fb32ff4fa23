"""DeepSpeed's own CPU optimizers and ours take the same steps, for random hyper-parameters and gradients."""

import dataclasses
from importlib.util import find_spec

import pytest
import torch

from megatron_ds.config import OptimizerConfig
from megatron_ds.optim.optimizers import OPTIMIZERS

pytestmark = [
    pytest.mark.plan,
    pytest.mark.all,  # compiles DeepSpeed's C++
    pytest.mark.skipif(
        find_spec("deepspeed") is None or find_spec("ninja") is None,
        reason="DeepSpeed is not installed: pip install deepspeed ninja",
    ),
]
CASES, STEPS = 100, 4


def adam(numbers):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    theirs = lambda p: DeepSpeedCPUAdam(
        [p],
        lr=numbers["lr"],
        betas=numbers["betas"],
        eps=numbers["eps"],
        weight_decay=numbers["decay"],
        adamw_mode=numbers["decoupled"],
        bias_correction=numbers["corrected"],
    )
    return theirs, dict(
        adam_beta1=numbers["betas"][0],
        adam_beta2=numbers["betas"][1],
        adam_eps=numbers["eps"],
        decoupled_weight_decay=numbers["decoupled"],
        adam_bias_correction=numbers["corrected"],
    )


def lion(numbers):
    from deepspeed.ops.lion import DeepSpeedCPULion

    theirs = lambda p: DeepSpeedCPULion(
        [p], lr=numbers["lr"], betas=numbers["betas"], weight_decay=numbers["decay"]
    )
    return theirs, dict(lion_beta1=numbers["betas"][0], lion_beta2=numbers["betas"][1])


def adagrad(numbers):
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

    theirs = lambda p: DeepSpeedCPUAdagrad(
        [p], lr=numbers["lr"], eps=numbers["eps"], weight_decay=numbers["decay"]
    )
    return theirs, dict(adagrad_eps=numbers["eps"])


def drawn(seed):
    """(weight, gradients, hyper-parameters) of a case."""
    draw = torch.Generator().manual_seed(seed)
    unit = lambda: float(torch.rand((), generator=draw))
    size = int(torch.randint(1, 3000, (), generator=draw))
    numbers = {
        "lr": 10 ** (-4 * unit()),
        "betas": (0.5 + 0.49 * unit(), 0.5 + 0.499 * unit()),
        "eps": 10 ** (-10 + 8 * unit()),
        "decay": (0.0, 0.1, 0.01)[seed % 3],
        "decoupled": seed % 2 == 0,
        "corrected": seed % 5 > 0,
    }
    scale = 10 ** (2 - 4 * unit())
    return (
        torch.randn(size, generator=draw),
        scale * torch.randn(STEPS, size, generator=draw),
        numbers,
    )


def steps(optimizer, p, grads):
    """(weight after the steps, its state)"""
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    return p.detach(), optimizer.state[p]


def our_steps(name, weight, grads, numbers, fields):
    p = torch.nn.Parameter(weight.clone())
    settings = dataclasses.replace(OptimizerConfig(lr=numbers["lr"]), **fields)
    optimizer = OPTIMIZERS[name](
        [{"params": [p], "decay": True, "lr_factor": 1.0}], settings
    )
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = numbers["lr"], numbers["decay"]
    return steps(optimizer, p, grads)


@pytest.mark.parametrize(
    "name, make, state",
    [
        ("adam", adam, ("exp_avg", "exp_avg_sq")),
        ("lion", lion, ("exp_avg",)),
        ("adagrad", adagrad, ()),
    ],
)
@pytest.mark.parametrize("seed", range(CASES))
def test_equal_to_deepspeeds_class(name, make, state, seed):
    weight, grads, numbers = drawn(seed)
    theirs, fields = make(numbers)
    ours, our_state = our_steps(name, weight, grads, numbers, fields)
    p = torch.nn.Parameter(weight.clone())
    expected, their_state = steps(theirs(p), p, grads)
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=2e-6)
    for kind in state:
        torch.testing.assert_close(
            our_state[kind],
            their_state[kind],
            rtol=2e-6,
            atol=1e-6 * float(grads.abs().max()),
        )
    assert not torch.equal(ours, weight)


def test_lion_leaves_a_weight_alone_that_never_had_a_gradient():
    """DeepSpeed's kernel takes the sign of +0 for 1: its weight moves by the learning rate every step."""
    numbers, grads = {"lr": 0.1, "betas": (0.9, 0.99), "decay": 0.0}, torch.zeros(2, 3)
    theirs, fields = lion(numbers)
    p = torch.nn.Parameter(torch.ones(3))
    assert not torch.equal(steps(theirs(p), p, grads)[0], torch.ones(3))
    assert torch.equal(
        our_steps("lion", torch.ones(3), grads, numbers, fields)[0], torch.ones(3)
    )
