"""What an optimizer declares, and the class of the tensors that it is given."""

import pytest
import torch
from torch import nn

from megatron_ds.errors import ConfigError
from megatron_ds.mpu.context import new_parameter
from megatron_ds.mpu.param_spec import Init, ParamSpec
from megatron_ds.optim import Declared, OptimizerTraits
from megatron_ds.optim.optimizers import NO_NEEDS, OptimizerRegistry
from megatron_ds.zero.layout import SlotPiece
from megatron_ds.zero.shard_optimizer import make_leaf

pytestmark = pytest.mark.plan
SPEC = ParamSpec("weight", (4,), Init("normal", 0.1))


def test_a_second_entry_of_a_name_leaves_what_the_first_declares():
    registry = OptimizerRegistry()
    needs = OptimizerTraits(needs_norms=True)

    @registry.register("mine", declares=Declared(needs))
    def first():
        pass

    with pytest.raises(AssertionError, match="registered twice"):
        registry.register("mine")(lambda: None)
    assert registry.declared("mine").traits == needs


def test_a_need_that_is_an_attribute_of_the_function_is_refused():
    registry = OptimizerRegistry()

    @registry.register("mine")
    def mine():
        pass

    assert registry.declared("mine").traits == NO_NEEDS
    mine.needs_whole_tensors = True
    with pytest.raises(ConfigError, match="needs_whole_tensors, which is not read"):
        registry.declared("mine")


def test_weights_and_leaves_are_of_the_class_for_which_torch_has_fast_ways():
    weight = new_parameter(SPEC)
    leaf = make_leaf(SPEC, SlotPiece(0, 0, 4, 0, 0, 4), torch.zeros(4)).tensor
    assert type(weight) is nn.Parameter and type(leaf) is nn.Parameter
    assert torch.equal(nn.Parameter(weight), weight)
