"""A parameter split over two mesh axes, stacked experts over "ep" and "tp", is trained, saved and loaded on
any grid."""

import pytest
import torch

from megatron_ds.checkpoint.load import load
from megatron_ds.checkpoint.pieces import views, written_here
from megatron_ds.checkpoint.save import save
from megatron_ds.checkpoint.whole_tensors import TensorStream
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.mpu.param_spec import Init, ParamSpec, Split
from megatron_ds.mpu.parameter_piece import ParameterPiece
from tests.harness.shards import cut
from tests.harness.threads import run_ranks
from tests.zero.test_zero_sharing import contribute, gradient, optimizer_of

pytestmark = pytest.mark.threads

STACKED = ParamSpec(
    "experts.gated",
    (4, 12, 5),
    Init("zeros"),
    (Split("ep", 0), Split("tp", 1, parts=2)),
)
PADDED = ParamSpec(
    "experts.padded",
    (3, 5, 7),
    Init("zeros"),
    (Split("tp", 2, padded=8), Split("ep", 0, padded=4)),
)
DENSE = ParamSpec("dense", (6, 5), Init("zeros"), (Split("tp", 0),))
BIAS = ParamSpec("bias", (67,), Init("zeros"))
SPECS = (STACKED, PADDED, DENSE, BIAS)
GRIDS = [
    Grid(),
    Grid(tp=2),
    Grid(dp=2, ep=2),
    Grid(tp=2, dp=2, ep=2),
    Grid(dp=4, ep=2),
    Grid(tp=2, dp=4, ep=2),
    Grid(tp=2, dp=2, cp=2, ep=2),
]


def logical(spec):
    return torch.arange(1.0, spec.numel + 1).view(spec.shape)


def shard_of(spec, mesh):
    """This rank's shard of the logical values, as a parameter with its spec."""
    p = torch.nn.Parameter(cut(logical(spec), spec, mesh.coordinates))
    p.spec = spec
    return p


def pieces_of(mesh):
    """What a rank holds: replicas are counted over the axes of the gradient's sum."""
    groups = {spec: mesh.group(*spec.reduced_over) for spec in SPECS}
    return [
        ParameterPiece(
            spec,
            shard_of(spec, mesh).detach().flatten(),
            replica=groups[spec].rank,
            replicas=groups[spec].size,
        )
        for spec in SPECS
    ]


def on_grid(grid, main):
    return run_ranks(
        grid.world_size, lambda rank, world: main(Mesh(grid, rank, world.connect))
    )


@pytest.mark.parametrize("there", GRIDS, ids=str)
def test_what_is_saved_on_one_grid_loads_on_every_other_bit_for_bit(there, tmp_path):
    on_grid(
        there,
        lambda mesh: save(
            tmp_path,
            3,
            pieces_of(mesh),
            coordinates=mesh.coordinates,
            run={},
            world=mesh.group("world"),
        ),
    )

    def main(mesh):
        right, pieces = pieces_of(mesh), pieces_of(mesh)
        for piece in pieces:
            piece.tensor.fill_(torch.nan)
        load(
            tmp_path, 3, pieces, coordinates=mesh.coordinates, world=mesh.group("world")
        )
        return all(torch.equal(a.tensor, b.tensor) for a, b in zip(pieces, right))

    for here in (
        GRIDS if there == Grid() else (Grid(), Grid(tp=2, dp=2, ep=2), Grid(dp=2, ep=2))
    ):
        assert all(on_grid(here, main)), here


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_each_element_is_written_once_and_whole_tensors_reach_rank_0(grid):
    def main(mesh):
        pieces = pieces_of(mesh)
        stream = TensorStream(
            pieces, coordinates=mesh.coordinates, world=mesh.group("world")
        )
        written = {
            p.spec: sum(view.tensor.numel() for view in views(p, mesh.coordinates))
            for p in written_here(pieces, mesh.coordinates)
        }
        return written, list(stream)

    results = on_grid(grid, main)
    for spec, whole in zip(SPECS, results[0][1]):
        assert torch.equal(whole, logical(spec))
        assert sum(written.get(spec, 0) for written, _ in results) == spec.numel


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_summed_over_the_expert_data_ranks_and_counted_once_in_the_norm(
    stage,
):
    def main(mesh):
        stacked, dense = shard_of(STACKED, mesh), shard_of(DENSE, mesh)
        optimizer = optimizer_of(
            [stacked, dense],
            stage,
            data=mesh.group("dp", "cp"),
            expert=mesh.group("edp"),
            tp=mesh.group("tp"),
            model=mesh.group("tp"),
        )
        optimizer.begin_step()
        optimizer.arm()
        for p, seed in (
            (stacked, 10 + mesh.coordinate("edp")),
            (dense, mesh.coordinate("dp")),
        ):
            contribute(p, cut(gradient(p.spec.shape, seed), p.spec, mesh.coordinates))
        norm = optimizer.step(1.0, 0.0).grad_norm
        weights = [piece for piece in optimizer.pieces() if piece.kind == "weight"]
        return norm, list(
            TensorStream(
                weights, coordinates=mesh.coordinates, world=mesh.group("world")
            )
        )

    sums = {
        STACKED: sum(gradient(STACKED.shape, 10 + i) for i in range(2)),
        DENSE: sum(gradient(DENSE.shape, i) for i in range(4)),
    }
    results = on_grid(Grid(tp=2, dp=4, ep=2), main)
    for norm, _ in results:
        assert norm == pytest.approx(
            torch.cat([g.flatten() for g in sums.values()]).norm().item(), rel=1e-6
        )
    for (spec, total), found in zip(
        sums.items(), sorted(results[0][1], key=torch.Tensor.dim, reverse=True)
    ):
        torch.testing.assert_close(found, logical(spec) - total)
