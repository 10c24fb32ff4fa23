"""Kernels for numbers in 8 and 4 bits: the bits of torch's operations; these against the formulas."""

import pytest
import torch

from megatron_ds.extensions.kernels.gpu import quantize_kernels as kernels
from megatron_ds.ops import quantize as ops
from megatron_ds.ops.kernel_table import FLOATS
from tests.harness.emulated import SEEDS, compile_together, emulated_gpu

SIZES = [
    (1, 2),
    (7, 64),
    (333, 70),
    (2056, 1032),
    (1000, 256),
    (0, 64),
]  # numbers, block


def randn(n, dtype):
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    return (x * torch.logspace(-3, 3, n)).to(dtype)


def same_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def there_and_back(module, x, bits, block):
    of = (lambda f: f.in_torch) if module is ops else (lambda f: f)
    codes, scales = of(module.quantize)(x, bits, block)
    return (
        codes,
        scales,
        of(module.dequantize)(scales, codes, x.numel(), bits, block, x.dtype),
    )


def strided():
    """At an odd address; not contiguous."""
    base = randn(2 * 334, torch.bfloat16)
    return base[1 : 1 + 320], base.view(2, 334)[:, ::2]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All instantiations that the tests launch in one call of g++."""

    def run():
        for dtype in FLOATS:
            for n, block in SIZES:
                for bits in (8, 4):
                    there_and_back(kernels, randn(n, dtype), bits, block)
        for x in strided():
            for bits in (8, 4):
                there_and_back(kernels, x, bits, 64)

    compile_together(run)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n, block", SIZES)
def test_integers_have_the_bits_of_torchs(n, block, dtype, bits):
    x = randn(n, dtype)
    for seed in SEEDS:
        with emulated_gpu(seed):
            got = there_and_back(kernels, x, bits, block)
        assert all(map(same_bits, got, there_and_back(ops, x, bits, block)))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("n, block", SIZES)
def test_what_comes_back_is_off_by_half_a_step_at_most(n, block, bits):
    """And by three roundings of fp32, of the code's quotient, the scale and the product."""
    x, most = randn(n, torch.float32), 2 ** (bits - 1) - 1
    codes, scales, y = there_and_back(ops, x, bits, block)
    assert len(codes) == -(-n * bits // 8) and len(scales) == -(-n // block)
    for part, back, scale in zip(x.split(block), y.split(block), scales):
        torch.testing.assert_close(scale * most, part.abs().max(), rtol=2**-22, atol=0)
        assert ((back - part).abs() <= scale * (0.5 + most * 2**-22)).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_of_zeros_tiny_infinite_and_undefined_numbers(bits):
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    x[0] = 0
    x[1] = 1e-45
    x[2] *= 1e-43
    x[3, 63], x[4, 5] = -float("inf"), float("nan")
    with emulated_gpu():
        codes, scales, y = there_and_back(kernels, x, bits, 64)
    assert all(map(same_bits, (codes, scales), there_and_back(ops, x, bits, 64)))
    assert scales.isnan().tolist() == [False, False, False, True, True, False]
    y = y.view(6, 64)
    assert (
        not y[:2].any()
        and y[3:5].isnan().all()
        and y[5].isfinite().all()
        and not codes[:32].any()
    )


@pytest.mark.parametrize("bits", [8, 4])
def test_other_strides_and_addresses_are_taken(bits):
    for x in strided():
        codes, scales, y = there_and_back(ops, x, bits, 64)
        moved = torch.cat((codes[:1], codes))[1:]
        with emulated_gpu():
            assert all(map(same_bits, kernels.quantize(x, bits, 64), (codes, scales)))
            assert same_bits(
                kernels.dequantize(scales, moved, x.numel(), bits, 64, x.dtype), y
            )


def test_tensors_without_memory_and_too_many_numbers():
    x = torch.empty(3, 70, dtype=torch.bfloat16, device="meta")
    codes, scales = ops.quantize(x, 4, 64)
    assert codes.shape == (105,) and scales.shape == (4,)
    assert ops.dequantize(scales, codes, 210, 4, 64, torch.float16).shape == (210,)
    many = torch.empty(2**31, dtype=torch.bfloat16, device="meta")
    assert "numbers" in kernels.fits_numbers(many) and "numbers" in kernels.fits_codes(
        x, many
    )
