"""The grid against numpy: an array of ranks shaped like the axes, slowest first, has the groups as its
lines."""

from dataclasses import replace
from itertools import permutations
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ds.errors import ConfigError
from megatron_ds.mpu.grid import AXES, Grid

pytestmark = pytest.mark.plan

ORDERS = ["-".join(p) for p in permutations(AXES)]
sizes = st.integers(1, 3)


@st.composite
def grids(draw):
    tp, cp, dp, pp = (draw(sizes) for _ in range(4))
    ep = draw(st.sampled_from([d for d in range(1, cp * dp + 1) if cp * dp % d == 0]))
    return Grid(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, order=draw(st.sampled_from(ORDERS)))


@st.composite
def folded(draw):
    """Grids whose experts are divided over any ranks of a stage."""
    tp, cp, dp, pp = (draw(st.integers(1, 4)) for _ in range(4))
    places = tp * cp * dp
    etp = draw(st.sampled_from([d for d in range(1, places + 1) if places % d == 0]))
    rest = places // etp
    ep = draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
    order = draw(st.sampled_from(ORDERS))
    return Grid(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, order=order, etp=etp)


def lines(
    cube: np.ndarray, names: list[str], axes: tuple[str, ...]
) -> set[tuple[int, ...]]:
    """Groups over `axes` in an array whose dims are `names`."""
    keep = [names.index(axis) for axis in axes]
    rest = [i for i in range(len(names)) if i not in keep]
    rows = cube.transpose(rest + keep).reshape(-1, prod(cube.shape[i] for i in keep))
    return {tuple(sorted(row)) for row in rows.tolist()}


@given(grids(), st.data())
def test_inner_and_outer_groups_are_rows_and_columns_of_the_data_parallel_ranks(
    grid, data
):
    n = grid.cp * grid.dp
    h = data.draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
    tables = [np.array(ranks).reshape(n // h, h) for ranks in grid.groups("dp", "cp")]
    inner, outer = grid.split_data(h)
    assert inner == sorted(tuple(row) for table in tables for row in table.tolist())
    assert outer == sorted(
        tuple(column) for table in tables for column in table.T.tolist()
    )


def test_groups_that_do_not_divide_the_data_parallel_ranks_are_refused():
    with pytest.raises(
        ConfigError, match=r"6 data-parallel ranks .* groups of 4.*\(1, 2, 3, 6\)"
    ):
        Grid(dp=6, tp=2).split_data(4)


@given(grids(), st.sets(st.sampled_from(["tp", "cp", "dp", "pp"]), min_size=1))
def test_dense_groups_are_lines_of_the_array_of_ranks(grid, axes):
    names = [axis for axis in reversed(grid.order.split("-")) if axis != "ep"]
    cube = np.arange(grid.world_size).reshape([getattr(grid, axis) for axis in names])
    groups = grid.groups(*axes)
    assert set(groups) == lines(cube, names, tuple(axes))
    assert groups == sorted(groups)
    for group in groups:
        assert all(grid.group_of(rank, *axes) == group for rank in group)


@given(
    st.sampled_from(
        ["tp-cp-ep-dp-pp", "tp-ep-cp-dp-pp", "cp-ep-dp-tp-pp", "pp-tp-cp-ep-dp"]
    ),
    sizes,
    sizes,
    sizes,
    sizes,
    st.sampled_from(["ep", "edp", "tp", "pp"]),
)
def test_expert_groups_agree_with_megatron_where_it_accepts_the_order(
    order, tp, ep, edp, pp, axis
):
    # Megatron lays the experts' axes out in the same order, without cp, and dp meaning the experts' own.
    grid = Grid(tp=tp, cp=1, ep=ep, dp=ep * edp, pp=pp, order=order)
    names = [{"dp": "edp"}.get(a, a) for a in reversed(order.split("-")) if a != "cp"]
    cube = np.arange(grid.world_size).reshape([getattr(grid, a) for a in names])
    assert set(grid.groups(axis)) == lines(cube, names, (axis,))


@given(folded(), st.sets(st.sampled_from(["etp", "ep", "edp", "pp"]), min_size=1))
def test_folded_experts_cut_the_ranks_of_a_stage_in_their_order(grid, axes):
    """The ranks of a stage, in the order of tp, cp and dp, are an array of etp, ep and edp."""
    if not grid.folds:
        return
    order = grid.order.split("-")
    names = [axis for axis in reversed(order) if axis != "ep"]
    cube = np.arange(grid.world_size).reshape([getattr(grid, axis) for axis in names])
    stages = np.moveaxis(cube, names.index("pp"), 0).reshape(grid.pp, -1)
    experts = [{"tp": "etp", "dp": "edp"}.get(a, a) for a in reversed(order)]
    experts = ["pp", *(axis for axis in experts if axis not in ("cp", "pp"))]
    cube = stages.reshape([getattr(grid, axis) for axis in experts])
    assert set(grid.groups(*axes)) == lines(cube, experts, tuple(axes))


@given(folded(), st.sampled_from(["etp", "ep", "edp", "pp"]))
def test_folded_groups_are_those_of_megatrons_formula(grid, axis):
    """In the orders of its flags Megatron lays the experts' axes out anew, and demands equal pipeline groups."""
    for order in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"):
        grid = replace(grid, order=order)
        names = [
            {"tp": "etp", "dp": "edp"}.get(a, a) for a in reversed(order.split("-"))
        ]
        names.remove("cp")
        cube = np.arange(grid.world_size).reshape([getattr(grid, a) for a in names])
        if set(grid.groups("pp")) == lines(cube, names, ("pp",)):
            assert set(grid.groups(axis)) == lines(cube, names, (axis,))


def test_experts_divided_as_dense_layers_are_have_their_groups():
    for grid in (Grid(tp=2, dp=2, ep=2), Grid(tp=2, dp=2, ep=2, etp=2)):
        assert grid == Grid(tp=2, dp=2, ep=2) and not grid.folds
        assert grid.groups("etp") == grid.groups("tp") and grid.known(["etp"]) == (
            "tp",
        )
        assert grid.groups("tp", "ep") == grid.groups("etp", "ep") == [(0, 1, 2, 3)]
    other = Grid(tp=2, dp=2, ep=2, etp=1)
    assert other.groups("ep") == [(0, 1), (2, 3)] and other.edp == 2
    assert str(other).endswith("(experts: etp 1 x ep 2 x edp 2)")
    with pytest.raises(ConfigError, match=r"tp, ep"):
        other.groups("tp", "ep")
    with pytest.raises(
        ConfigError,
        match=r"expert_tensor_parallel_size=3 does not divide .* = 4",
    ):
        Grid(tp=2, dp=2, etp=3)
    with pytest.raises(ConfigError, match=r"4 / 1 = 4.*\(1, 2, 4\)"):
        Grid(tp=2, dp=2, ep=3, etp=1)


@given(grids())
def test_experts_cut_the_ranks_of_context_and_data_again(grid):
    assert set(grid.groups("ep", "edp")) == set(grid.groups("cp", "dp"))
    for group in grid.groups("ep"):
        assert [grid.coordinates(rank)["edp"] for rank in group] == [
            grid.coordinates(group[0])["edp"]
        ] * grid.ep
        assert sorted(grid.coordinates(rank)["ep"] for rank in group) == list(
            range(grid.ep)
        )


@given(st.one_of(grids(), folded()))
def test_coordinates_and_ranks_are_inverse_in_both_views(grid):
    for rank in range(grid.world_size):
        at = grid.coordinates(rank)
        assert (
            grid.rank_of(**{axis: at[axis] for axis in ("tp", "cp", "dp", "pp")})
            == rank
        )
        assert (
            grid.rank_of(**{axis: at[axis] for axis in ("etp", "ep", "edp", "pp")})
            == rank
        )


def test_groups_of_a_known_layout():
    # Sixteen ranks as in Megatron's own documentation: tensor 2, pipeline 4, hence data 2.
    grid = Grid.fit(16, tp=2, pp=4)
    assert grid.groups("dp")[:4] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert grid.groups("tp")[-1] == (14, 15)
    assert grid.groups("pp") == [
        (0, 4, 8, 12),
        (1, 5, 9, 13),
        (2, 6, 10, 14),
        (3, 7, 11, 15),
    ]
    assert grid.groups("tp", "pp")[0] == (0, 1, 4, 5, 8, 9, 12, 13)
    assert grid.embedding_groups()[:4] == [(0, 12), (1, 13), (2, 14), (3, 15)]
    assert (5,) in grid.embedding_groups()


def test_a_world_that_does_not_fit_gets_numbers_and_alternatives():
    with pytest.raises(
        ConfigError,
        match=r"world size 6 is not a multiple of 4 .* 4 or 8 ranks.* in \(1, 2, 3, 6\)",
    ):
        Grid.fit(6, tp=4)
    with pytest.raises(
        ConfigError, match=r"expert_model_parallel_size=3 .* 1 x 4 = 4.*\(1, 2, 4\)"
    ):
        Grid.fit(8, tp=2, ep=3)
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=0"):
        Grid.fit(6, tp=0)
    with pytest.raises(ConfigError, match="rank order 'tp-pp'"):
        Grid(order="tp-pp")


def test_axes_of_both_views_do_not_mix():
    grid = Grid(cp=2, ep=2, dp=2)
    with pytest.raises(ConfigError, match=r"cp, ep"):
        grid.groups("cp", "ep")
    with pytest.raises(ConfigError, match="dp=2 is outside"):
        grid.rank_of(dp=2)
