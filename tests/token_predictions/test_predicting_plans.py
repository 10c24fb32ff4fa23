"""A run that predicts several tokens sends and holds what was planned."""

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.mpu.mesh import Mesh
from tests.harness.layout_comparison import (
    mock_samples,
    parse_layout,
    train_layout,
)
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import tiny_job

pytestmark = [pytest.mark.threads, pytest.mark.one_in(4)]

SIZE, STEPS = 4, 2
DEPTHS = ("--mtp-num-layers", "2")


@pytest.mark.parametrize(
    "unties, layout",
    [
        (True, "pp=2,dp=2,zero=1"),
        (False, "pp=2,tp=2,sp=1"),
        (True, "dp=2,zero=3"),
        (True, "pp=2,schedule=zb-v,recompute=full"),
        (False, "cp=2,tp=2"),
    ],
)
def test_traffic_and_state_are_those_of_the_plan(unties, layout):
    job = tiny_job("llama", "fp32", unties, 0.0, 4, SIZE, 20)
    request = parse_layout(layout, mbs="1")
    config = parse([*job, *DEPTHS, *request.flags], world_size=request.world_size)
    grid = config.grid()
    samples = mock_samples(config, 4 * SIZE, 1)

    def main(rank, world):
        mesh = Mesh(grid, rank, world.connect, torch.device("cpu"))
        replicas = []

        def watch(replica):
            replicas.append(replica)
            mesh.traffic.clear()

        train_layout(config, mesh, STEPS, samples, watch=watch)
        return mesh.traffic, replicas[0]

    ranks = run_ranks(config.world_size, main)
    plan = plan_world(config, 0, "cpu")
    # The embedding and its copy add their gradients once a step.
    ties = sum(("all_reduce", "embd") == key[:2] for key in ranks[0][0].bytes)
    assert bool(ties) == ("pp=2" in layout and "zb-v" not in layout)
    for rank, (traffic, replica) in enumerate(ranks):
        if replica.mesh.coordinate("tp") or replica.mesh.coordinate("cp"):
            continue
        planned = plan.rank_plan(rank)
        wanted = planned.traffic.bytes
        assert dict(traffic.bytes) == {
            key: STEPS * wanted[key] for key in traffic.bytes
        }
        assert planned.state == replica.optimizer.memory()
