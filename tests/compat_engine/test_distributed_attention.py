"""`deepspeed.sequence.layer.DistributedAttention`: two ranks with half of the tokens equal one with all."""

import pytest
import torch
from megatron_ds.sequence.layer import DistributedAttention
from torch.nn.functional import scaled_dot_product_attention

from megatron_ds.errors import ConfigError
from tests.harness.processes import run_processes

pytestmark = pytest.mark.processes


def attend(q, k, v, positions_first):
    """[s, b, n, d] or [b, s, n, d]"""
    order = (1, 2, 0, 3) if positions_first else (0, 2, 1, 3)
    back = (2, 0, 1, 3) if positions_first else (0, 2, 1, 3)
    heads = [t.permute(order) for t in (q, k, v)]  # [b, n, s, d]
    return scaled_dot_product_attention(*heads, is_causal=True).permute(back)


def of_a_rank(rank, world, positions_first):
    tensors = [
        torch.randn(6, 6, 4, 5, generator=torch.Generator().manual_seed(i))
        for i in range(4)
    ]
    dim = 0 if positions_first else 1
    q, k, v, weight = (t.chunk(2, dim)[rank].clone().requires_grad_() for t in tensors)
    layer = DistributedAttention(
        lambda *qkv: attend(*qkv, positions_first), None, gather_idx=dim
    )
    out = layer(q, k, v, 1 - dim)
    gradients = torch.autograd.grad((out * weight).sum(), (q, k, v))
    with pytest.raises(ConfigError, match="3 heads are not divisible by the 2 ranks"):
        layer(q[:, :, :3], k[:, :, :3], v[:, :, :3], 1 - dim)
    return [out.detach(), *gradients]


@pytest.mark.quick
@pytest.mark.parametrize("positions_first", [True, False])
def test_two_ranks_equal_one(positions_first):
    tensors = [
        torch.randn(6, 6, 4, 5, generator=torch.Generator().manual_seed(i))
        for i in range(4)
    ]
    q, k, v, weight = (t.requires_grad_() for t in tensors)
    out = attend(q, k, v, positions_first)
    expected = [out.detach(), *torch.autograd.grad((out * weight).sum(), (q, k, v))]
    found = run_processes(2, of_a_rank, positions_first)
    for parts, whole in zip(zip(*found), expected):
        torch.testing.assert_close(torch.cat(parts, 0 if positions_first else 1), whole)
