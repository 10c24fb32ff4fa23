"""NCCL: the collectives give what they give over gloo."""

import pytest
import torch

from tests.harness.processes import run_processes

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason=f"needs 2 GPUs, there are {torch.cuda.device_count()}",
)


def collectives():
    from megatron_ds.mpu import collectives as c
    from megatron_ds.mpu.group import Group
    from megatron_ds.mpu.transport import TorchTransport

    rank = torch.distributed.get_rank()
    torch.cuda.set_device(rank)
    process_group = torch.distributed.new_group([0, 1], backend="nccl")
    group = Group("dp", (0, 1), rank, TorchTransport(process_group))
    x = torch.arange(8.0, device="cuda") + rank
    total, half, both = (
        x.clone(),
        torch.empty(4, device="cuda"),
        torch.empty(16, device="cuda"),
    )
    c.all_reduce_(total, group)
    c.reduce_scatter_into_(half, x, group)
    c.all_gather_into_(both, x, group)
    return [t.cpu() for t in (total, half, both)]


def test_nccl_reduces_scatters_and_gathers():
    whole = torch.arange(8.0)
    for rank, (total, half, both) in enumerate(run_processes(2, collectives)):
        assert torch.equal(total, 2 * whole + 1)
        assert torch.equal(half, (2 * whole + 1)[4 * rank : 4 * rank + 4])
        assert torch.equal(both, torch.cat([whole, whole + 1]))
