"""What ZeRO asks of every registered optimizer."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from megatron_ds.config import OptimizerConfig
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.optimizers.newton_schulz import SETS
from megatron_ds.mpu.group import solo
from megatron_ds.mpu.param_spec import DATA_AXES, Init, Matrices, ParamSpec
from megatron_ds.optim import OPTIMIZERS, RegisteredOptimizer, default_groups
from megatron_ds.zero.data_groups import DataGroups
from megatron_ds.zero.layout import SlotPiece
from megatron_ds.zero.matrix_owners import MatrixEntry
from megatron_ds.zero.parameter_norms import NormEntry, ParameterNorms
from megatron_ds.zero.shard_optimizer import ShardOptimizer, make_leaf
from megatron_ds.zero.whole_matrices import WholeMatrices
from tests.harness.plain_optimizers import (
    PlainAdEMAMix,
    PlainLamb,
    PlainLion,
    PlainMuon,
)

SETTINGS = OptimizerConfig(adam_beta2=0.95)
SHAPE = (16, 20)
SIZE = 320
CUTS = (0, 64, 192, 320)
# A rank has one part of a matrix at most.
PARTS_OF_MATRICES = {"muon": (0, 320)}
# By torch, or by the formula in double precision.
PLAIN = {
    "adam": partial(
        torch.optim.AdamW, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), foreach=False
    ),
    "sgd": partial(
        torch.optim.SGD, lr=0.01, weight_decay=0.1, momentum=0.9, foreach=False
    ),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01, weight_decay=0.1, foreach=False),
    "lion": partial(PlainLion, lr=0.01, weight_decay=0.1, betas=(0.95, 0.98)),
    "ademamix": partial(
        PlainAdEMAMix, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95, 0.999), alpha=5.0
    ),
    "lamb": partial(PlainLamb, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95)),
    "muon": partial(
        PlainMuon,
        lr=0.01,
        weight_decay=0.1,
        columns=SHAPE[1],
        coefficients=SETS["quintic"].steps,
    ),
}
# At first:
PLAIN |= {
    "onebit_adam": PLAIN["adam"],
    "zero_one_adam": PLAIN["adam"],
    "onebit_lamb": PLAIN["lamb"],
}


SPEC = ParamSpec("w", (8, 8), Init("ones"), matrices=Matrices())


def noise(seed):
    values = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
    values[300:] = 0.0  # padding: value and gradient are zero
    return values


def shard_optimizer(name, leaves, make=None):
    """The registered optimizer on leaves, all parts of whose parameters are here."""
    specs = {leaf.spec.name: leaf.spec for leaf in leaves}
    alone = DataGroups({DATA_AXES: solo()})
    make = make or RegisteredOptimizer(name, SETTINGS)
    cpu = "cpu"
    norms = ParameterNorms(
        [NormEntry(spec, DATA_AXES, False, False) for spec in specs.values()],
        alone,
        cpu,
    )
    matrices = WholeMatrices(
        [MatrixEntry(spec, DATA_AXES, ()) for spec in specs.values()], alone, cpu
    )
    return ShardOptimizer(default_groups(make), leaves, norms, {make: matrices})


def run(name, cuts, divisor=1.0):
    """Three steps on one tensor, given to the optimizer cut at `cuts`. The values and the optimizer."""
    spec = ParamSpec("w", SHAPE, Init("normal", 1.0), matrices=Matrices())
    values, grad = noise(0), torch.zeros(SIZE)
    leaves = [
        make_leaf(spec, SlotPiece(0, a, b, a, a, b - a), values[a:b], grad[a:b])
        for a, b in zip(cuts, cuts[1:])
    ]
    inner = shard_optimizer(name, leaves)
    assert torch.equal(values, noise(0)), "creating state must not move the parameters"
    for step in range(1, 4):
        grad.copy_(noise(step) * divisor)
        inner.step(0.01, 0.1, divisor)
    return values, inner, leaves


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_three_steps_equal_those_of_the_plain_torch_optimizer(name):
    p = nn.Parameter(noise(0))
    plain = PLAIN[name]([p])
    for step in range(1, 4):
        p.grad = noise(step)
        plain.step()
    # Fused kernels order the operations of one element differently.
    torch.testing.assert_close(
        run(name, (0, SIZE))[0], p.detach(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_aligned_cuts_change_no_bit(name):
    assert torch.equal(
        run(name, (0, SIZE))[0], run(name, PARTS_OF_MATRICES.get(name, CUTS))[0]
    )


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_padding_stays_zero(name):
    values, inner, leaves = run(name, PARTS_OF_MATRICES.get(name, CUTS))
    assert not values[300:].any() and values[:300].all()
    assert all(not state[300 - SIZE :].any() for _, state in inner.state_of(leaves[-1]))


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_a_divisor_gives_the_same_as_gradients_divided_beforehand(name):
    cuts = PARTS_OF_MATRICES.get(name, CUTS)
    assert torch.equal(
        run(name, cuts, divisor=8.0)[0], run(name, cuts)[0]
    )  # powers of two divide exactly


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_gradients_are_also_divided_for_an_optimizer_that_cannot_do_it_itself(name):
    def make(groups, **options):
        optimizer = OPTIMIZERS[name](groups, SETTINGS, **options)
        optimizer._step_supports_amp_scaling = False
        return optimizer

    make.traits = RegisteredOptimizer(name, SETTINGS).traits

    spec, grad = SPEC, torch.zeros(64)
    leaf = make_leaf(spec, SlotPiece(0, 0, 64, 0, 0, 64), torch.ones(64), grad)
    inner = shard_optimizer(name, [leaf], make)
    grad.fill_(6.0)
    inner.step(0.01, 0.0, 3.0)
    assert torch.allclose(leaf.tensor.grad, torch.full((64,), 2.0))


@pytest.mark.parametrize("name", OPTIMIZERS.names())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_gradients_give_what_their_fp32_copies_give_and_leave_no_copy(
    name, dtype
):
    grad = noise(1)[:64].to(dtype)
    updated = []
    for given in (grad.clone(), grad.float()):
        leaf = make_leaf(
            SPEC, SlotPiece(0, 0, 64, 0, 0, 64), noise(0)[:64].clone(), given
        )
        inner = shard_optimizer(name, [leaf])
        inner.step(0.01, 0.1, 3.0)
        updated.append(leaf.tensor.detach())
        assert (leaf.tensor.grad is None) == (given.dtype == dtype)
    assert torch.equal(*updated) and not torch.equal(updated[0], noise(0)[:64])


@pytest.mark.parametrize("name", OPTIMIZERS.names())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_16_bit_weight_is_written_by_exactly_those_that_say_so(name, dtype):
    spec, low = SPEC, torch.zeros(64, dtype=dtype)
    leaf = make_leaf(
        spec,
        SlotPiece(0, 0, 64, 0, 0, 64),
        noise(0)[:64].clone(),
        noise(1)[:64].clone(),
        low,
    )
    inner = shard_optimizer(name, [leaf])
    inner.step(0.01, 0.1, 3.0)
    assert torch.equal(
        low,
        leaf.tensor.detach().to(dtype)
        if inner.writes_low(leaf)
        else torch.zeros(64, dtype=dtype),
    )


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_groups_that_do_not_decay_get_no_weight_decay(name):
    leaves = [
        make_leaf(
            replace(SPEC, name=n, decay=n == "decays"),
            SlotPiece(0, 0, 64, 0, 0, 64),
            torch.ones(64),
            torch.zeros(64),
        )
        for n in ("decays", "stays")
    ]
    inner = shard_optimizer(name, leaves)
    inner.step(0.5, 0.1, 1.0)
    # Decay in the gradient is a step of lr with Adagrad, and of the largest trust ratio with LAMB.
    lamb = 1 - 0.5 * 10 * 0.1 * (1 - 0.95) ** 0.5 / (1 - 0.9)
    expected = {"adagrad": 0.5, "lamb": lamb, "onebit_lamb": lamb}.get(name, 0.95)
    torch.testing.assert_close(leaves[0].tensor.detach(), torch.full((64,), expected))
    assert torch.equal(leaves[1].tensor.detach(), torch.ones(64))


def test_adamw_is_another_name_of_adam_and_unknown_names_are_errors():
    assert OPTIMIZERS["adamw"] is OPTIMIZERS["adam"]
    with pytest.raises(ConfigError, match="did you mean 'adam'"):
        OPTIMIZERS["adamv"]
