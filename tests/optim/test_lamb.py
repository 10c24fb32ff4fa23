"""LAMB's two forms: golden vectors, the formula in double precision, bounds, and weights of zeros."""

import pytest
import torch

from megatron_ds.config import OptimizerConfig
from megatron_ds.extensions.optimizers.lamb import Lamb, LambRule
from megatron_ds.optim import OPTIMIZERS
from tests.harness.plain_optimizers import PlainLamb

pytestmark = pytest.mark.plan


def steps(optimizer, parameters, grads):
    for step in grads:
        for p, grad in zip(parameters, step):
            p.grad = grad.clone()
        optimizer.step()
        yield [p.detach().clone() for p in parameters]


@pytest.mark.parametrize(
    "form, expected",
    [
        ("deepspeed", [[2.88696423, 4.1105573], [2.8026971, 4.19344631]]),
        ("paper", [[2.63423628, 4.340906]]),
    ],
)
def test_golden_vectors(form, expected):
    p, grad = torch.nn.Parameter(torch.tensor([3.0, 4.0])), torch.tensor([0.1, -0.2])
    optimizer = Lamb([p], lr=0.1, weight_decay=0.01, rule=LambRule(form))
    for (got,), values in zip(steps(optimizer, [p], [[grad]] * 2), expected):
        torch.testing.assert_close(got, torch.tensor(values), rtol=1e-6, atol=0)


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize("case", range(20))
def test_random_cases_equal_the_formula_in_double_precision(case, paper):
    draw = torch.Generator().manual_seed(case)
    lr, decay, beta1, beta2 = torch.rand(4, generator=draw).mul(0.9).tolist()
    values = [torch.randn(shape, generator=draw) * 2 for shape in ((3, 5), (7,), (1,))]
    grads = [[torch.randn(v.shape, generator=draw) for v in values] for _ in range(4)]
    ours, plain = ([torch.nn.Parameter(v.clone()) for v in values] for _ in range(2))
    numbers = dict(lr=lr / 10, betas=(beta1, beta2), weight_decay=decay / 3, eps=1e-6)
    got = [
        *steps(
            Lamb(ours, **numbers, rule=LambRule("paper" if paper else "deepspeed")),
            ours,
            grads,
        )
    ][-1]
    oracle = PlainLamb(plain, **numbers, paper=paper)
    for a, b in zip(got, [*steps(oracle, plain, grads)][-1]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert len({round(oracle.state[p]["r"], 3) for p in plain}) > 1, (
        "each parameter has a ratio of its own"
    )


def test_the_bounds_hold_and_a_parameter_of_zeros_moves_by_its_plain_update():
    big, zero = (
        torch.nn.Parameter(torch.full((4,), 100.0)),
        torch.nn.Parameter(torch.zeros(4)),
    )
    grad = [torch.ones(4), torch.ones(4)]
    make = lambda bounds: Lamb(
        [big, zero], LambRule("paper"), lr=0.1, eps=1e-12, **bounds
    )
    both = lambda **bounds: [*steps(make(bounds), [big, zero], [grad])][-1]
    moved = both(max_coeff=2.0)
    torch.testing.assert_close(
        moved[0], torch.full((4,), 100 - 0.1 * 2)
    )  # u is 1, the norms' ratio 100
    torch.testing.assert_close(
        moved[1], torch.full((4,), -0.1)
    )  # a norm is 0: the ratio is 1
    zero.data.zero_()
    torch.testing.assert_close(
        both(max_coeff=1e3, min_coeff=200.0)[0], moved[0] - 0.1 * 200
    )


def test_options_choose_the_form_the_correction_and_where_eps_is_added():
    def moved(**choices):
        p = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        settings = OptimizerConfig(adam_eps=0.01, lamb_max_coeff=1e6, **choices)
        optimizer = OPTIMIZERS["lamb"]([{"params": [p], "lr": 0.1}], settings)
        return [*steps(optimizer, [p], [[torch.tensor([0.1, -0.2])]])][0][
            0
        ] - torch.tensor([3.0, 4.0])

    m, v = torch.tensor([0.01, -0.02]), torch.tensor([1e-5, 4e-5])
    along = lambda u: -0.1 * 5 * u / u.norm()
    torch.testing.assert_close(
        moved(adam_bias_correction=False), along(m / (v.sqrt() + 0.01))
    )
    torch.testing.assert_close(
        moved(adam_bias_correction=False, lamb_eps_inside_sqrt=True),
        along(m / (v + 0.01).sqrt()),
    )
    torch.testing.assert_close(
        moved(lamb_form="paper"), along(10 * m / ((1000 * v).sqrt() + 0.01))
    )
    torch.testing.assert_close(moved(), along(m / (v.sqrt() + 0.01)) * 0.001**0.5 / 0.1)
