"""NCCL with a world of one, which needs one GPU: every collective of the package runs, in each dtype and in
place, and the group is destroyed; messages arrive."""

import pytest
import torch

from tests.harness.processes import run_processes

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a GPU: torch.cuda.is_available() is False",
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


def collectives() -> list[str]:
    """Names of what gave another result than expected."""
    from megatron_ds.mpu.transport import TorchTransport

    torch.cuda.set_device(0)
    process_group = torch.distributed.new_group([0], backend="nccl")
    transport = TorchTransport(process_group, "dp")
    wrong = []
    for dtype in DTYPES:
        x = torch.arange(8, device="cuda").to(dtype)
        for name, result in _results(transport, x).items():
            if not torch.equal(result, x):
                wrong.append(f"{name} of {dtype}")
    torch.cuda.synchronize()
    torch.distributed.destroy_process_group(process_group)
    return wrong


def _results(transport, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What each collective makes of the tensor of the only rank: the same tensor."""
    made = {}

    # reductions, of a copy and in place
    total = made["all-reduce"] = x.clone()
    transport.all_reduce(total, "sum").wait()
    largest = made["maximum"] = x.clone()
    transport.all_reduce(largest, "max").wait()
    part = made["reduce-scatter"] = torch.empty_like(x)
    transport.reduce_scatter(part, x, "sum").wait()
    same = made["reduce-scatter in place"] = x.clone()
    transport.reduce_scatter(same, same, "sum").wait()

    # gathers
    whole = made["all-gather"] = torch.empty_like(x)
    transport.all_gather(whole, x).wait()
    same = made["all-gather in place"] = x.clone()
    transport.all_gather(same, same).wait()

    # pieces
    swapped = made["all-to-all"] = torch.empty_like(x)
    transport.all_to_all(swapped, x).wait()
    swapped = made["all-to-all of rows"] = torch.empty_like(x)
    transport.all_to_all(swapped, x, [8], [8]).wait()
    spread = made["broadcast"] = x.clone()
    transport.broadcast(spread, 0).wait()
    return made


def exchange() -> bool:
    """Whether a message to itself arrives."""
    from megatron_ds.mpu.transport import TorchTransport

    torch.cuda.set_device(0)
    process_group = torch.distributed.new_group([0], backend="nccl")
    transport = TorchTransport(process_group, "pp")
    x = torch.arange(8.0, device="cuda")
    received = torch.empty_like(x)
    transport.exchange([(x, 0)], [(received, 0)]).wait()
    return torch.equal(x, received)


def test_nccl_runs_alone():
    assert run_processes(1, collectives) == [[]]


def test_a_message_of_nccl_arrives_at_its_own_sender():
    assert run_processes(1, exchange) == [True]
