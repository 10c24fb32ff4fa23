"""Programs written for DeepSpeed, with nothing but the import changed, lose as under DeepSpeed itself.

DeepSpeed's numbers are in tests/golden/deepspeed_losses.json; benchmarks/equal_to_deepspeed.py makes them,
and says with which versions. The limits are in `tolerance` (tests/harness/deepspeed_scripts.py), with their
reasons.
"""

import json
import os
from contextlib import contextmanager

import pytest
import torch

import megatron_ds
from megatron_ds.errors import ConfigError
from megatron_ds.mpu.mesh import set_mesh
from tests.harness.deepspeed_scripts import (
    GOLDEN,
    RANKS,
    all_cases,
    differences,
    run_case,
)
from tests.harness.limits import HUNG
from tests.harness.processes import run_processes

pytestmark = pytest.mark.processes


@contextmanager
def as_launched(rank, world):
    """The environment that a launcher gives a rank; afterwards no mesh of this world is left."""
    there = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world.size),
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ |= there
    try:
        yield
    finally:
        set_mesh(None)
        for name in there:
            del os.environ[name]


def run_cases(rank, world, names, folder):
    records = {}
    with as_launched(rank, world):
        for number, name in enumerate(names):
            where = os.path.join(folder, str(number))
            os.makedirs(where, exist_ok=True)
            records[name] = run_case("megatron_ds", all_cases()[name], where)
    return records


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("program", ["cifar", "hello", "trainer"])
def test_programs_for_deepspeed_have_its_losses(program, dtype, tmp_path):
    if program == "trainer":
        pytest.importorskip("transformers")
    names = [
        name
        for name in all_cases()
        if name.startswith(program) and name.endswith(dtype)
    ]
    expected = json.loads(GOLDEN.read_text())["cases"]
    found = run_processes(RANKS, run_cases, names, str(tmp_path), timeout=HUNG)[0]
    assert len(names) == 4 and not [
        line
        for name in names
        for line in differences(name, found[name], expected[name])
    ]


# -------------------------------------------------------------------------------------------------- zero.Init
class Whole(torch.nn.Module):
    """Draws values in every place where modules do: own __init__, apply, a loop over parameters, a child's by
    name."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(3))
        self.scale = torch.nn.Parameter(torch.randn(7))
        torch.nn.init.normal_(self.layers[1].weight, std=2.0)
        self.apply(
            lambda m: (
                torch.nn.init.ones_(m.bias) if isinstance(m, torch.nn.Linear) else None
            )
        )
        for name, p in self.named_parameters():
            if name.startswith("layers.2.weight"):
                torch.nn.init.xavier_uniform_(p)
        self.tied = torch.nn.Linear(5, 5, bias=False)
        self.tied.weight = self.layers[0].weight


def make_in_parts(rank, world):
    with as_launched(rank, world):
        return check_parts(rank)


def check_parts(rank):
    from megatron_ds.compat.engine.zero_init import partitions_of

    torch.manual_seed(3)
    plain = {name: p.detach().clone() for name, p in Whole().named_parameters()}
    torch.manual_seed(3 + 5 * rank)  # rank 0's values count
    with megatron_ds.zero.Init():
        module = Whole()
    parts = partitions_of(module)
    assert (
        [p.is_meta for p in module.parameters()]
        == [True] * len(plain)
        == [True] * len(parts)
    )
    module.scale.allreduce = (
        False  # the mark of an expert comes too late: all ranks have one value
    )
    with pytest.raises(
        ConfigError,
        match="scale was made under zero.Init and marked as an expert afterwards",
    ):
        partitions_of(module)
    del module.scale.allreduce
    held = sum(part.part.numel() for part in parts.values())
    parameters = list(module.parameters())
    with megatron_ds.zero.GatheredParameters(parameters):
        for name, p in module.named_parameters():
            assert torch.equal(p, plain[name]), name
    with (
        megatron_ds.zero.GatheredParameters(module.scale, modifier_rank=1),
        torch.no_grad(),
    ):
        module.scale.fill_(rank)
    with megatron_ds.zero.GatheredParameters(parameters, enabled=False):
        assert module.scale.is_meta
    again = Whole()  # nothing of the context is left
    assert (
        not any(p.is_meta for p in again.parameters())
        and type(again._parameters) is dict
    )
    with megatron_ds.zero.Init(enabled=False):
        assert not any(p.is_meta for p in Whole().parameters())
    with pytest.raises(ConfigError, match="nvme"):
        megatron_ds.zero.Init(remote_device="nvme")
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    }
    engine, *_ = megatron_ds.initialize(model=module, config=config)
    for name, value in engine.full_state_dict().items():
        expected = (
            torch.ones(7)
            if name == "scale"
            else plain[{"tied.weight": "layers.0.weight"}.get(name, name)]
        )
        assert torch.equal(value, expected.bfloat16()), name
    megatron_ds.zero.register_external_parameter(module, module.scale)
    return held, sum(p.numel() for p in plain.values())


def test_a_module_made_in_parts_has_the_values_of_a_whole_one():
    for held, whole in run_processes(2, make_in_parts):
        assert (held, whole) == (3 * 13 + 3 * 3 + 4, 3 * 25 + 3 * 5 + 7)
