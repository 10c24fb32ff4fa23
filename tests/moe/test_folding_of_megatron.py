"""The groups of experts that are divided apart from dense layers, against megatron-core's."""

import random

import pytest

from megatron_ds.mpu.grid import DEFAULT_ORDER, Grid
from tests.harness import megatron_core

pytestmark = [
    pytest.mark.processes,
    pytest.mark.rest,
    pytest.mark.skipif(
        bool(megatron_core.skip_reason()), reason=megatron_core.skip_reason()
    ),
]
GRIDS = 5000
# Of ours, the names of Megatron's groups.
NAMES = {"etp": "tp", "ep": "ep", "edp": "dp", "pp": "pp"}


def random_grid(draw: random.Random) -> Grid:
    sizes = {axis: draw.choice([1, 2, 3, 4]) for axis in ("tp", "cp", "dp", "pp")}
    places = sizes["tp"] * sizes["cp"] * sizes["dp"]
    etp = draw.choice([n for n in range(1, places + 1) if places % n == 0])
    rest = places // etp
    ep = draw.choice([n for n in range(1, rest + 1) if rest % n == 0])
    return Grid(**sizes, ep=ep, etp=etp)


def test_groups_are_those_of_megatron_core():
    """In each grid the groups of experts over every axis, and over two."""
    from megatron.core.parallel_state import RankGenerator

    draw = random.Random(5)
    compared = 0
    for _ in range(GRIDS):
        grid = random_grid(draw)
        theirs = RankGenerator(
            tp=grid.etp,
            ep=grid.ep,
            dp=grid.edp,
            pp=grid.pp,
            cp=1,
            order=DEFAULT_ORDER,
        )
        for axes in (("etp",), ("ep",), ("edp",), ("pp",), ("etp", "ep")):
            token = "-".join(NAMES[axis] for axis in axes)
            expected = sorted(tuple(sorted(ranks)) for ranks in theirs.get_ranks(token))
            assert grid.groups(*axes) == expected, (grid, axes)
            compared += len(expected)
    assert compared > 10 * GRIDS
