"""The engine as users start it: real ranks, groups of its own making, of torch's, or of somebody's mpu."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import megatron_ds
from tests.harness.engine_runs import config_of, loss_of, make, on_ranks, train, weights
from tests.harness.processes import run_processes


def norms_of_a_hierarchy(rank, world):
    """Two hops over groups made beside those of somebody's mpu; of one inner group, so that the norms are stage 3's."""
    config = config_of(3, 2)
    config["zero_optimization"]["zero_hpz_partition_size"] = 2
    engine, *_ = megatron_ds.initialize(model=make(), config=config, mpu=mpu_of("six functions", rank, world))
    return train(engine, rank, 2), engine.optimizer.groups.inner.ranks, engine.optimizer.groups.outer.ranks


def train_rank(rank, world, stage, folder, kind):
    """Norms, weights, and those after saving, loading and one step more. kind: how the engine learns of the ranks."""
    engine, *_ = megatron_ds.initialize(model=make(), config=config_of(stage, 2), mpu=mpu_of(kind, rank, world))
    norms = train(engine, rank, 2)
    engine.save_checkpoint(folder, "end")
    first = train(engine, rank, 1, first=2)
    engine.load_checkpoint(folder)
    again = train(engine, rank, 1, first=2)
    engine.save_safetensors(folder)
    engine.eval()
    return norms, first == again, weights(engine), float(loss_of(engine, torch.zeros(1, 3, dtype=torch.long)))


def mpu_of(kind, rank, world):
    if kind == "nothing":
        return None
    from torch import distributed as dist

    alone = dist.new_group([rank], use_local_synchronization=True)
    return SimpleNamespace(
        get_model_parallel_rank=lambda: 0, get_model_parallel_world_size=lambda: 1, get_model_parallel_group=lambda: alone,
        get_data_parallel_rank=lambda: rank, get_data_parallel_world_size=lambda: 2,
        get_data_parallel_group=lambda: dist.group.WORLD)


@pytest.mark.parametrize("stage, kind", [(1, "six functions"), (3, "nothing"), (3, "six functions")])
def test_real_ranks_do_as_threads_do(stage, kind, tmp_path):
    threads = on_ranks(2, lambda engine, rank: train(engine, rank, 2), make, config_of(stage, 2))
    results = run_processes(2, train_rank, stage, str(tmp_path), kind)
    for (norms, same, _, _), expected in zip(results, threads):
        assert norms == pytest.approx(expected, rel=1e-6) and same
    stored = load_file(tmp_path / "model.safetensors")
    for _, _, found, _ in results:
        assert all(torch.equal(stored[name], p) for name, p in found.items())
    assert results[0][3] == results[1][3]


def test_inner_groups_are_made_beside_those_of_an_mpu():
    expected = on_ranks(2, lambda engine, rank: train(engine, rank, 2), make, config_of(3, 2))
    results = run_processes(2, norms_of_a_hierarchy)
    assert [(inner, outer) for _, inner, outer in results] == [((0, 1), (0,)), ((0, 1), (1,))]
    assert all(norms == pytest.approx(others, rel=1e-6) for (norms, *_), others in zip(results, expected))
