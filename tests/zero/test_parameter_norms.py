"""Norms of logical parameters over shards, tensor-parallel parts and pipeline ties, and named parameter
groups."""

import pytest
import torch
from torch import nn

from megatron_ds.errors import ConfigError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.group import solo
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.mpu.param_spec import (
    DATA_AXES,
    EXPERT_DATA_AXES,
    Init,
    ParamSpec,
    Split,
)
from megatron_ds.optim import OptimizerTraits, ParamGroup, default_groups
from megatron_ds.zero.data_groups import DataGroups
from megatron_ds.zero.optimizer import ZeroOptimizer
from megatron_ds.zero.parameter_norms import NormEntry, ParameterNorms
from megatron_ds.zero.set_plan import ParameterUse
from megatron_ds.zero.settings import STAGES, ZeroSettings
from tests.harness.gradients import contribute, taken
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

LR = 0.1


class TrustRatio(torch.optim.Optimizer):
    """Each parameter moves by lr times its own norm, along its gradient: LAMB's trust ratio without Adam."""

    def __init__(self, groups, reduce_norms):
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.reduce_norms, self.seen = reduce_norms, {}

    @torch.no_grad()
    def step(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        weights, grads = self.reduce_norms(
            [parameters, [p.grad for p in parameters]], parameters
        )
        self.seen = {p.spec.name: (w, g) for p, w, g in zip(parameters, weights, grads)}
        lr = self.param_groups[0]["lr"]
        for p, w, g in zip(parameters, weights, grads):
            p.sub_(p.grad * (lr * w / (g + 1e-12)))


def trust_ratio(groups, reduce_norms):
    return TrustRatio(groups, reduce_norms)


trust_ratio.traits = OptimizerTraits(needs_norms=True)


def value(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameter(name, data, **spec):
    p = nn.Parameter(data.clone())
    p.spec = ParamSpec(
        name, spec.pop("shape", tuple(data.shape)), Init("zeros"), **spec
    )
    return p


WHOLE = {
    "split": value((10, 13), 1),
    "copy": value((65,), 2),
    "embedding": value((9, 7), 3),
    "own1": value((33,), 4),
}
GRADS = {name: value(w.shape, 50 + i) for i, (name, w) in enumerate(WHOLE.items())}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_norms_over_all_parts_equal_those_of_one_process(stage):
    # Ranks 0..7 = tp 2 x dp 2 x pp 2. Both pipeline stages hold the tied embedding.
    def main(rank, world):
        t, d, s = rank % 2, rank // 2 % 2, rank // 4
        at = lambda t, d, s: t + 2 * d + 4 * s
        groups = DataGroups(
            {DATA_AXES: world.group("dp-cp", (at(t, 0, s), at(t, 1, s)), rank)},
            world.group("tp", (at(0, d, s), at(1, d, s)), rank),
            world.group("tp-pp", [at(i, d, j) for j in (0, 1) for i in (0, 1)], rank),
            world.group("embd", (at(t, d, 0), at(t, d, 1)), rank),
        )
        half = lambda tensor: tensor.chunk(2)[t]
        split = parameter(
            "split", half(WHOLE["split"]), shape=(10, 13), splits=(Split("tp", 0),)
        )
        embedding = parameter(
            "embedding", WHOLE["embedding"], tied="embedding", tied_copy=s == 1
        )
        mine = (
            [split, parameter("copy", WHOLE["copy"]), embedding]
            if s == 0
            else [parameter("own1", WHOLE["own1"]), embedding]
        )
        settings = ZeroSettings(
            (ParamGroup("all", lambda spec: True, trust_ratio),),
            STAGES[stage],
            bucket_elements=100,
            persistence=0,
        )
        optimizer = ZeroOptimizer(
            mine, settings, groups, ParameterUse({s: [[p] for p in mine]})
        )
        optimizer.begin_step()
        optimizer.arm()
        for p in reversed(
            mine
        ):  # half of the gradient from each data-parallel rank and each holder
            grad = GRADS[p.spec.name]
            share = (half(grad) if p is split else grad) / (4 if p is embedding else 2)
            contribute(p, share)
        before = world.traffic[rank].calls["all_reduce", "tp", 2]
        optimizer.step(LR)
        calls = world.traffic[rank].calls["all_reduce", "tp", 2] - before
        seen = optimizer.resident._optimizers[0].seen
        with optimizer.gathered(s):
            return seen, {p.spec.name: p.detach().clone() for p in mine}, calls, t

    results = run_ranks(8, main)
    for seen, weights, calls, t in results:
        assert calls == 1  # for all parameters and both norms
        for name, (weight, grad) in seen.items():
            # Squares are added in float64; the norms are rounded to fp32 once, the gradient's parts before
            # that.
            assert weight.item() == pytest.approx(
                WHOLE[name].double().norm().item(), rel=1e-6
            )
            assert grad.item() == pytest.approx(
                GRADS[name].double().norm().item(), rel=1e-6
            )
        for name, got in weights.items():
            w, g = WHOLE[name], GRADS[name]
            expected = w - g * (LR * w.norm() / g.norm())
            torch.testing.assert_close(
                got, expected.chunk(2)[t] if name == "split" else expected
            )
    assert {name for seen, *_ in results for name in seen} == set(WHOLE)
    copies = [weights["embedding"] for _, weights, _, _ in results]
    assert all(torch.equal(copy, copies[0]) for copy in copies)


@pytest.mark.parametrize("is_split", [False, True])
def test_experts_count_once_however_many_ranks_hold_them(is_split):
    """Ranks 0 and 2 hold the first half of the experts, or a quarter each, 1 and 3 the others."""
    experts, dense = value((4, 6), 7), value((5,), 8)

    def main(rank, world):
        groups = DataGroups(
            {
                DATA_AXES: world.group("dp-cp", range(4), rank),
                EXPERT_DATA_AXES: world.group("edp", (rank % 2, rank % 2 + 2), rank),
            },
            solo("tp"),
            solo("tp-pp"),
            solo("embd"),
        )
        mine = experts.chunk(2)[rank % 2]
        parts = [
            parameter("experts", mine.chunk(2)[rank // 2] if is_split else mine),
            parameter("w", dense),
        ]
        norms = ParameterNorms(
            [
                NormEntry(parts[0].spec, EXPERT_DATA_AXES, is_split, False),
                NormEntry(parts[1].spec, DATA_AXES, False, False),
            ],
            groups,
            dense.device,
        )
        return norms([parts, [3 * p for p in parts]], parts)

    expected = torch.stack([experts.norm(), dense.norm()])
    for got in run_ranks(4, main):
        torch.testing.assert_close(got, torch.stack([expected, 3 * expected]))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("ep", [1, 2])
def test_experts_whose_copies_lie_along_tensor_parallel_ranks_count_once(ep, zero):
    """Two tensor-parallel and two data-parallel ranks: whole experts, of which each rank has all or half, in shards
    or not, with a bias that no rank divides; a dense matrix in halves."""
    grid = Grid(tp=2, dp=2, ep=ep, etp=1)
    experts = value((4, 6), 7)
    biases = value((4, 1), 9)
    dense = value((6, 5), 8)
    shared = value((5,), 3)

    def main(rank, world):
        mesh = Mesh(grid, rank, world.connect)
        groups = DataGroups(
            {DATA_AXES: mesh.reduction, EXPERT_DATA_AXES: mesh.group("edp")},
            mesh.group("tp"),
            mesh.group("tp", "pp"),
            etp=mesh.group("etp"),
        )
        place, copy = mesh.coordinate("ep"), mesh.group("edp").rank
        mine = [whole.chunk(ep)[place] for whole in (experts, biases)]
        if zero:
            mine = [part.flatten().chunk(4 // ep)[copy] for part in mine]
        halves = dense.chunk(2)[mesh.coordinate("tp")]
        parts = [
            parameter("experts", mine[0]),
            parameter("biases", mine[1]),
            parameter("dense", halves),
            parameter("shared", shared),
        ]
        experts_of = Split("ep", 0)
        splits = [(experts_of, Split("etp", 1)), (experts_of,), (Split("tp", 0),), ()]
        for p, of_one in zip(parts, splits):
            p.spec = ParamSpec(
                p.spec.name, (24, 24), Init("zeros"), of_one, partial_over=()
            )
        entries = [
            NormEntry(p.spec, p.spec.reduced_over, zero and i < 2, False)
            for i, p in enumerate(parts)
        ]
        return ParameterNorms(entries, groups, dense.device)([parts], parts)

    expected = torch.stack([x.norm() for x in (experts, biases, dense, shared)])
    for [got] in run_ranks(4, main):
        torch.testing.assert_close(got, expected)


def test_groups_use_different_optimizers_learning_rates_and_decay():
    slow = ParamGroup(
        "slow",
        lambda spec: spec.name == "a",
        lambda g: torch.optim.SGD(g, lr=0.0),
        0.5,
        decay=False,
    )
    sgd = lambda g: torch.optim.SGD(g, lr=0.0, momentum=0.9)
    parameters = [parameter(name, torch.ones(70), decay=name != "c") for name in "abc"]
    optimizer = ZeroOptimizer(
        parameters,
        ZeroSettings((slow, *default_groups(sgd))),
        DataGroups({DATA_AXES: solo()}),
    )
    optimizer.begin_step()
    for p in parameters:
        taken(p).fill_(1.0)
    optimizer.step(0.1, 0.5)
    for p, expected in zip(parameters, (1 - 0.05, 1 - 0.1 * 1.5, 1 - 0.1)):
        torch.testing.assert_close(p.detach(), torch.full((70,), expected))
    kinds = {p.spec.name: set() for p in parameters}
    for piece in optimizer.pieces():
        kinds[piece.spec.name].add(piece.kind)
    assert kinds == {
        "a": {"weight"},
        "b": {"weight", "momentum_buffer"},
        "c": {"weight", "momentum_buffer"},
    }


def test_a_parameter_in_no_group_is_an_error():
    settings = ZeroSettings(
        (
            ParamGroup(
                "a", lambda spec: spec.name == "a", lambda g: torch.optim.SGD(g, lr=0.0)
            ),
        )
    )
    with pytest.raises(
        ConfigError, match="b belongs to none of the parameter groups a"
    ):
        ZeroOptimizer(
            [parameter("b", torch.ones(3))], settings, DataGroups({DATA_AXES: solo()})
        )
