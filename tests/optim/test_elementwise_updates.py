"""Lion's and Adagrad's operations: golden vectors, torch's own, and the bits of every implementation."""

import pytest
import torch

from megatron_ds.extensions.kernels.cpu import compiled_adam
from megatron_ds.extensions.optimizers.elementwise_updates import (
    AdagradStep,
    LionStep,
    adagrad,
    lion,
)
from megatron_ds.ops.update_rows import UpdateRow

pytestmark = pytest.mark.plan

compiled = pytest.mark.skipif(
    compiled_adam.extension() is None, reason="the extension was not compiled"
)
SIZES = (
    1,
    7,
    31,
    32,
    33,
    100,
    70_001,
)  # below, at and beyond one round of vectors; more than one chunk
RULES = {
    "lion": (
        lion,
        LionStep(3e-3, (0.9, 0.98), 0.1, 3.0),
        dict(lr=3e-3, beta1=0.9, beta2=0.98),
    ),
    "adagrad": (adagrad, AdagradStep(3e-3, 1e-8, 0.1, 3.0), dict(lr=3e-3, eps=1e-8)),
}
by_torch = lambda operation: operation.in_torch


def row(*values, low=None):
    p, grad, state = (torch.tensor(v) for v in values)
    return UpdateRow(p, grad, state, low)


def rows(dtype=None, sizes=SIZES):
    draw, made = torch.Generator().manual_seed(0), []
    for n in sizes:
        p, grad, state = (torch.randn(n, generator=draw) for _ in range(3))
        grad[::5], state[::5] = 0.0, 0.0  # where Lion's direction is zero
        made.append(
            UpdateRow(
                p,
                grad,
                state.abs(),
                None if dtype is None else torch.zeros(n, dtype=dtype),
            )
        )
    return made


@pytest.mark.parametrize(
    "implementation", [by_torch, lambda operation: operation], ids=["torch", "first"]
)
def test_golden_vectors(implementation):
    r = row([1.0, -1.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 0.0])
    how = LionStep(0.1, (0.9, 0.99), 0.1)
    implementation(lion)(r.grad, [r], how)
    torch.testing.assert_close(r.p, torch.tensor([0.89, -1.09, 0.0]))
    torch.testing.assert_close(r.state, torch.tensor([0.005, 0.005, 0.0]))
    r.grad.copy_(torch.tensor([-2.0, 0.1, 0.0]))
    implementation(lion)(r.grad, [r], how)
    torch.testing.assert_close(r.p, torch.tensor([0.9811, -1.1791, 0.0]))
    torch.testing.assert_close(r.state, torch.tensor([-0.01505, 0.00595, 0.0]))

    r, how = row([1.0, -1.0], [0.5, -0.25], [0.0, 0.0]), AdagradStep(0.1, 1e-10, 0.01)
    for p, sums in (
        ([0.9, -0.9], [0.2601, 0.0676]),
        ([0.82935875, -0.8294257], [0.519181, 0.134681]),
    ):
        implementation(adagrad)(r.grad, [r], how)
        torch.testing.assert_close(r.p, torch.tensor(p))
        torch.testing.assert_close(r.state, torch.tensor(sums))


@pytest.mark.parametrize("case", range(20))
def test_adagrad_is_torchs(case):
    draw = torch.Generator().manual_seed(case)
    lr, decay = torch.rand(2, generator=draw).tolist()
    p, *grads = torch.randn(6, 50 + case, generator=draw)
    plain = torch.nn.Parameter(p.clone())
    torchs = torch.optim.Adagrad(
        [plain], lr=lr, eps=1e-6, weight_decay=decay, foreach=False
    )
    r = UpdateRow(p.clone(), torch.zeros_like(p), torch.zeros_like(p))
    for grad in grads:
        plain.grad = grad.clone()
        torchs.step()
        r.grad.copy_(grad)
        adagrad(r.grad, [r], AdagradStep(lr, 1e-6, decay))
    # Two roundings a step, of weights of about 1.
    torch.testing.assert_close(r.p, plain.detach(), rtol=1e-5, atol=3e-6)


@compiled
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_every_instruction_set_has_the_bits_of_torchs_operations(rule, dtype):
    operation, how, numbers = RULES[rule]
    plain = rows(dtype)
    operation.in_torch(plain[0].grad, plain, how)
    for variant in compiled_adam.variants():
        fast = rows(dtype)
        compiled_adam.with_one_state_(
            rule,
            fast,
            weight_decay=0.1,
            threads=2,
            variant=variant,
            **numbers,
            grad_scale=float(torch.tensor(1 / 3)),
        )
        for a, b in zip(fast, plain):
            assert all(x is None or torch.equal(x, y) for x, y in zip(a, b)), (
                variant,
                len(a.p),
            )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_gradients_and_rows_whose_temporaries_do_not_fit_at_once(
    rule, dtype, monkeypatch
):
    operation, how, _ = RULES[rule]
    whole, low = rows(dtype), rows(dtype)
    whole = [r._replace(grad=r.grad.to(dtype).float()) for r in whole]
    low = [r._replace(grad=r.grad.to(dtype)) for r in low]
    operation.in_torch(whole[0].grad, whole, how)
    monkeypatch.setattr(
        "megatron_ds.extensions.optimizers.elementwise_updates.AT_A_TIME", 64
    )
    operation.in_torch(low[0].grad, low, how)
    assert all(
        torch.equal(a.p, b.p) and torch.equal(a.low, b.low) for a, b in zip(whole, low)
    )
    operation(low[0].grad, low, how)  # by the first implementation, once more
    operation.in_torch(whole[0].grad, whole, how)
    assert all(
        torch.equal(a.p, b.p) and torch.equal(a.state, b.state)
        for a, b in zip(whole, low)
    )
