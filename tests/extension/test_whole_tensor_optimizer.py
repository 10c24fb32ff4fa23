"""An optimizer that needs whole matrices, beside another one for the rest, is one new file: this one.

`Orthogonal` orthogonalises the momentum of a matrix by Newton-Schulz iterations (Jordan et al. 2024, Muon).
On a part of a matrix that would be another update, so each matrix is owned whole by one data-parallel rank.
"""

import pytest
import torch

from megatron_ds.errors import ConfigError
from megatron_ds.optim import (
    OPTIMIZERS,
    Declared,
    OptimizerTraits,
    ParamGroup,
    RegisteredOptimizer,
    default_groups,
)
from megatron_ds.planning.run_plan import optimizer_problems
from tests.harness.engines import BATCH, load_state, outcomes, save_state
from tests.harness.engines import config_of as config_of_job
from tests.harness.engines import on_engines as run
from tests.harness.tiny_jobs import tiny_job

pytestmark = pytest.mark.one_in(2)


# ------------------------------------------------------------------------------------ the optimizer
class Orthogonal(torch.optim.Optimizer):
    """Momentum, made orthogonal; decoupled weight decay."""

    def __init__(self, groups, momentum=0.9):
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                assert p.dim() == 2, "a whole matrix in its own shape"
                moment = self.state[p].setdefault("momentum", torch.zeros_like(p))
                moment.mul_(group["momentum"]).add_(p.grad)
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(
                    newton_schulz(moment), alpha=group["lr"]
                )


def newton_schulz(matrix, steps=5):
    """Towards the nearest orthogonal matrix: x ← 1.5 x - 0.5 x xᵀ x, from singular values below 1."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(steps):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


def orthogonal(groups, settings):
    return Orthogonal(groups)


def groups_of(settings):
    is_matrix = lambda spec: len(spec.shape) == 2 and "layers" in spec.name
    return (
        ParamGroup(
            "matrices",
            is_matrix,
            RegisteredOptimizer("orthogonal", settings),
            lr_factor=0.5,
        ),
        *default_groups(RegisteredOptimizer("adam", settings)),
    )


DECLARED = Declared(OptimizerTraits(needs_whole_tensors=True), groups_of=groups_of)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS._things, "orthogonal", orthogonal)
    monkeypatch.setitem(OPTIMIZERS._declared, "orthogonal", DECLARED)


# ------------------------------------------------------------------------------------ its runs
def config_of(layout, dtype="fp32", rules=()):
    job = tiny_job("llama", dtype, False, 0.0, 3, BATCH, 8)
    return config_of_job([*job, "--optimizer", "orthogonal"], layout, rules)


def train(engine, steps):
    """(losses, norms of gradients) of steps number `steps`."""
    found = outcomes(engine, steps, learning_rate=1e-2)
    return [outcome.loss for outcome in found], [outcome.grad_norm for outcome in found]


def state_of(engine):
    return {(piece.kind, piece.spec.name): piece for piece in engine.optimizer.pieces()}


def trained(layout, dtype="fp32", steps=4):
    return run(
        config_of(layout, dtype),
        lambda engine: (*train(engine, range(steps)), state_of(engine)),
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,zero=0",
        "dp=2,zero=1",
        "dp=2,zero=2",
        "dp=4,zero=1,bucket=3000",
        "dp=4,zero=2",
        "dp=2,pp=2,zero=1",
        "dp=2,pp=2,zero=2,schedule=zb-h1",
    ],
)
def test_every_layout_trains_as_one_process(layout, dtype):
    [(losses, norms, state)] = trained("dp=1,zero=0", dtype)
    assert len({losses[0], losses[1], losses[-1]}) == 3
    ranks = trained(layout, dtype)
    # Sums over ranks round in another order; in bf16 a rounding of the 16-bit weights follows.
    close = (
        dict(rtol=1e-4, atol=2e-6) if dtype == "fp32" else dict(rtol=2e-2, atol=5e-3)
    )
    for got, got_norms, _ in ranks:
        assert got == pytest.approx(losses, rel=2e-6 if dtype == "fp32" else 1e-3)
        assert got_norms == pytest.approx(norms, rel=1e-5 if dtype == "fp32" else 2e-2)
    for _, _, pieces in ranks:
        for (kind, name), piece in pieces.items():
            if (
                kind in ("weight", "momentum")
                and "layers" in name
                and len(piece.spec.shape) == 2
            ):
                torch.testing.assert_close(
                    piece.tensor,
                    state[kind, name].tensor[piece.start : piece.stop],
                    **close,
                )


@pytest.mark.parametrize("stage", [1, 2])
def test_each_matrix_is_on_one_rank_and_they_are_shared_out_evenly(stage):
    ranks = trained(f"dp=2,zero={stage}", steps=1)
    held = [
        {name: piece for (kind, name), piece in pieces.items() if kind == "momentum"}
        for _, _, pieces in ranks
    ]
    assert not held[0].keys() & held[1].keys() and len(held[0] | held[1]) > 10
    assert all(
        (piece.start, piece.stop) == (0, piece.spec.numel)
        for pieces in held
        for piece in pieces.values()
    )
    numels = [sum(piece.spec.numel for piece in pieces.values()) for pieces in held]
    largest = max(piece.spec.numel for pieces in held for piece in pieces.values())
    assert abs(numels[0] - numels[1]) <= largest
    kinds = {
        name: {kind for kind, of in pieces if of == name}
        for _, _, pieces in ranks
        for _, name in pieces
    }
    assert kinds["decoder.layers.1.self_attention.linear_proj.weight"] == {
        "weight",
        "momentum",
    }
    assert kinds["decoder.final_layernorm.weight"] == {
        "weight",
        "exp_avg",
        "exp_avg_sq",
    }


@pytest.mark.parametrize(
    "before, after",
    [
        ("dp=2,zero=1", "dp=1,zero=0"),
        ("dp=1,zero=0", "dp=4,zero=2"),
        ("dp=2,zero=2", "dp=2,pp=2,zero=1"),
    ],
)
def test_a_run_continues_in_another_layout(before, after, tmp_path):
    [(expected, _, _)] = trained("dp=1,zero=0", steps=6)

    def first(engine):
        train(engine, range(3))
        return save_state(engine, tmp_path, 3)

    def second(engine):
        load_state(engine, tmp_path, 3, numbers)
        return train(engine, range(3, 6))[0]

    numbers = run(config_of(before), first)[0]
    for losses in run(config_of(after), second):
        assert losses == pytest.approx(expected[3:], rel=2e-6)


def test_stage_3_and_offloading_are_refused_before_the_run():
    with pytest.raises(
        ConfigError, match="'matrices' needs whole tensors, but ZeRO stage 3"
    ):
        config_of("dp=2,zero=3", rules=(optimizer_problems,))
    with pytest.raises(
        ConfigError, match="'matrices' needs whole tensors .* offloaded"
    ):
        config_of("dp=2,zero=1,offload=cpu", rules=(optimizer_problems,))


def test_a_matrix_that_tensor_parallelism_splits_is_refused():
    with pytest.raises(ConfigError, match="is split over 2 tensor-parallel ranks"):
        run(config_of("tp=2,zero=1"), lambda engine: None)
