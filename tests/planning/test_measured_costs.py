"""Measured times of layers are the same on all ranks, also where --pipeline-costs-path is given to some only."""

from types import SimpleNamespace

import pytest
import torch

from megatron_ds.config.parse import read
from megatron_ds.planning import layer_costs
from megatron_ds.planning.layer_costs import LayerCost, Times, measured_times
from tests.harness.pretraining import TINY
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads


@pytest.mark.parametrize("with_path", [0, 1])
def test_a_file_that_one_rank_names_is_no_collective_of_that_rank_alone(
    tmp_path, monkeypatch, with_path
):
    times = iter([1.0, 3.0])
    monkeypatch.setattr(
        layer_costs,
        "time_layers",
        lambda config, ctx: {"Block": LayerCost(*[next(times)] * 3)},
    )
    monkeypatch.setattr(layer_costs, "time_transfer", lambda *ignored: 5.0)
    job = [*TINY, "--mock-data", "--pipeline-model-parallel-size", "2"]
    job += ["--pipeline-cut", "measured"]

    def run(rank, world):
        path = ["--pipeline-costs-path", str(tmp_path / "costs.json")]
        config = read([*job, *(path if rank == with_path else [])], world_size=2)
        everyone = world.group("world", range(2), rank)
        mesh = SimpleNamespace(
            device=torch.device("cpu"), group=lambda name: everyone, rank=rank
        )
        return measured_times(config, mesh, None)

    found = run_ranks(2, run)
    expected = Times({"Block": LayerCost(2.0, 2.0, 2.0)}, 5.0, layer_costs.SOURCE)
    assert found == [expected, expected]
    # Rank 0 reads and writes for all.
    assert (tmp_path / "costs.json").exists() == (with_path == 0)
