"""Muon: its iterations against golden values and singular values, its step against torch's and DeepSpeed's,
and the matrices of which parameters consist."""

import pytest
import torch
from torch import nn

from megatron_ds.config import OptimizerConfig
from megatron_ds.errors import LayoutError
from megatron_ds.extensions.optimizers.muon import SCALES, Muon, MuonRule
from megatron_ds.extensions.optimizers.muon_options import COEFFICIENT_SETS, SCALE_MODES
from megatron_ds.extensions.optimizers.newton_schulz import SETS, newton_schulz
from megatron_ds.mpu.group import Group, solo
from megatron_ds.mpu.param_spec import (
    DATA_AXES,
    EXPERT_DATA_AXES,
    Init,
    Matrices,
    ParamSpec,
    Split,
)
from megatron_ds.optim import param_groups_of
from megatron_ds.optim.matrix_batches import HEADS, PARTS, WHOLE, change_matrices
from megatron_ds.zero.data_groups import DataGroups
from megatron_ds.zero.matrix_owners import MatrixEntry, plan_rounds

pytestmark = pytest.mark.plan

G = torch.tensor([[1.0, 2], [3, 4], [5, 6]], dtype=torch.float64)
# Five iterations from G in double precision.
GOLDEN = {
    "simple": [[-0.467519, 0.573473], [0.072432, 0.409453], [0.612383, 0.245432]],
    "quintic": [[-0.539595, 0.71341], [0.133979, 0.550437], [0.807553, 0.387464]],
    "polar_express": [
        [-0.650157, 0.775043],
        [0.078768, 0.535468],
        [0.807692, 0.295892],
    ],
}

# Gradients, and the weights after each: DeepSpeed 0.19.8's SingleDeviceMuon(lr=0.1, weight_decay=0.1).
DEEPSPEED = [
    (
        [[1.0, 2], [3, 4], [5, 6]],
        [[1.047259, 3.889764], [1.971129, 4.899852], [2.894999, 5.909941]],
    ),
    (
        [[-1.0, 0], [2, 0.5], [0, 3]],
        [[1.076769, 3.819368], [1.847667, 4.856997], [2.870801, 5.756975]],
    ),
    (
        [[0.1, 0.2], [0.3, -0.4], [0.5, 0.6]],
        [[1.087147, 3.749376], [1.746721, 4.817306], [2.82203, 5.617398]],
    ),
]


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --------------------------------------------------------------------------------------------- iterations
@pytest.mark.parametrize("name", GOLDEN)
def test_five_iterations_give_the_golden_values(name):
    found = newton_schulz(G[None], SETS[name].first(5))[0]
    torch.testing.assert_close(
        found, torch.tensor(GOLDEN[name], dtype=torch.float64), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("name", SETS)
def test_singular_values_go_where_the_polynomials_send_them(name):
    """Each matrix of a batch, wide or tall, has the singular values of the closed form."""
    steps = 10 if name == "deepseekv4" else 5
    for shape in ((3, 4, 7), (2, 6, 5)):
        batch = noise(*shape, dtype=torch.float64)
        u, s, vh = torch.linalg.svd(batch, full_matrices=False)
        s = s / s.norm(dim=-1, keepdim=True)
        for a, b, c in SETS[name].first(steps):
            s = a * s + b * s**3 + c * s**5
        torch.testing.assert_close(
            newton_schulz(batch, SETS[name].first(steps)), u * s[..., None, :] @ vh
        )
        assert name != "deepseekv4" or (s - 1).abs().max() < 0.02
    assert set(SETS) == set(COEFFICIENT_SETS) and set(SCALES) == set(SCALE_MODES)


def test_coefficients_begin_again_or_stay_at_the_last():
    assert SETS["quintic"].first(7)[5:] == list(SETS["quintic"].steps[:2])
    assert SETS["cans"].first(7)[5:] == [SETS["cans"].steps[-1]] * 2
    with pytest.raises(ValueError, match="of 5 iterations, not of 6"):
        SETS["cubic5"].first(6)


def test_iterations_on_the_gram_matrix_have_the_same_result():
    """What DeepSpeed calls gram: Q with X_final = Q X from R = X Xᵀ alone."""
    x = noise(4, 9, dtype=torch.float64)
    x = x / x.norm()
    r, q = x @ x.T, torch.eye(4, dtype=torch.float64)
    for a, b, c in SETS["simple"].first(5):
        z = b * r + c * r @ r
        q, half = a * q + z @ q, a * r + z @ r
        r = a * half + z @ half
    torch.testing.assert_close(
        newton_schulz(x[None], SETS["simple"].first(5))[0], q @ x
    )


def test_zeros_stay_zeros_and_bf16_is_near():
    batch = noise(2, 5, 8)
    batch[0, 3], batch[1] = 0, 0
    found = newton_schulz(batch, SETS["quintic"].first(5))
    assert not found[0, 3].any() and not found[1].any() and found[0, :3].all()
    low = newton_schulz(batch, SETS["quintic"].first(5), torch.bfloat16)
    assert low.dtype == torch.float32 and 0 < (low - found).abs().max() < 0.05


@pytest.mark.parametrize(
    "shape, scales",
    [
        ((1024, 4096), (64, 0.5, 1, 12.8)),
        ((4096, 1024), (64, 2, 2, 12.8)),
        ((3072, 1024), (55.42563, 1.73205, 1.73205, 11.08513)),
    ],
)
def test_scales_by_name(shape, scales):
    assert [SCALES[name](*shape) for name in SCALE_MODES] == pytest.approx(
        scales, rel=1e-6
    )


# --------------------------------------------------------------------------------------------- steps
def stepped(make, shape, steps=3):
    p = nn.Parameter(noise(*shape))
    optimizer = make([p])
    for step in range(steps):
        p.grad = noise(*shape, seed=step + 1)
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("shape", [(6, 9), (9, 4), (5, 5), (1, 7)])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    "scale, theirs",
    [("shape_scaling", "original"), ("match_rms_adamw", "match_rms_adamw")],
)
def test_steps_are_those_of_torch(shape, nesterov, scale, theirs, monkeypatch):
    """Whose iterations are in bf16, but for this test."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    numbers = dict(lr=0.1, momentum=0.9, weight_decay=0.1)
    ours = stepped(
        lambda ps: Muon(ps, MuonRule(nesterov, "simple", scale=scale), **numbers), shape
    )
    torchs = stepped(
        lambda ps: torch.optim.Muon(
            ps, nesterov=nesterov, adjust_lr_fn=theirs, **numbers
        ),
        shape,
    )
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=2e-6)
    assert (ours - noise(*shape)).abs().max() > 0.05


def test_steps_are_those_of_deepspeed():
    """DeepSpeed 0.19.8's class with its defaults, whose iterations are in fp32 on a CPU."""
    p = nn.Parameter(torch.tensor([[1.0, 4], [2, 5], [3, 6]]))
    muon = Muon(
        [p],
        MuonRule(True, "simple", scale="shape_scaling"),
        lr=0.1,
        momentum=0.95,
        weight_decay=0.1,
    )
    for grad, expected in DEEPSPEED:
        p.grad = torch.tensor(grad)
        muon.step()
        torch.testing.assert_close(
            p.detach(), torch.tensor(expected), rtol=0, atol=2e-6
        )


def test_a_rate_of_zero_moves_the_momentum_only():
    muon = Muon([p := nn.Parameter(noise(3, 4))], lr=0.0, momentum=0.5)
    p.grad = torch.ones(3, 4)
    muon.step()
    assert (
        torch.equal(p.detach(), noise(3, 4))
        and (muon.state[p]["momentum_buffer"] == 0.5).all()
    )


# --------------------------------------------------------------------------------------------- matrices
GROUPS, QUERIES, D, H = (
    2,
    3,
    4,
    10,
)  # heads of queries in a group, rows of a head, columns


def packed_rows(part):
    """The rows of Q, K or V in the packed weight, in a loop over the groups."""
    sizes = {"q": QUERIES * D, "k": D, "v": D}
    before, run = (
        {"q": 0, "k": QUERIES * D, "v": QUERIES * D + D}[part],
        (QUERIES + 2) * D,
    )
    return [
        group * run + before + row
        for group in range(GROUPS)
        for row in range(sizes[part])
    ]


def changed(unit, tensor, matrices):
    """Each matrix with the sum of its elements, and the number of launches."""
    sizes, whole = [], tensor.clone()
    add = lambda batch: (
        sizes.append(tuple(batch.shape)) or batch + batch.sum((1, 2), keepdim=True)
    )
    change_matrices(add, unit, [(whole, matrices)])
    return whole, sizes


def test_queries_keys_and_values_are_three_matrices_over_all_groups():
    weight = noise((QUERIES + 2) * GROUPS * D, H)
    matrices = Matrices(GROUPS, (QUERIES * D, D, D), head=D)
    found, sizes = changed(PARTS, weight, matrices)
    for part in "qkv":
        rows = packed_rows(part)
        torch.testing.assert_close(found[rows], weight[rows] + weight[rows].sum())
    assert sizes == [
        (1, QUERIES * GROUPS * D, H),
        (2, GROUPS * D, H),
    ]  # keys and values in one batch
    assert matrices.sizes(weight.shape) == ((24, 10), (8, 10), (8, 10))
    assert matrices.cost(weight.shape) == 24 * 10 * 10 + 2 * 8 * 10 * 8
    heads, sizes = changed(HEADS, weight, matrices)
    expected = weight.view(-1, D, H) + weight.view(-1, D, H).sum((1, 2), keepdim=True)
    assert torch.equal(heads, expected.view_as(weight)) and sizes == [(10, D, H)]
    whole, sizes = changed(WHOLE, weight, matrices)
    assert torch.equal(whole, weight + weight.sum()) and sizes == [(1, 40, H)]


@pytest.mark.parametrize("unit", [PARTS, HEADS, WHOLE])
def test_each_expert_is_a_matrix(unit):
    weight = noise(3, 4, 5)
    found, sizes = changed(unit, weight, Matrices())
    assert torch.equal(found, weight + weight.sum((1, 2), keepdim=True)) and sizes == [
        (3, 4, 5)
    ]


def test_matrices_that_do_not_fit_the_shape_are_an_error():
    for shape, matrices in (((8,), Matrices()), ((8, 3), Matrices(2, (3, 3)))):
        with pytest.raises(
            LayoutError,
            match="Use parts whose rows, times groups, are those of the tensor",
        ):
            ParamSpec("w", shape, Init("zeros"), matrices=matrices)


def test_the_other_optimizer_has_everything_that_is_not_a_hidden_matrix():
    settings = OptimizerConfig(
        optimizer="muon", lr=0.1, muon_scalar_lr=0.02, muon_scalar_optimizer="lion"
    )
    matrices, decay, no_decay = param_groups_of(settings)
    assert [group.optimizer.name for group in (matrices, decay, no_decay)] == [
        "muon",
        "lion",
        "lion",
    ]
    assert (matrices.lr_factor, decay.lr_factor) == (
        1.0,
        pytest.approx(0.2),
    ) and not no_decay.decay
    spec = lambda **more: ParamSpec("w", (4, 4), Init("zeros"), **more)
    assert matrices.filter(spec(matrices=Matrices())) and not matrices.filter(spec())


# --------------------------------------------------------------------------------------------- owners
def entry(name, shape, spans=(), axes=DATA_AXES, split=True):
    spec = ParamSpec(
        name,
        shape,
        Init("zeros"),
        (Split("tp", 0),) if split else (),
        matrices=Matrices(),
    )
    return MatrixEntry(spec, axes, spans)


def test_owners_share_out_the_cost_evenly_over_both_axes():
    group = lambda axes, size: Group(axes, tuple(range(size)), 0, None)
    groups = DataGroups(
        {DATA_AXES: group("dp-cp", 3), EXPERT_DATA_AXES: solo()}, group("tp", 2)
    )
    spans = ((0, 1),) * 3
    entries = [entry(f"w{i}", (6 * (1 + i % 4), 8), spans) for i in range(36)] + [
        entry("replicated", (6, 8))
    ]
    [owned] = plan_rounds(entries, groups)
    loads = {}
    for e, d, t in owned:
        if d is not None:
            loads[d, t] = loads.get((d, t), 0) + e.cost
    assert (
        len(loads) == 6
        and max(loads.values()) - min(loads.values())
        <= max(e.cost for e in entries) / 2
    )
    assert [e.spec.name for e, _, _ in owned] == [e.spec.name for e in entries]
    assert owned[-1][1] is None and owned[-1][2] in (
        0,
        1,
    )  # each data-parallel rank, one of tp
    [few] = plan_rounds(entries[:3], groups)
    assert {d for _, d, _ in few} == {0, 1, 2} and {t for _, _, t in few} == {0, 1}
    rounds = list(plan_rounds(entries, groups, elements=40))
    assert len(rounds) > 5 and [e for part in rounds for e, _, _ in part] == entries
    assert all(sum(e.spec.numel for e, _, _ in part) <= 40 * 6 for part in rounds)
