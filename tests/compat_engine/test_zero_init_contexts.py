"""`zero.Init` on one rank, inside of another one, and its parameters that move."""

import pytest
import torch
from torch import nn

import megatron_ds
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.zero import GatheredParameters, Init, ZeroParamStatus
from tests.harness.engine_runs import Stack, config_of, make
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads


def alone(main):
    """main(mesh) on one rank."""
    return run_ranks(
        1, lambda rank, world: main(Mesh(Grid.fit(1), rank, world.connect))
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_shards_too_and_an_engine_takes_the_values(stage):
    plain = make(Stack).state_dict()

    def main(mesh):
        with Init(mpu=mesh):
            module = make(Stack)
        weight = module.head.weight
        assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE and weight.is_meta
        with GatheredParameters(weight):
            assert weight.ds_status == ZeroParamStatus.AVAILABLE
            assert torch.equal(weight, plain["head.weight"])
        engine, *_ = megatron_ds.initialize(
            model=module, mpu=mesh, config=config_of(stage, 1)
        )
        return engine.full_state_dict()

    [found] = alone(main)
    assert all(torch.equal(found[name], value) for name, value in plain.items())


def test_inside_of_another_context_parameters_are_sharded_once():
    def main(mesh):
        with Init(mpu=mesh):
            with Init(mpu=mesh):
                first = nn.Linear(3, 2)
            second = nn.Linear(3, 2)
        third = nn.Linear(3, 2)
        return [hasattr(module.weight, "ds_id") for module in (first, second, third)]

    assert alone(main) == [[True, True, False]]
    assert "__init_subclass__" not in vars(nn.Module)


def test_a_module_with_sharded_parameters_moves_with_its_shards():
    def main(mesh):
        with Init(mpu=mesh):
            module = nn.Linear(3, 2)
        weight = module.weight
        part = weight.partition.part.clone()
        for moved in (
            module.cpu(),
            module.to("cpu"),
            module.to(torch.device("cpu"), torch.float32),
        ):
            assert moved.weight is weight and weight.is_meta
            assert torch.equal(weight.ds_tensor, part)
        return True

    assert alone(main) == [True]
