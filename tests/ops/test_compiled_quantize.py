"""Compiled blocks of integers: the bits of torch's operations, whatever the sizes, the numbers and the
threads."""

import pytest
import torch

from megatron_ds.extensions.kernels.cpu import compiled_quantize as compiled
from megatron_ds.ops import quantize as ops

pytestmark = [
    pytest.mark.plan,
    pytest.mark.skipif(not compiled.extension(), reason="the extension is not built"),
]


def numbers(count, dtype):
    x = torch.randn(count, generator=torch.Generator().manual_seed(count))
    return (x * torch.logspace(-4, 4, count)).to(dtype)


def same_bits(a, b):
    """A NaN is a NaN."""
    assert torch.equal(a.isnan(), b.isnan())
    a, b = (t.where(~t.isnan(), 0) for t in (a, b))
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    )


def check(x, bits, block):
    codes, scales = ops.quantize.in_torch(x, bits, block)
    assert all(map(same_bits, compiled.quantize(x, bits, block), (codes, scales)))
    expected = ops.dequantize.in_torch(scales, codes, x.numel(), bits, block, x.dtype)
    assert same_bits(
        compiled.dequantize(scales, codes, x.numel(), bits, block, x.dtype), expected
    )
    out = torch.empty_like(expected)
    ops.dequantize(scales, codes, x.numel(), bits, block, x.dtype, out)
    assert same_bits(out, expected)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", compiled.DTYPES, ids=str)
# Parts of a vector, of a byte, of a block; blocks longer than a piece; several chunks.
@pytest.mark.parametrize(
    "count, block",
    [(0, 64), (1, 2), (7, 64), (333, 70), (2056, 1032), (70_001, 256), (9000, 4098)],
)
def test_bits_are_those_of_torchs_operations(count, block, dtype, bits, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    check(numbers(count, dtype), bits, block)
    check(numbers(2 * count, dtype)[1::2], bits, block)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", compiled.DTYPES, ids=str)
def test_ties_and_numbers_that_are_zero_tiny_infinite_and_undefined(dtype, bits):
    x = numbers(8 * 64, dtype).view(8, 64)
    x[0], x[1], x[2] = 0, 1e-45, torch.linspace(-2e-43, 2e-43, 64)
    x[3, 5], x[4, 6], x[5, 7] = torch.inf, torch.nan, -torch.inf
    x[6] = torch.arange(64) / 2 - 15.5
    x[6, 0] = 2 ** (bits - 1) - 1  # scale 1: halves are ties
    x[7] = torch.finfo(dtype).max
    check(x, bits, 64)


def test_these_operations_choose_it():
    assert (
        ops.quantize.first_choice("cpu", torch.bfloat16)
        == ops.dequantize.first_choice("cpu", torch.float32)
        == "c++"
    )
    assert ops.quantize.first_choice("cpu", torch.float16) == "torch"
    codes, scales = ops.quantize(torch.randn(64), 8, 64)
    assert (
        ops.dequantize(scales, codes, 64, 8, 64, torch.float16).dtype == torch.float16
    )
