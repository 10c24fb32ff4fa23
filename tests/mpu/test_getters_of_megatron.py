"""The getters of `mpu` answer as megatron-core's of the same names, on random grids with experts that are divided
apart from dense layers, and on processes."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ds.compat.deepspeed import getters
from megatron_ds.errors import ConfigError
from megatron_ds.mpu import mesh as mesh_module
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.limits import HUNG
from tests.harness.megatron_core import skip_reason
from tests.harness.processes import run_processes
from tests.moe.test_folding_of_megatron import random_grid

GRIDS = 60
MOST = 24  # ranks of a grid
# Of ranks without an embedding megatron-core's group is none; its chunks are those of one process.
OTHER_MEANINGS = ("embedding", "virtual")
NAMES = [
    name
    for name in vars(getters)
    if name.startswith("get_")
    and name != "get_mesh"
    and not any(word in name for word in OTHER_MEANINGS)
]
OF_EXPERTS = [name for name in NAMES if "expert" in name]
FOLDED = Grid(tp=2, dp=2, etp=1, ep=2)


def theirs(places: Iterable[tuple[Grid, int]]) -> list[dict]:
    """Answers of megatron-core on the ranks of grids."""
    jobs = [
        {axis: getattr(grid, axis) for axis in ("tp", "cp", "pp", "ep", "etp")}
        | {"rank": rank, "ranks": grid.world_size, "names": NAMES}
        for grid, rank in places
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.megatron_groups"],
        input=json.dumps(jobs),
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def answers(names: Iterable[str], ranks_of) -> dict:
    """What our getters answer; groups as their ranks."""
    found = {name: getattr(getters, name)() for name in names}
    return {
        name: ranks_of(value) if name.endswith("_group") else value
        for name, value in found.items()
    }


def pretended(grid: Grid, rank: int, names: Iterable[str]) -> dict:
    """Our answers on a rank whose groups are lists."""

    def connect(axes, groups, rank):
        [mine] = [ranks for ranks in groups if rank in ranks]
        return SimpleNamespace(process_group=list(mine))

    mesh = Mesh(grid, rank, connect)
    mesh.connect(mesh_module.GETTER_GROUPS)
    mesh_module.set_mesh(mesh)
    getters._alone[mesh] = [rank]
    try:
        return answers(names, lambda ranks: ranks)
    finally:
        mesh_module.set_mesh(None)


@pytest.mark.processes
@pytest.mark.rest
@pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "none")
def test_random_ranks_of_random_grids_have_the_groups_of_megatron_core():
    draw = random.Random(2)
    grids = [FOLDED]
    while len(grids) < GRIDS:
        grid = random_grid(draw)
        grids += [grid] * (grid.world_size <= MOST)
    assert sum(grid.folds for grid in grids) > GRIDS // 3
    places = [(grid, draw.randrange(grid.world_size)) for grid in grids]
    seen = set()
    for (grid, rank), expected in zip(places, theirs(places)):
        assert {*OF_EXPERTS} <= expected.keys() and len(expected) > 30
        assert pretended(grid, rank, expected) == expected, (grid, rank)
        seen.add(str(expected))
    assert len(seen) > GRIDS // 2


def groups_of_experts(rank, world):
    """What the getters of experts answer after `initialize_model_parallel`."""
    import torch.distributed as dist

    mesh_module.initialize_model_parallel(
        FOLDED.tp,
        expert_model_parallel_size=FOLDED.ep,
        expert_tensor_parallel_size=FOLDED.etp,
    )
    found = answers(OF_EXPERTS, dist.get_process_group_ranks)
    mesh_module.destroy_model_parallel()
    return found


@pytest.mark.processes
@pytest.mark.rest
def test_processes_have_groups_of_experts_apart_from_those_of_dense_layers():
    """Whole experts: the ranks of a tensor-parallel group have different ones."""
    for rank, found in enumerate(run_processes(4, groups_of_experts)):
        assert found == pretended(FOLDED, rank, OF_EXPERTS)
        first = rank // 2 * 2
        assert found["get_expert_model_parallel_group"] == [first, first + 1]
        assert found["get_expert_tensor_parallel_group"] == [rank]
        assert found["get_expert_tensor_parallel_world_size"] == 1
        assert found["get_expert_data_parallel_group"] == [rank % 2, rank % 2 + 2]
        assert found["get_expert_model_parallel_src_rank"] == first


@pytest.mark.plan
def test_a_size_that_divides_nothing_is_refused():
    with pytest.raises(ConfigError, match="expert_tensor_parallel_size=0: the size"):
        mesh_module.initialize_model_parallel(expert_tensor_parallel_size=0)
    with pytest.raises(ConfigError, match="expert_tensor_parallel_size=2 does not"):
        mesh_module.initialize_model_parallel(expert_tensor_parallel_size=2)
    assert not mesh_module.model_parallel_is_initialized()
