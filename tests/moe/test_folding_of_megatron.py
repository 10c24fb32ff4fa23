"""Experts apart from the tensor-parallel ranks, against megatron-core: its groups, and a step of its model."""

import random
from functools import partial

import pytest
import torch

from megatron_ds.compat.conversion.formats import Wishes
from megatron_ds.compat.conversion.megatron import torch_dist_format
from megatron_ds.mpu.grid import DEFAULT_ORDER, Grid
from tests.harness import megatron_core
from tests.harness.megatron_core import (
    EPS,
    LR,
    MOE,
    ROWS,
    SEQUENCE,
    STEPS,
    MegatronCore,
    logical_weights,
    mean_loss,
)
from tests.harness.next_step import difference, next_step

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
    """In each grid the groups of experts over every axis, and over several."""
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


def logical(ranks: list[dict]) -> dict[str, torch.Tensor]:
    """Weights as one process would hold them: each tensor-parallel rank has other experts, whole."""
    mark = ".local_experts."
    found = logical_weights(
        [
            {"weights": {k: v for k, v in rank["weights"].items() if mark not in k}}
            for rank in ranks
        ],
        MOE,
    )
    stacked: dict[str, list[torch.Tensor]] = {}
    for rank in ranks:
        for name, value in rank["weights"].items():
            layer, is_expert, rest = name.partition(mark)
            if is_expert:
                leaf = rest.partition(".")[2]
                stacked.setdefault(f"{layer}.{leaf}", []).append(value)
    return found | {name: torch.stack(values) for name, values in stacked.items()}


@pytest.fixture(scope="module")
def folded(tmp_path_factory):
    """(server, folder of its checkpoint, its ranks): two tensor-parallel ranks with two whole experts each."""
    core = MegatronCore(tmp_path_factory.mktemp("megatron_core"))
    folder = core.folder / "folded" / "torch_dist"
    model = {**MOE, "sequence_parallel": True}
    ranks = core.run(
        "folded", model, tp=2, ep=2, etp=1, saves=[["torch_dist", str(folder), None]]
    )
    yield core, folder, ranks
    core.close()


@pytest.mark.parametrize(
    "layout", ["tp=2,sp=1,ep=2,etp=1", "tp=2,sp=1", "tp=2,sp=1,dp=2,ep=4,etp=1,zero=1"]
)
def test_the_next_step_is_that_of_megatron_core(layout, folded):
    core, folder, ranks = folded
    found = torch_dist_format.read(folder, Wishes(vocab_size=ROWS))
    options = dict(seq_length=SEQUENCE, lr=LR, min_lr=LR, adam_eps=EPS)
    step = partial(next_step, weight_decay=0.1, adam_beta2=0.95, vocab_size=ROWS)
    trace, weights = step(found, core.batches[STEPS], layout, **options)
    assert abs(trace.losses[0] - mean_loss(ranks)) < 1e-5
    assert difference(weights, logical(ranks)) < 1e-5
