"""Softmax kernels against float64, and their dropout against torch's operations."""

import pytest
import torch

from megatron_ds.extensions.kernels.gpu import softmax_kernels
from megatron_ds.ops.dropout import KeepMask, apply_mask, sample_keys
from megatron_ds.ops.kernel_table import OPERATIONS
from megatron_ds.ops.softmax import masked_softmax
from tests.harness.emulated import SEEDS, compile_together, emulated_gpu

CUDA = next(
    entry
    for entry in OPERATIONS["masked_softmax"].implementations
    if entry.name == "cuda"
)
# One rounding of the result, and fp32 sums of up to 16400 numbers.
ROUNDING = {
    torch.float32: 2e-6,
    torch.bfloat16: 2**-8 + 2e-6,
    torch.float16: 2**-11 + 2e-6,
}
SCALE = 0.37
B, N, SQ = 2, 3, 5
# Columns: single numbers and packets; a warp a row in all its sizes; blocks of 256 and 1024 threads.
SIZES = [
    (torch.float32, 3),
    (torch.float32, 40),
    (torch.float32, 1030),
    (torch.float32, 8200),
    (torch.bfloat16, 72),
    (torch.bfloat16, 77),
    (torch.bfloat16, 1000),
    (torch.bfloat16, 2048),
    (torch.bfloat16, 2056),
    (torch.float16, 520),
]
WAYS = [
    (False, None, False),
    (True, None, False),
    (True, "sample", True),
    (False, "head", True),
]
CASES = [(*size, *way) for size in SIZES for way in WAYS] + [
    (torch.bfloat16, 16400, True, "all", False)
]
NAMES = [
    f"{str(dtype)[6:]}-{cols}{'-causal' * causal}-mask by {mask}{'-dropout' * drops}"
    for dtype, cols, causal, mask, drops in CASES
]
MASKS = {
    None: None,
    "all": (1, 1, SQ, -1),
    "sample": (B, 1, SQ, -1),
    "head": (B, N, 1, -1),
}


def inputs(dtype, cols, causal, mask, drops):
    """(scores, gradient of the result, mask, keep)."""
    torch.manual_seed(cols)
    scores, dy = (torch.randn(B, N, SQ, cols).mul(4).to(dtype) for _ in range(2))
    if mask:
        mask = torch.rand(*MASKS[mask][:3], cols) < 0.3
        mask[0, 0, 0] = True  # a query that sees nothing
    keep = KeepMask(
        0.3, sample_keys(1, "here", (4, 9)), range(1, 1 + N), range(6, 6 + SQ), cols
    )
    return scores, dy, mask, keep if drops else None


def compute(scores, dy, mask, keep, causal):
    """(result, gradient of scores, probabilities as they are kept for backward)."""
    scores, kept = scores.detach().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or t, lambda t: t
    ):
        y = CUDA.function(scores, mask, causal, SCALE, keep)
    y.backward(dy)
    return y.detach(), scores.grad, kept[0].detach()


def visible(mask, causal, cols):
    """bool [b, n, sq, sk]."""
    seen = torch.ones(B, N, SQ, cols, dtype=torch.bool)
    if causal:
        seen &= torch.arange(cols) <= torch.arange(SQ)[:, None] + cols - SQ
    return seen if mask is None else seen & ~mask


def check_backward(dx, p, d, dtype):
    """p: the probabilities as they are kept; d: their gradient, with dropout."""
    p, d = p.double(), d.double()
    want = SCALE * p * (d - (d * p).sum(-1, keepdim=True))
    assert (dx.double() - want).abs().max() <= ROUNDING[dtype] * want.abs().max()


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    def run():
        for case in CASES:
            compute(*inputs(*case), case[2])

    compile_together(run)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_softmax_equals_float64(case):
    dtype, cols, causal, _, drops = case
    scores, dy, mask, keep = inputs(*case)
    with emulated_gpu(seed=2) as gpu:
        y, dx, p = compute(scores, dy, mask, keep, causal)
    assert len(gpu.launches) == 2 and y.dtype == dx.dtype == p.dtype == dtype
    seen = visible(mask, causal, cols)
    want = (
        (scores.double() * SCALE)
        .masked_fill(~seen, -torch.inf)
        .softmax(-1)
        .nan_to_num(0.0)
    )
    assert (p.double() - want).abs().max() <= ROUNDING[dtype] * want.max()
    assert not p[~seen].any() and not dx[~seen].any()
    if drops:
        dy = apply_mask(dy, keep.mask, keep.p)
    assert torch.equal(y, apply_mask(p, keep.mask, keep.p) if drops else p)
    check_backward(dx, p, dy, dtype)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case[1] in (40, 77, 1030, 2056)], ids=str
)
def test_every_order_of_threads_gives_the_same_bits(case):
    arguments, results = inputs(*case), []
    for seed in SEEDS:
        with emulated_gpu(seed):
            results.append(compute(*arguments, case[2]))
    assert all(
        torch.equal(a, b)
        for other in results[1:]
        for a, b in zip(results[0], other, strict=True)
    )


def test_more_queries_than_keys():
    """The first queries of causal attention then see nothing."""
    scores, dy, _, _ = inputs(torch.float32, 3, True, None, False)
    with emulated_gpu():
        y, dx, _ = compute(scores, dy, None, None, True)
    assert not y[:, :, :2].any() and not dx[:, :, :2].any()
    assert (y[:, :, 2:].sum(-1) - 1).abs().max() <= 1e-6 and (y[:, :, 2, 0] == 1).all()


def test_strided_and_misaligned_tensors():
    """Single numbers are read instead of packets, so sums are taken in another order."""
    scores, dy, mask, _ = inputs(torch.float32, 40, False, "sample", False)
    strided = torch.stack((scores, scores), 4)[..., 0]
    misaligned = lambda t: torch.cat((t.new_zeros(1), t.flatten()))[1:].view_as(t)
    masks = [
        torch.cat((mask, mask), 3)[..., :40],
        misaligned(mask),
        mask.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    ]
    with emulated_gpu():
        want = compute(scores, dy, mask, None, False)
        for x in (strided, misaligned(scores)):
            for other in masks:
                got = compute(x, misaligned(dy), other, None, False)
                for a, b in zip(got, want, strict=True):
                    assert (a - b).abs().max() <= 2e-6 * b.abs().max()


def test_infinity_and_nan_are_those_of_torch():
    scores, _, _, _ = inputs(torch.float32, 40, False, None, False)
    scores[0, 0, 0, 3], scores[0, 0, 1, 4], scores[0, 1, 2, 5:] = (
        torch.nan,
        torch.inf,
        -torch.inf,
    )
    with emulated_gpu():
        y = CUDA.function(scores)
    want = scores.softmax(-1)
    assert torch.equal(y.isnan(), want.isnan()) and want.isnan().sum() == 80
    assert torch.equal(y == 0, want == 0)


@pytest.mark.parametrize("shape", [(0, 3, 5, 40), (2, 3, 0, 40)])
def test_no_rows(shape):
    scores = torch.empty(shape, requires_grad=True)
    with emulated_gpu() as gpu:
        y = CUDA.function(scores)
        y.sum().backward()
    assert y.shape == scores.grad.shape == shape and not gpu.launches


def test_dropout_of_some_tokens_of_a_sequence():
    """The columns of the table that are picked are no neighbours: dropout is then an operation of its own."""
    scores, _, mask, _ = inputs(torch.float32, 40, True, "sample", False)
    picked = torch.stack([torch.arange(1, 81, 2)[:40], torch.arange(40)])
    square = torch.randn(B, N, 40, 40)
    keep = KeepMask(
        0.3, sample_keys(1, "here", (4, 9)), range(N), range(90), 90, picked
    )
    with emulated_gpu():
        y = CUDA.function(square, None, True, SCALE, keep)
        p = CUDA.function(square, None, True, SCALE)
    assert torch.equal(y, apply_mask(p, keep.mask, keep.p))


def test_limits_are_named():
    scores, _, mask, _ = inputs(torch.float32, 40, False, "sample", False)
    fits = softmax_kernels.fits
    assert (
        fits(scores, None, False)
        == fits(scores, mask, True)
        == fits(scores[..., :1], None, True)
        == ""
    )
    assert "shape [2, 40]" in fits(scores[:, 0, 0], None, False)
    assert "65536 samples and heads" in fits(
        torch.empty(65536, 1, 1, 8, device="meta"), None, False
    )
    assert "too long" in fits(torch.empty(1, 1, 1, 16385), None, True)
    assert fits(torch.empty(1, 1, 1, 32768), None, False) == ""
    assert "too long" in fits(torch.empty(1, 1, 1, 32769), None, False)
    for wrong in (
        mask[..., :1],
        mask.float(),
        mask.transpose(0, 3).contiguous().transpose(0, 3),
    ):
        assert "a mask that is not" in fits(scores, wrong, False)


def test_plans_count_what_backward_keeps():
    """The result, or with dropout one more tensor of its size."""
    scores = torch.empty(
        B, N, SQ, 40, device="meta", dtype=torch.bfloat16, requires_grad=True
    )
    keep = KeepMask(
        0.3, sample_keys(1, "here", (4, 9)), range(N), range(SQ), 40, device="meta"
    )
    for dropout in (None, keep):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.append(t) or t, lambda t: t
        ):
            y = masked_softmax(scores, None, True, SCALE, dropout)
        assert [list(t.shape) for t in kept] == [[B, N, SQ, 40]] + [[B * N]] * (
            dropout is not None
        )
        assert (kept[0] is y or dropout is not None) and y.dtype == torch.bfloat16
        y.backward(torch.empty_like(y))
