"""Rotary kernels against float64, for packed heads and for one tensor, at odd sizes and strides.

Tolerances, in units of the largest result: fp32 2e-7 (two products and a sum, each rounded once), bf16 and
fp16 half a unit in the last place of results that lie just above a power of two, 2^-8 and 2^-11.
"""

import pytest
import torch

from megatron_ds.extensions.kernels.gpu import rotary_kernels
from megatron_ds.ops import rotary
from tests.harness.emulated import SEEDS, compile_together, emulated_gpu

TOLERANCE = {torch.float32: 2e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# s, b, groups, queries of a group, d, percent
CASES = {
    "whole packets": (5, 2, 2, 3, 32, 1.0),
    "a rest": (3, 3, 1, 4, 48, 0.34),
    "half packets": (3, 1, 3, 1, 24, 0.34),
    "single numbers": (7, 2, 2, 2, 15, 0.7),
    "no rotation": (2, 2, 1, 2, 16, 0.0),
    "one row": (1, 1, 1, 1, 64, 0.5),
    "many heads": (2, 1, 40, 1, 64, 1.0),
    "long heads": (2, 1, 1, 1, 520, 0.986),
    "no tokens": (0, 2, 1, 2, 16, 1.0),
}


def randn(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tables(s, b, d, percent, per_sample):
    positions = torch.randint(
        0, 5000, (b, s), generator=torch.Generator().manual_seed(5)
    )
    positions = positions if per_sample else positions[0]
    return rotary.rotary_tables(
        positions, rotary.rotary_channels(d, percent), base=500.0
    )


def expected(qkv, cos, sin):
    """In float64, with autograd's backward."""

    def turned(x):
        half = cos.shape[-1]
        first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
        return torch.cat(
            (first * cos - second * sin, second * cos + first * sin, rest), dim=-1
        )

    wide = qkv.detach().double().requires_grad_()
    q, k, v = wide.split((wide.shape[3] - 2, 1, 1), dim=3)
    return wide, (turned(q.flatten(2, 3)), turned(k.squeeze(3)), v.squeeze(3))


def assert_close(got, want, dtype):
    assert got.shape == want.shape and got.dtype == dtype
    if want.numel():
        assert (got.double() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()


def forward_and_backward(case, dtype, per_sample=False):
    s, b, g, queries, d, percent = case
    qkv = randn(s, b, g, queries + 2, d, dtype=dtype).requires_grad_()
    cos, sin = tables(s, b, d, percent, per_sample)
    parts = rotary_kernels.split_rotary(qkv, cos, sin)
    gradients = [
        randn(*part.shape, dtype=dtype, seed=i + 1) for i, part in enumerate(parts)
    ]
    torch.autograd.backward(parts, gradients)
    return qkv, (cos, sin), parts, gradients


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All instantiations that the tests launch in one call of g++."""

    def run():
        for dtype in TOLERANCE:
            for case in CASES.values():
                if case[0]:
                    forward_and_backward(case, dtype)
            for x in strided(dtype):
                angles = tables(x.shape[0], x.shape[1], x.shape[-1], 0.5, True)
                for t in (x, x.contiguous()):  # the other is like the gradient
                    rotary_kernels.rotary(t, *angles)

    compile_together(run)


def strided(dtype):
    """Slices of a projection, misaligned ones, samples before positions, and heads that lie apart."""
    packed = randn(5, 3, 4, 3, 32, dtype=dtype)
    return [
        packed[:, :, :, 1],
        packed.flatten()[3 : 3 + 5 * 3 * 2 * 16].view(5, 3, 2, 16),
        packed[:, :, 0, :, 5:23],
        packed[:, :, 0].transpose(0, 1),
        packed[:, :, 0, :, ::2],
    ]


@pytest.mark.parametrize(
    "per_sample", [False, True], ids=["one position", "positions a sample"]
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_packed_heads_are_split_and_rotated_as_in_float64(case, dtype, per_sample):
    with emulated_gpu() as gpu:
        qkv, angles, parts, gradients = forward_and_backward(
            CASES[case], dtype, per_sample
        )
    assert len(gpu.launches) == (2 if qkv.numel() else 0)
    wide, results = expected(qkv, *angles)
    torch.autograd.backward(results, [g.double() for g in gradients])
    for got, want in zip((*parts, qkv.grad), (*results, wide.grad), strict=True):
        assert_close(got, want, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gradients_of_any_strides_are_packed(dtype):
    """Attention returns gradients in the memory order of samples and heads; a sum's are expanded."""
    qkv = randn(3, 2, 2, 5, 16, dtype=dtype).requires_grad_()
    angles = tables(3, 2, 16, 0.5, True)
    with emulated_gpu():
        parts = rotary_kernels.split_rotary(qkv, *angles)
        gradients = [
            randn(2, 6, 3, 16, dtype=dtype).permute(2, 0, 1, 3),
            randn(3, 2, 16, 2, dtype=dtype).mT,
            torch.ones((), dtype=dtype).expand(3, 2, 2, 16),
        ]
        torch.autograd.backward(parts, gradients)
    wide, results = expected(qkv, *angles)
    torch.autograd.backward(results, [g.double() for g in gradients])
    assert_close(qkv.grad, wide.grad, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_one_tensor_of_any_strides_is_rotated_and_rotated_back(dtype):
    for x in strided(dtype):
        x = x.detach().requires_grad_()
        cos, sin = tables(x.shape[0], x.shape[1], x.shape[-1], 0.5, True)
        with emulated_gpu(seed=2):
            y = rotary_kernels.rotary(x, cos, sin)
            y.backward(y.detach())  # the transpose is the inverse
        assert_close(y, rotary.reference_rotary(x.double(), cos, sin).double(), dtype)
        assert y.is_contiguous()
        allowed = 3 * TOLERANCE[dtype] * x.abs().max().item()
        torch.testing.assert_close(x.grad, x.detach(), atol=allowed, rtol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_results_depend_neither_on_the_order_of_threads_nor_on_their_number(
    seed, monkeypatch
):
    with emulated_gpu():
        qkv, _, parts, _ = forward_and_backward(CASES["many heads"], torch.bfloat16)
    monkeypatch.setattr(rotary_kernels, "THREADS", 24)
    with emulated_gpu(seed):
        again, _, others, _ = forward_and_backward(CASES["many heads"], torch.bfloat16)
    assert all(
        torch.equal(a, b)
        for a, b in zip((*parts, qkv.grad), (*others, again.grad), strict=True)
    )


def test_tables_that_are_views_are_read_where_they_are():
    x = randn(4, 2, 2, 16, dtype=torch.float32)
    cos, sin = tables(9, 2, 16, 1.0, True)
    shifted = (
        torch.zeros(cos.numel() + 1)[1:].view(cos.shape).copy_(cos)
    )  # not at a multiple of 16 bytes
    for a, b in (
        (cos[5:], sin[5:]),
        (cos[::2][:4], sin[::2][:4]),
        (shifted[:4], sin[:4]),
    ):
        with emulated_gpu():
            y = rotary_kernels.rotary(x, a, b)
        assert_close(y, rotary.reference_rotary(x.double(), a, b).double(), x.dtype)


def test_tensors_without_memory_get_results_and_keep_the_tables_alone():
    kept = []
    qkv = torch.empty(
        5, 2, 4, 3, 16, dtype=torch.bfloat16, device="meta"
    ).requires_grad_()
    cos, sin = (torch.empty(5, 1, 1, 8, device="meta") for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.shape) or t, lambda t: t
    ):
        q, k, v = rotary.split_rotary(qkv, cos, sin)
        y = rotary.apply_rotary(q, cos, sin)
    assert [t.shape[2] for t in (q, k, v, y)] == [4, 4, 4, 4] and q.shape == (
        5,
        2,
        4,
        16,
    )
    assert kept == 4 * [cos.shape]
    torch.autograd.backward((y, k, v), [torch.empty_like(t) for t in (y, k, v)])
    assert qkv.grad.shape == qkv.shape


def test_sizes_beyond_the_limits_are_refused_with_a_reason():
    cos = torch.empty(1, 1, 1, 8)
    assert "1 samples" not in rotary_kernels.fits(torch.empty(1, 1, 2, 520), cos, cos)
    assert "65536 samples" in rotary_kernels.fits(
        torch.empty(1, 65536, 1, 16, device="meta"), cos, cos
    )
    assert "heads of 521" in rotary_kernels.fits(torch.empty(1, 1, 2, 521), cos, cos)
    assert rotary_kernels.fits(torch.empty(1, 1, 2, 520), cos, cos) == ""
    assert "neighbouring" in rotary_kernels.fits(
        torch.empty(1, 1, 2, 520), cos, cos, True
    )
