"""Tensors without values, beside tensors of a CPU: shapes, dtypes, strides, views and gradients are alike."""

import pytest
import torch
import torch.nn.functional as F

from megatron_ds.host.fake_cpu import FakeCpu, FakeCpuTensor

pytestmark = pytest.mark.plan

OPERATIONS = {
    "sum of a view": lambda x: (x + x.t()).sum(0, keepdim=True),
    "mixed dtypes": lambda x: x.bfloat16() * torch.ones(4, dtype=torch.float64),
    "product": lambda x: x @ x.new_empty(4, 6).t().contiguous().t(),
    "rows": lambda x: x[torch.tensor([0, 2])].transpose(0, 1),
    "parts": lambda x: torch.cat(x.split(2))[::2],
    "norm": lambda x: F.layer_norm(x, (4,), torch.ones(4)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 4, 4)] * 3),
    "loss": lambda x: F.cross_entropy(x, torch.arange(4)),
    "in place": lambda x: torch.zeros(4, 4).copy_(x).mul_(2),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_are_those_of_a_cpu_without_values(name):
    of_cpu = OPERATIONS[name](torch.randn(4, 4))
    with FakeCpu():
        fake = OPERATIONS[name](torch.randn(4, 4))
    assert type(fake) is FakeCpuTensor and fake.device.type == "cpu"
    for of in (torch.Tensor.size, torch.Tensor.stride, lambda t: t.dtype):
        assert of(fake) == of(of_cpu)


def test_views_share_storage_and_operations_in_place_return_their_tensor():
    with FakeCpu():
        x = torch.empty(4, 4)
        assert x.view(16)[3:].untyped_storage()._cdata == x.untyped_storage()._cdata
        assert (x + 1).untyped_storage()._cdata != x.untyped_storage()._cdata
        assert x.add_(1) is x
        assert x.untyped_storage().nbytes() == 64


def test_backward_gives_gradients_without_values():
    with FakeCpu():
        layer = torch.nn.Linear(8, 3)
        layer(torch.empty(5, 8)).relu().sum().backward()
    assert type(layer.weight.grad) is FakeCpuTensor
    assert layer.weight.grad.shape == (3, 8) and layer.bias.grad.shape == (3,)


@pytest.mark.parametrize(
    "read",
    [
        torch.Tensor.item,
        torch.Tensor.data_ptr,
        torch.Tensor.nonzero,
        lambda x: torch.zeros_like(x, device="cpu").numpy(),
    ],
)
def test_values_cannot_be_read(read):
    with FakeCpu():
        x = torch.ones(1)
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(x)


def test_a_tensor_with_values_is_not_written_to():
    real = torch.zeros(4)
    with FakeCpu(), pytest.raises(RuntimeError, match="tensor with values"):
        real.add_(torch.ones(4))
    assert not real.any()
