"""Compiled rotary positions against torch's operations, to the bit: parts of a head, groups, both arrangements."""

import pytest
import torch

from megatron_ds.extensions.kernels.cpu import compiled_rotary as module
from megatron_ds.host.fake_cpu import FakeCpu
from megatron_ds.ops.kernel_table import selected
from megatron_ds.ops.rotary import (
    apply_rotary,
    rotary_channels,
    rotary_tables,
    split_rotary,
)

pytestmark = [
    pytest.mark.plan,
    pytest.mark.skipif(not module.extension(), reason="the extension is not built"),
]
dtypes = pytest.mark.parametrize("dtype", module.DTYPES)
arrangements = pytest.mark.parametrize("interleaved", [False, True])
shapes = pytest.mark.parametrize(
    "shape, percent",
    [((5, 2, 3, 4, 16), 0.75), ((33, 1, 4, 3, 64), 1), ((7, 3, 1, 6, 10), 0.6)],
)


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tables(positions, channels, samples):
    """Of each sample its own positions, if there are several."""
    here = torch.arange(3, 3 + positions)
    each = torch.stack([here + 5 * k for k in range(samples)]) if samples > 1 else here
    return rotary_tables(each, channels)


def turned(function, x, cos, sin, interleaved, mode="auto"):
    """Results and the gradient of x, by compiled code or by torch."""
    x = x.detach().clone().requires_grad_()
    with selected(mode):
        results = function(x, cos, sin, interleaved)
    results = results if isinstance(results, tuple) else (results,)
    gradients = [draw(*y.shape, dtype=y.dtype, seed=9) for y in results]
    return [y.detach() for y in results], torch.autograd.grad(results, x, gradients)[0]


def assert_bits_of_torch(function, x, cos, sin, interleaved):
    ours, dx = turned(function, x, cos, sin, interleaved)
    theirs, expected = turned(function, x, cos, sin, interleaved, "torch")
    assert all(map(torch.equal, ours, theirs)) and torch.equal(dx, expected)
    assert all(y.is_contiguous() for y in ours)


@dtypes
@arrangements
@shapes
def test_bits_are_those_of_torch(shape, percent, interleaved, dtype):
    qkv = draw(*shape, dtype=dtype)
    angles = tables(shape[0], rotary_channels(shape[-1], percent), shape[1])
    assert_bits_of_torch(split_rotary, qkv, *angles, interleaved)
    heads = qkv[:, :, 0]  # strided
    assert_bits_of_torch(apply_rotary, heads, *angles, interleaved)
    assert_bits_of_torch(
        apply_rotary, heads.transpose(2, 3).contiguous().mT, *angles, interleaved
    )
    apart = qkv.transpose(2, 3).contiguous().transpose(2, 3)
    assert_bits_of_torch(split_rotary, apart, *angles, interleaved)


def test_compiled_code_runs_and_takes_heads_that_it_has_room_for(monkeypatch):
    made = []
    monkeypatch.setattr(module, "_move", lambda *_: made.append(True))
    angles = tables(2, 8, 1)
    split_rotary(draw(2, 1, 1, 3, 8), *angles)
    most = module.extension().MOST_CHANNELS
    apply_rotary(draw(2, 1, 1, most), *angles)
    assert len(made) == 2
    apply_rotary(draw(2, 1, 1, most + 8), *angles)
    apply_rotary(draw(2, 1, 1, 8).double(), *angles)
    assert len(made) == 2


def test_bits_do_not_depend_on_threads(monkeypatch):
    qkv, angles = draw(300, 3, 4, 3, 64), tables(300, 64, 3)
    alone = turned(split_rotary, qkv, *angles, False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    shared = turned(split_rotary, qkv, *angles, False)
    assert all(map(torch.equal, alone[0], shared[0]))
    assert torch.equal(alone[1], shared[1])


def test_a_plan_computes_nothing_and_keeps_nothing_of_the_projection():
    with FakeCpu():
        qkv = torch.empty(4, 2, 3, 4, 16)
        q, k, v = split_rotary(qkv, *tables(4, 16, 1))
        assert (q.shape, k.shape, v.shape) == ((4, 2, 6, 16), *[(4, 2, 3, 16)] * 2)
        assert v.untyped_storage().nbytes() == 4 * v.numel()
