"""The mesh with a pretended connection: which groups it makes, in which order, for which rank."""

import pytest

from megatron_ds.compat.deepspeed import getters
from megatron_ds.errors import ConfigError, NotInitializedError
from megatron_ds.mpu import mesh as mesh_module
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh

pytestmark = pytest.mark.plan


def recorded_mesh(grid, rank):
    calls = []

    def connect(axes, groups, rank):
        calls.append((axes, tuple(groups)))
        return None if [rank] in map(list, groups) else f"transport of {axes}"

    mesh = Mesh(grid, rank, connect)
    mesh.connect(mesh_module.GETTER_GROUPS)
    return mesh, calls


@pytest.mark.parametrize(
    "grid",
    [Grid(tp=2, dp=3, pp=2), Grid(dp=2, pp=3, ep=2), Grid(cp=2, ep=4, dp=2)],
    ids=str,
)
def test_all_ranks_connect_the_same_groups_in_the_same_order(grid):
    orders = [recorded_mesh(grid, rank)[1] for rank in range(grid.world_size)]
    assert all(order == orders[0] for order in orders)
    assert len({groups for _, groups in orders[0]}) == len(orders[0])


def test_equal_groups_share_a_transport_and_groups_of_one_have_none():
    mesh, calls = recorded_mesh(Grid(dp=2, pp=2, tp=1), 3)
    assert [axes for axes, _ in calls] == ["dp", "pp", "tp-cp-dp-pp"]
    assert mesh.group("tp").transport is None and mesh.group("tp").size == 1
    assert (
        mesh.group("dp", "cp").transport
        == mesh.group("edp").transport
        == "transport of dp"
    )
    assert (
        mesh.group("embd").transport
        == mesh.group("tp", "pp").transport
        == "transport of pp"
    )


def test_a_group_over_any_axes_is_connected_when_it_is_first_used():
    mesh, calls = recorded_mesh(Grid(tp=2, dp=2, pp=2), 3)
    before = len(calls)
    group = mesh.group("tp", "dp")
    assert [axes for axes, _ in calls[before:]] == ["tp-dp"] and group.ranks == (
        0,
        1,
        2,
        3,
    )
    assert (
        mesh.group("dp", "tp") is group
        and mesh.group("cp", "tp").transport is mesh.group("tp").transport
    )
    assert len(calls) == before + 1
    with pytest.raises(ConfigError, match="no grid has the axes"):
        mesh.group("tp", "tq")


def test_samples_differ_along_dp_and_gradients_are_summed_over_context_too():
    mesh, _ = recorded_mesh(Grid(cp=2, dp=3), 3)
    assert (mesh.samples.ranks, mesh.samples.axes) == ((1, 3, 5), "dp")
    assert (mesh.reduction.ranks, mesh.reduction.axes) == ((0, 1, 2, 3, 4, 5), "dp-cp")


def test_groups_are_those_of_the_grid_seen_from_the_rank():
    grid = Grid(tp=2, cp=3, dp=2, pp=2, ep=2)
    for rank in range(grid.world_size):
        mesh, _ = recorded_mesh(grid, rank)
        getters_axes = [
            axes for axes in mesh_module.GETTER_GROUPS if axes[0] in grid.coordinates(0)
        ]
        for axes in (*getters_axes, ("tp", "cp"), ("pp", "tp", "dp"), ("edp", "tp")):
            group = mesh.group(*axes)
            assert (
                group.ranks == grid.group_of(rank, *axes)
                and group.ranks[group.rank] == rank
            )
            assert (
                mesh.size(*axes) == group.size == len(group.ranks)
                and mesh.group(*reversed(axes)) is group
            )
        assert mesh.group("cp", "dp") is mesh.group("dp", "cp")
        assert mesh.group("world").ranks == tuple(range(24))
        assert mesh.is_first_stage == (rank < 12) and mesh.is_last_stage == (rank >= 12)


def test_a_hierarchy_is_connected_when_asked_for_alike_on_all_ranks():
    grid = Grid(tp=2, dp=6)
    before = [recorded_mesh(grid, rank)[1] for rank in range(12)]
    made = []
    for rank in range(12):
        mesh, calls = recorded_mesh(grid, rank)
        inner, outer = mesh.split_data(3)
        assert (inner.axes, outer.axes) == ("dp-cp-inner", "dp-cp-outer")
        assert inner.ranks[inner.rank] == outer.ranks[outer.rank] == rank
        assert mesh.split_data(3) == (inner, outer)
        made.append(calls)
    assert all(calls == made[0] for calls in made) and [
        axes for axes, _ in made[0][len(before[0]) :]
    ] == ["dp-cp-inner", "dp-cp-outer"]
    mesh, calls = recorded_mesh(grid, 5)
    inner, outer = mesh.split_data(6)
    assert (
        inner is mesh.group("dp", "cp")
        and outer.ranks == (5,)
        and outer.transport is None
        and calls == before[5]
    )


def test_a_group_that_is_connected_apart_has_a_transport_of_its_own_on_every_rank():
    grid = Grid(tp=2, dp=2)
    meshes = [recorded_mesh(grid, rank) for rank in range(4)]
    for mesh, calls in meshes:
        data, alone = mesh.reduction, mesh.group("cp")
        before = len(calls)
        apart = [mesh.connect_apart(data, "gathers") for _ in range(2)]
        assert calls[before:] == [("dp-cp-gathers", ((0, 2), (1, 3)))]
        assert apart[0].transport is apart[1].transport is not data.transport
        of = lambda group: (group.axes, group.ranks, group.rank, group.traffic)
        assert of(apart[0]) == of(data)
        assert mesh.connect_apart(alone, "gathers") is alone
    assert len({str(calls) for _, calls in meshes}) == 1


def test_middle_stages_are_alone_in_the_embedding_group():
    meshes = [recorded_mesh(Grid(pp=3), rank)[0] for rank in range(3)]
    assert [mesh.group("embd").ranks for mesh in meshes] == [(0, 2), (1,), (0, 2)]
    assert meshes[1].group("embd").transport is None


def test_the_ends_of_the_model_are_where_its_stages_were_placed():
    """Two stages on each of three ranks: round robin, and there and back, where the loss is on the first
    rank."""
    seen = {}
    for name, placement in (
        ("round robin", (0, 1, 2, 0, 1, 2)),
        ("back", (0, 1, 2, 2, 1, 0)),
    ):
        for rank in range(3):
            mesh = recorded_mesh(Grid(pp=3), rank)[0]
            mesh.place_stages(placement)
            mesh_module.set_mesh(mesh)
            seen[name, rank] = (
                mesh.stages,
                getters.is_pipeline_first_stage(),
                getters.is_pipeline_last_stage(),
                [
                    getters.is_pipeline_last_stage(ignore_virtual=False, vp_stage=c)
                    for c in (0, 1)
                ],
                getters.is_rank_in_embedding_group(),
                getters.get_pipeline_model_parallel_last_rank(),
            )
            assert getters.get_virtual_pipeline_model_parallel_world_size() == 2
            with pytest.raises(
                ConfigError, match="holds 2 stages of the model, numbered 0 to 1"
            ):
                getters.is_pipeline_first_stage(ignore_virtual=False)
    mesh_module.set_mesh(None)
    assert [seen["round robin", rank] for rank in range(3)] == [
        ((0, 3), True, False, [False, False], True, 2),
        ((1, 4), False, False, [False, False], False, 2),
        ((2, 5), False, True, [False, True], True, 2),
    ]
    assert [seen["back", rank] for rank in range(3)] == [
        ((0, 5), True, True, [False, True], True, 0),
        ((1, 4), False, False, [False, False], False, 0),
        ((2, 3), False, False, [False, False], False, 0),
    ]


def test_getters_refuse_before_there_is_a_mesh():
    mesh_module.set_mesh(None)
    with pytest.raises(NotInitializedError, match="initialize_model_parallel"):
        getters.get_tensor_model_parallel_rank()
    assert not mesh_module.model_parallel_is_initialized()


def test_a_process_alone_is_a_mesh_of_one_without_torch_groups():
    mesh = mesh_module.initialize_model_parallel()
    try:
        assert mesh_module.get_mesh() is mesh and mesh.world_size == 1
        assert (
            getters.get_model_parallel_group() is None
            and getters.get_data_parallel_world_size() == 1
        )
        assert getters.is_pipeline_first_stage() and getters.is_pipeline_last_stage()
    finally:
        mesh_module.destroy_model_parallel()
    assert not mesh_module.model_parallel_is_initialized()


def test_every_public_name_of_mpu_exists():
    from megatron_ds import mpu

    assert [name for name in mpu.__all__ if not hasattr(mpu, name)] == []
