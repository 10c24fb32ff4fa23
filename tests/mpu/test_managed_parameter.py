"""A parameter with a spec is an `nn.Parameter` in all that torch does to one, and its copies belong to no optimizer."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from megatron_ds.errors import LayoutError
from megatron_ds.mpu.context import new_parameter
from megatron_ds.mpu.managed_parameter import (
    Detour,
    TensorAccumulator,
    accumulate,
    accumulator_of,
    describe,
    detour_of,
    detours,
    spec_of,
)
from megatron_ds.mpu.param_spec import Init, ParamSpec

pytestmark = pytest.mark.threads
SPEC = ParamSpec("weight", (3, 4), Init("normal", 0.1))


def accumulated_module(device=None):
    module = nn.Module()
    module.weight = new_parameter(SPEC, device=device)
    total = torch.zeros(3, 4, device=device)
    accumulate(module.weight, TensorAccumulator(total))
    return module


def copied(module, way):
    if way == "deepcopy":
        return copy.deepcopy(module)
    if way == "pickle":
        return pickle.loads(pickle.dumps(module))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_has_the_values_and_no_accumulator(way):
    module = accumulated_module()
    module.weight.data.normal_()
    other = copied(module, way)
    assert torch.equal(other.weight, module.weight)
    assert isinstance(other.weight, nn.Parameter) and other.weight.requires_grad
    assert accumulator_of(other.weight) is None
    assert accumulator_of(module.weight) is not None


def test_pickling_keeps_the_spec():
    assert spec_of(copied(accumulated_module(), "pickle").weight) == SPEC


def test_changes_of_the_module_keep_parameter_spec_and_accumulator():
    module = accumulated_module()
    weight = module.weight
    module.to(torch.bfloat16).requires_grad_(False).requires_grad_(True)
    assert module.weight is weight and weight.dtype == torch.bfloat16
    assert spec_of(weight) == SPEC and accumulator_of(weight) is not None


def test_on_the_meta_device():
    weight = accumulated_module("meta").weight
    assert weight.is_meta
    assert spec_of(weight) == SPEC


def test_parametrizations_hold_the_parameter():
    module = accumulated_module()
    weight = module.weight
    torch.nn.utils.parametrize.register_parametrization(module, "weight", nn.Tanh())
    assert module.parametrizations.weight.original is weight
    assert torch.equal(module.weight, weight.tanh())


def test_what_torch_computes_from_it_is_a_plain_tensor():
    weight = accumulated_module().weight
    assert {type(weight.detach()), type(weight + 1), type(weight.t())} == {torch.Tensor}
    [stored] = accumulated_module().state_dict().values()
    assert type(stored) is torch.Tensor


def test_a_plain_parameter_of_another_module_is_given_the_same_attributes():
    plain = nn.Parameter(torch.zeros(3, 4))
    assert accumulator_of(plain) is None
    accumulator = TensorAccumulator(torch.zeros(3, 4))
    describe(plain, SPEC)
    accumulate(plain, accumulator)
    assert spec_of(plain) == SPEC and accumulator_of(plain) is accumulator


def test_a_parameter_without_a_spec_is_named_by_its_shape():
    with pytest.raises(LayoutError, match=r"shape \[5\] has no `.spec`.*new_parameter"):
        spec_of(nn.Parameter(torch.zeros(5)))


def test_an_accumulator_counts_contributions_and_not_their_parts():
    counted = []
    accumulator = TensorAccumulator(torch.zeros(2), lambda: counted.append(1))
    add = lambda total, values, overwrites: total.add_(values)
    accumulator.write(add, torch.ones(2))
    accumulator.write(add, torch.ones(2))
    assert not counted
    accumulator.ready()
    accumulator.add(torch.ones(2))
    accumulator.contribute(add, torch.ones(2))
    assert len(counted) == 3
    assert torch.equal(accumulator.view(), torch.full((2,), 4.0))


def test_detours_end_with_their_context_also_after_an_error():
    weight = accumulated_module().weight
    outer, inner = Detour(queue=[]), Detour(sums=object())
    with pytest.raises(ZeroDivisionError), detours({weight: outer}):
        with detours({weight: inner}):
            assert detour_of(weight) is inner
        assert detour_of(weight) is outer
        raise ZeroDivisionError
    assert detour_of(weight) is None
