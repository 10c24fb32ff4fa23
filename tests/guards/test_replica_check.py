"""The comparison of weights over data-parallel ranks, on ranks whose weights are given."""

from types import SimpleNamespace

import pytest
import torch

from megatron_ds.extensions.guards import replica_check
from megatron_ds.mpu.param_spec import DATA_AXES, Init, ParamSpec

pytestmark = pytest.mark.plan


def compared(monkeypatch, arriving: float, other: float) -> None:
    """`check_replicas` of a rank whose weight becomes `arriving`, beside a rank that has `other`."""
    weight = torch.zeros(3)
    weight.spec = ParamSpec("w", (3,), Init("zeros"))
    plan = SimpleNamespace(reduced_over=DATA_AXES, units=())
    optimizer = SimpleNamespace(
        wait_for_weights=lambda: weight.fill_(arriving),
        sets=[SimpleNamespace(plan=plan, parameters=[weight])],
    )
    theirs = replica_check._digest(torch.full((3,), other))
    monkeypatch.setattr(
        replica_check,
        "all_gather_object",
        lambda own, world: [own, (own[0], {"w": theirs})],
    )
    mesh = SimpleNamespace(
        coordinate=lambda axis: 0, group=lambda axes: None, device=torch.device("cpu")
    )
    replica_check.check_replicas(optimizer, mesh, 7)


def test_weights_are_compared_after_the_last_update_has_arrived(monkeypatch):
    compared(monkeypatch, 2.0, 2.0)
    with pytest.raises(
        replica_check.ReplicaError,
        match="after iteration 7 the weight w of rank 1 differs",
    ):
        compared(monkeypatch, 2.0, 0.0)
