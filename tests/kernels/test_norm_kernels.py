"""LayerNorm and RMSNorm kernels, with and without a residual, against float64."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megatron_ds.extensions.kernels.gpu import norm_kernels
from megatron_ds.extensions.kernels.gpu.packets import lanes
from tests.harness.emulated import SEEDS, compile_together, emulated_gpu

# One rounding of the result in 16 bits, and fp32 sums of up to 32768 products.
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
IN_FP32 = 2e-6
EPS = 1e-5
# Columns: one packet; a warp with an odd packet; several warps; backward looped; forward looped, too.
SIZES = [
    (torch.float32, 4),
    (torch.float32, 132),
    (torch.float32, 1032),
    (torch.bfloat16, 264),
    (torch.bfloat16, 1000),
    (torch.bfloat16, 16392),
    (torch.float16, 1000),
    (torch.float32, 33000),
]
KINDS = [(rms, residual) for rms in (True, False) for residual in (True, False)]
CASES = [
    (dtype, cols, *kind)
    for dtype, cols in SIZES
    for kind in KINDS
    if cols in (132, 1032, 1000)
    and dtype != torch.float16
    or kind in ((True, False), (False, True))
]
NAMES = [
    f"{str(dtype)[6:]}-{cols}-{'rms' if rms else 'layer'}{'-residual' * residual}"
    for dtype, cols, rms, residual in CASES
]


def compute(x, residual, weight, bias, grads):
    """[y, sum or None, gradients of x, weight and bias, where there is one]; grads: of y, and of the sum."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    x, weight, *rest = leaves
    bias = rest[0] if rest else None
    if residual is not None:
        y, total = norm_kernels.residual_norm(x, residual, weight, bias, EPS)
        torch.autograd.backward([y, total] if len(grads) > 1 else [y], grads)
    else:
        y = (
            norm_kernels.rms_norm(x, weight, EPS)
            if bias is None
            else norm_kernels.layer_norm(x, weight, bias, EPS)
        )
        total = None
        y.backward(grads[0])
    return [
        y.detach(),
        None if total is None else total.detach(),
        *(t.grad for t in leaves),
    ]


def expected(x, residual, weight, bias, grads):
    """The same in float64; the sum as it is rounded."""
    total = (x if residual is None else x + residual).double().requires_grad_()
    weight = weight.double().requires_grad_()
    leaves = [total, weight]
    if bias is None:
        y = F.rms_norm(total, weight.shape, weight, EPS)
    else:
        leaves.append(bias.double().requires_grad_())
        y = F.layer_norm(total, weight.shape, weight, leaves[2], EPS)
    y.backward(grads[0].double())
    if len(grads) > 1:
        total.grad += grads[1].double()
    return [
        y.detach(),
        None if residual is None else x + residual,
        *(t.grad for t in leaves),
    ]


def inputs(dtype, cols, rms, residual, rows=3):
    torch.manual_seed(cols)
    x, r, dy, past = (torch.randn(rows, cols).to(dtype) for _ in range(4))
    x += 3  # a mean that is not small
    weight, bias = (torch.randn(cols).to(dtype) for _ in range(2))
    return (
        x,
        r if residual else None,
        weight,
        None if rms else bias,
        [dy, past] if residual else [dy],
    )


def check(got, want, dtype):
    tolerance = ROUNDING[dtype] + IN_FP32
    if got[1] is not None:
        assert torch.equal(got[1], want[1])
    for a, b in zip((got[0], *got[2:]), (want[0], *want[2:]), strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        assert (a.double() - b).abs().max() <= tolerance * b.abs().max()


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    compile_together(lambda: [compute(*inputs(*case)) for case in CASES])


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_norms_equal_float64(case):
    arguments = inputs(*case)
    with emulated_gpu(seed=1) as gpu:
        got = compute(*arguments)
    assert len(gpu.launches) == (4 if "looped" in "".join(gpu.launches) else 3)
    check(got, expected(*arguments), case[0])


@pytest.mark.parametrize(
    "case", [case for case in CASES if case[1] in (132, 1032, 16392)], ids=str
)
def test_seeds_and_numbers_of_chunks(case):
    """Every order of threads gives the same bits, and every number of chunks of rows right results."""
    arguments = inputs(*case, rows=7)
    want, results = expected(*arguments), []
    with mock.patch.object(norm_kernels, "chunks_of", lambda threads: 3):
        for seed in SEEDS:
            with emulated_gpu(seed):
                results.append(compute(*arguments))
            check(results[-1], want, case[0])
    for other in results[1:]:
        assert all(
            a is b is None or torch.equal(a, b)
            for a, b in zip(results[0], other, strict=True)
        )


def test_many_rows_share_chunks():
    """More rows than chunks, both of warps and of blocks."""
    for cols, rows in ((4, 3100), (1032, 650)):
        arguments = inputs(torch.float32, cols, False, True, rows=rows)
        assert rows > norm_kernels.chunks_of(
            norm_kernels.rows_of(arguments[0], 16, 512).threads
        )
        with emulated_gpu():
            check(compute(*arguments), expected(*arguments), torch.float32)


def test_gradients_of_one_result_alone():
    """The sum or the norm may be unused."""
    x, residual, weight, bias, (dy, past) = inputs(torch.float32, 132, False, True)
    want = expected(x, residual, weight, bias, [dy])
    with emulated_gpu():
        check(compute(x, residual, weight, bias, [dy]), want, torch.float32)
        x, residual = x.requires_grad_(), residual.requires_grad_()
        _, total = norm_kernels.residual_norm(x, residual, weight, bias, EPS)
        total.backward(past)
    assert torch.equal(x.grad, past) and torch.equal(residual.grad, past)


def test_strided_and_misaligned_tensors():
    x, _, weight, bias, (dy,) = inputs(torch.float32, 132, False, False)
    strided = torch.stack((x, x), dim=2)[:, :, 0]
    misaligned = torch.cat((torch.zeros(1), dy.flatten()))[1:].view_as(dy)
    assert misaligned.data_ptr() % 16
    with emulated_gpu():
        got, want = (
            compute(strided, None, weight, bias, [misaligned]),
            compute(x, None, weight, bias, [dy]),
        )
    assert all(
        torch.equal(a, b) for a, b in zip(got, want, strict=True) if a is not None
    )


@pytest.mark.parametrize("shape", [(0, 132), (2, 0, 132)])
def test_no_rows(shape):
    x = torch.empty(shape, requires_grad=True)
    weight, bias = (torch.ones(132, requires_grad=True) for _ in range(2))
    with emulated_gpu():
        y = norm_kernels.layer_norm(x, weight, bias, EPS)
        y.sum().backward()
    assert y.shape == x.grad.shape == shape
    assert not weight.grad.any() and not bias.grad.any()


def test_infinity_and_nan_stay_in_their_rows():
    x, residual, weight, bias, _ = inputs(torch.float16, 1000, False, True)
    x[0, 5], x[1, 6] = 65504, float("nan")
    residual[0, 5] = 65504  # the sum is infinite, as in torch
    with emulated_gpu():
        y, total = norm_kernels.residual_norm(x, residual, weight, bias, EPS)
    assert total[0, 5].isinf() and torch.equal(total.isnan(), (x + residual).isnan())
    assert y[:2].isnan().all() and y[2].isfinite().all()


def test_tiny_variances_and_large_means():
    """The variance of x + 1000 is that of x: it is taken from differences to the mean."""
    x, _, weight, bias, (dy,) = inputs(torch.float32, 1032, False, False)
    x = (x * 2**-4).round(decimals=2) + 1000  # exact to 2^-14 or so
    with emulated_gpu():
        got = compute(x, None, weight, bias, [dy])
    want = expected(x, None, weight, bias, [dy])
    # The mean is rounded to 2^-14 / 2, which is 5e-4 of the standard deviation 1/16.
    assert (got[0].double() - want[0]).abs().max() <= 1e-3 * want[0].abs().max()


def test_limits_are_named():
    x, weight = torch.ones(2, 132), torch.ones(132)
    assert norm_kernels.fits(x, weight, EPS) == ""
    assert "not a multiple of 16 bytes" in norm_kernels.fits(
        x[:, :130], weight[:130], EPS
    )
    assert "not a multiple of 16 bytes" in norm_kernels.fits(torch.ones(0), weight, EPS)
    assert "torch.bfloat16" in norm_kernels.fits(x, weight.bfloat16(), EPS)
    assert "[64]" in norm_kernels.fits(x, weight[:64], EPS)
    assert "[1, 132]" in norm_kernels.fits(x, x[:1], weight, EPS)
    assert "longer than 65536" in norm_kernels.fits(torch.ones(1, 65540), weight, EPS)


def test_plans_count_what_backward_keeps():
    """On the meta device the wrappers allocate and launch nothing."""
    x, weight, bias = (
        torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for shape in ((2, 3, 264), (264,), (264,))
    )
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or t, lambda t: t
    ):
        y, total = norm_kernels.residual_norm(x, x, weight, bias, EPS)
    assert [list(t.shape) for t in kept] == [[2, 3, 264], [264], [6], [6]]
    assert y.shape == total.shape == x.shape
    torch.autograd.backward([y, total], [torch.empty_like(y), torch.empty_like(y)])
    assert (x.grad.shape, weight.grad.dtype) == (x.shape, torch.bfloat16)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(
    "cols", [8, 128, 520, 1600, 4096, 5120, 12288, 16384, 32768, 65536]
)
def test_rows_in_registers_stay_within_their_limits(dtype, cols):
    x = torch.empty(1, cols, dtype=dtype, device="meta")
    backward = norm_kernels.BACKWARD_NUMBERS[x.element_size(), False]
    for most_numbers, most_threads in (
        (norm_kernels.FORWARD_NUMBERS, 1024),
        (backward, 512),
    ):
        rows = norm_kernels.rows_of(x, most_numbers, most_threads)
        if rows.threads:
            packets = -(-cols // (lanes(x) * rows.threads))
            assert packets * lanes(x) <= most_numbers and rows.threads % 32 == 0
            assert packets * rows.threads * lanes(x) >= cols
        else:
            assert cols > most_numbers * most_threads
