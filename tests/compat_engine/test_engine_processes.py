"""The engine as users start it: real ranks, groups of its own making, of torch's, or of somebody's mpu."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import megatron_ds
from megatron_ds.compat.deepspeed.external_groups import join_world
from megatron_ds.errors import ConfigError
from megatron_ds.mpu.collectives import all_gather_object
from megatron_ds.mpu.process_groups import transport_over
from tests.compat_engine import test_engine_experts as experts
from tests.compat_engine.test_engine import Split
from tests.harness.engine_runs import config_of, loss_of, make, on_ranks, train, weights
from tests.harness.plain_training import train_plainly
from tests.harness.processes import run_processes
from tests.moe import test_moe_any_module as layers

pytestmark = pytest.mark.processes


def norms_of_a_hierarchy(rank, world):
    """Two hops over groups made beside those of somebody's mpu; of one inner group, so that the norms are
    stage 3's."""
    config = config_of(3, 2)
    config["zero_optimization"]["zero_hpz_partition_size"] = 2
    engine, *_ = megatron_ds.initialize(
        model=make(), config=config, mpu=mpu_of("six functions", rank, world)
    )
    return (
        train(engine, rank, 2),
        engine.optimizer.groups.inner.ranks,
        engine.optimizer.groups.outer.ranks,
    )


def train_rank(rank, world, stage, folder, kind):
    """Norms, weights, and those after saving, loading and one step more. kind: how the engine learns of the
    ranks."""
    engine, *_ = megatron_ds.initialize(
        model=make(), config=config_of(stage, 2), mpu=mpu_of(kind, rank, world)
    )
    norms = train(engine, rank, 2)
    engine.save_checkpoint(folder, "end")
    first = train(engine, rank, 1, first=2)
    engine.load_checkpoint(folder)
    again = train(engine, rank, 1, first=2)
    engine.save_safetensors(folder)
    engine.eval()
    return (
        norms,
        first == again,
        weights(engine),
        float(loss_of(engine, torch.zeros(1, 3, dtype=torch.long))),
    )


def mpu_of(kind, rank, world):
    if kind == "nothing":
        return None
    from torch import distributed as dist

    alone = dist.new_group([rank], use_local_synchronization=True)
    return SimpleNamespace(
        get_model_parallel_rank=lambda: 0,
        get_model_parallel_world_size=lambda: 1,
        get_model_parallel_group=lambda: alone,
        get_data_parallel_rank=lambda: rank,
        get_data_parallel_world_size=lambda: 2,
        get_data_parallel_group=lambda: dist.group.WORLD,
    )


def train_over_groups_of_torch(rank, world):
    """Norms of an expert-parallel module and of a tensor-parallel one, over an mpu of torch's process
    groups."""
    from torch import distributed as dist

    alone = dist.new_group([rank], use_local_synchronization=True)
    made = {
        stride: [dist.new_group(list(ranks)) for ranks in lists]
        for stride, lists in ((1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3))))
    }
    near, far = made[1][rank // 2], made[2][rank % 2]
    mpu = lambda model, data, **more: SimpleNamespace(
        get_model_parallel_rank=lambda: dist.get_rank(model),
        get_model_parallel_world_size=lambda: dist.get_world_size(model),
        get_model_parallel_group=lambda: model,
        get_data_parallel_rank=lambda: dist.get_rank(data),
        get_data_parallel_world_size=lambda: dist.get_world_size(data),
        get_data_parallel_group=lambda: data,
        **more,
    )
    group = SimpleNamespace(size=2, rank=rank % 2, transport=transport_over(near))
    with_experts = mpu(
        alone, dist.group.WORLD, get_expert_data_parallel_group=lambda: far
    )
    engine = megatron_ds.initialize(
        model=experts.Experts(group), config=experts.config(2), mpu=with_experts
    ).engine
    norms = experts.train(engine, rank)
    of_layers = []
    for divided in (with_experts, mpu(alone, dist.group.WORLD)):
        net = layers.Net(layers.MoE, ep_size=2, **layers.DROPLESS).number(rank % 2)
        engine = megatron_ds.initialize(
            model=net, config=layers.config(2), mpu=divided
        ).engine
        of_layers.append(layers.train(engine, rank)[0])
    split = megatron_ds.initialize(
        model=Split(rank % 2), config=config_of(1, 2), mpu=mpu(near, far)
    ).engine
    split.backward(split(torch.arange(24.0).view(6, 4).chunk(2)[rank // 2] / 24))
    split.step()
    joined = join_world(mpu(near, far))
    apart = joined.connect_apart(joined.data, "gathers")
    assert apart.transport.process_group not in (near, far)
    assert (
        all_gather_object(rank, apart) == list(apart.ranks) == list(joined.data.ranks)
    )
    wrong = mpu(
        alone,
        dist.group.WORLD,
        get_expert_data_parallel_group=lambda: far if rank else alone,
    )
    with pytest.raises(
        ConfigError, match="each of these ranks must be in exactly one group"
    ):
        megatron_ds.initialize(
            model=experts.Experts(group), config=experts.config(2), mpu=wrong
        )
    return norms, split.get_global_grad_norm(), of_layers


def test_gradients_are_reduced_over_the_groups_of_an_mpu():
    norms, _ = experts.one_process()
    norms_of_layers, _ = layers.looped_training()
    halves = [list((torch.arange(24.0).view(6, 4) / 24).chunk(2))]
    [split] = train_plainly(Split(), lambda module, x: module(x), halves, lr=0.01)
    for found, found_split, of_layers in run_processes(4, train_over_groups_of_torch):
        assert found == pytest.approx(norms, rel=1e-5) and found_split == pytest.approx(
            split, rel=1e-5
        )
        assert of_layers == [pytest.approx(norms_of_layers, rel=1e-5)] * 2


@pytest.mark.quick
@pytest.mark.parametrize(
    "stage, kind", [(1, "six functions"), (3, "nothing"), (3, "six functions")]
)
def test_real_ranks_do_as_threads_do(stage, kind, tmp_path):
    threads = on_ranks(
        2, lambda engine, rank: train(engine, rank, 2), make, config_of(stage, 2)
    )
    results = run_processes(2, train_rank, stage, str(tmp_path), kind)
    for (norms, same, _, _), expected in zip(results, threads):
        assert norms == pytest.approx(expected, rel=1e-6) and same
    stored = load_file(tmp_path / "model.safetensors")
    for _, _, found, _ in results:
        assert all(torch.equal(stored[name], p) for name, p in found.items())
    assert results[0][3] == results[1][3]


def test_inner_groups_are_made_beside_those_of_an_mpu():
    expected = on_ranks(
        2, lambda engine, rank: train(engine, rank, 2), make, config_of(3, 2)
    )
    results = run_processes(2, norms_of_a_hierarchy)
    assert [(inner, outer) for _, inner, outer in results] == [
        ((0, 1), (0,)),
        ((0, 1), (1,)),
    ]
    assert all(
        norms == pytest.approx(others, rel=1e-6)
        for (norms, *_), others in zip(results, expected)
    )
