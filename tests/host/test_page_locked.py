"""Page-locked memory on a GPU that does not exist: blocks of the size that was asked for, and those of plans."""

from unittest.mock import patch

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.errors import MegatronDSError
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.host.page_locked import PageLockedPool, page_locked
from megatron_ds.host.side_streams import Mark
from tests.harness.fake_cuda import FakeGpu, FakeRuntime, fake_cuda
from tests.harness.layout_comparison import parse_layout
from tests.harness.tiny_jobs import tiny_job
from tests.kernels.test_gpu_steps import BATCH, LAYERS, STEPS, train

pytestmark = pytest.mark.threads


def test_a_block_has_the_size_that_was_asked_for_where_torchs_is_a_power_of_two():
    with fake_cuda(), FakeGpu() as gpu:
        ours = page_locked(5001, torch.float32)
        theirs = torch.empty(5001, pin_memory=True)
        assert [block.taken for block in gpu.page_locked] == [4 * 5001, 1 << 15]
        assert ours.is_pinned() and theirs.is_pinned() and not ours.any()
        assert not page_locked(0, torch.bfloat16).numel()
        address = ours.data_ptr()
        assert address % 4096 == 0 and address in gpu._registered
        view = ours[3:5]
        del ours
        assert address in gpu._registered
        del view
        assert address not in gpu._registered


def test_a_refusal_of_the_driver_is_an_error_with_the_size():
    def refuse(address, nbytes, flags):
        return "cudaErrorMemoryAllocation"

    with fake_cuda(), FakeGpu() as gpu, patch.object(gpu, "register", refuse):
        with pytest.raises(MegatronDSError, match=r"lock 0\.50 GiB .*ulimit -l"):
            page_locked(1 << 27, torch.float32)
    assert FakeRuntime.cudaError.success


def test_a_pool_has_as_many_buffers_as_were_lent_at_a_time():
    with fake_cuda(), FakeGpu() as gpu:
        pool = PageLockedPool()
        first, second = (pool.borrow(64)[0] for _ in range(2))
        pool.give(first, Mark())
        pool.give(second, Mark())
        assert pool.borrow(64)[0] is first and pool.borrow(128)[0] is not second
        assert pool.borrow(64)[0] is second
    assert [block.nbytes for block in gpu.page_locked] == [64, 64, 128]


@pytest.mark.parametrize(
    "layout", ["zero=1,offload=cpu", "zero=3,dp=2,offload=cpu,offload_param=cpu"]
)
def test_offloaded_state_takes_the_page_locked_memory_that_the_plan_has(layout):
    run = train(layout, "cuda", "bf16")
    request = parse_layout(layout, mbs="1")
    job = tiny_job("gpt2", "bf16", False, 0.0, LAYERS, BATCH, STEPS)
    config = parse([*job, *request.flags], world_size=request.world_size)
    planned = [
        plan_world(config, 0, "cuda").rank_plan(rank).away["cpu"]
        for rank in range(request.world_size)
    ]
    assert run.page_locked("(arrays)") == planned
