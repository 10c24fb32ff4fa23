"""`ProcessTopology` numbers ranks as torch numbers the elements of a tensor."""

import pytest
import torch
from megatron_ds.runtime.pipe.topology import (
    PipeModelDataParallelTopology,
    ProcessTopology,
)

from megatron_ds.errors import ConfigError

pytestmark = pytest.mark.plan

SIZES = {"a": 2, "b": 3, "c": 4}
RANKS = torch.arange(24).view(2, 3, 4)


def topology():
    return ProcessTopology(list(SIZES), list(SIZES.values()))


def test_ranks_places_and_sizes():
    grid = topology()
    assert grid.world_size() == 24 and grid.get_axis_names() == list(SIZES)
    assert [grid.get_dim(axis) for axis in "abcd"] == [2, 3, 4, 0]
    for rank in range(24):
        place = grid.get_coord(rank)
        assert RANKS[place] == rank == grid.get_rank(**place._asdict())


def test_groups_are_the_lines_of_the_tensor():
    grid = topology()
    for dim, axis in enumerate(SIZES):
        lines = RANKS.movedim(dim, -1).reshape(-1, SIZES[axis]).tolist()
        assert grid.get_axis_comm_lists(axis) == lines
        for at in range(SIZES[axis]):
            assert (
                grid.get_axis_list(axis, at) == RANKS.select(dim, at).flatten().tolist()
            )
    assert grid.filter_match(a=1, c=2) == RANKS[1, :, 2].tolist()
    assert grid.get_axis_comm_lists("d") == []


def test_names_of_places():
    grid = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    assert grid.get_rank_repr(9) == "model_01"
    assert grid.get_rank_repr(9, omit_axes=(), inner_sep="=", outer_sep=",") == (
        "pipe=01,data=01,model=01"
    )


def test_a_place_outside_of_the_grid_is_an_error():
    for wrong in ({"a": 2, "b": 0, "c": 0}, {"a": 0}, {"a": 0, "b": 0, "c": 0, "d": 0}):
        with pytest.raises(ConfigError, match="no rank at"):
            topology().get_rank(**wrong)
    with pytest.raises(ConfigError, match="at least 1"):
        ProcessTopology(["a"], [0])
