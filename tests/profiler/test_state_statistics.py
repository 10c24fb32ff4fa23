"""Statistics of weights and optimizer state: launches on a GPU that does not exist."""

import pytest
import torch

from megatron_ds.extensions.profiler import state_statistics
from tests.harness.fake_cuda import FakeGpu, fake_cuda

pytestmark = pytest.mark.plan


def test_a_sum_of_squares_on_a_gpu_takes_few_launches():
    with fake_cuda(), FakeGpu() as gpu:
        values = torch.full((3 * 2**22 + 5,), 2.0, device="cuda")
        before = len(gpu.order.launches)
        total = state_statistics._squares(values)
        launches = len(gpu.order.launches) - before
        assert total.item() == 4 * values.numel()
    assert launches <= 4 + 3
