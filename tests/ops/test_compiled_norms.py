"""The compiled norms of bf16 rows against float64: any width and number of rows, with and without a residual.
Processors with AVX-512 BF16 have code of their own for widths that are multiples of 32.
"""

import pytest
import torch

from megatron_ds.extensions.kernels.cpu import compiled_norms as compiled
from megatron_ds.ops import norms
from tests.harness.alive_bytes import AliveBytes

pytestmark = [
    pytest.mark.plan,
    pytest.mark.skipif(not compiled.extension(), reason="the extension is not built"),
]

EPS = 1e-5
shapes = pytest.mark.parametrize(
    "rows, width", [(2, 2), (3, 31), (5, 32), (64, 33), (65, 96), (200, 384), (3, 4096)]
)
kinds = pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])


def sample(rows, width, dtype=torch.bfloat16):
    """(x, residual, weight, bias), far from zero on average, and gradients of the norm and of the sum."""
    g = torch.Generator().manual_seed(rows * width)
    draw = lambda *shape: torch.randn(shape, generator=g)
    x, residual = draw(rows, width) + 2, 3 * draw(rows, width)
    tensors = [
        x,
        residual,
        1 + draw(width),
        draw(width),
        draw(rows, width),
        draw(rows, width),
    ]
    return [t.to(dtype) for t in tensors]


def exact(v, weight, bias):
    """In float64."""
    centred = v if bias is None else v - v.mean(-1, keepdim=True)
    n = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    return n * weight if bias is None else n * weight + bias


def run(function, leaves, gradients):
    """The results of a function of leaves, and their gradients; None stays None."""
    leaves = [t if t is None else t.clone().requires_grad_() for t in leaves]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    given = [t for t in leaves if t is not None]
    return [o.detach() for o in outputs], torch.autograd.grad(
        outputs, given, gradients[: len(outputs)]
    )


def close(got, expected, terms=1):
    """Rounded once to bf16, after sums of `terms` numbers in fp32."""
    size = max(expected.abs().max().item(), 1.0)
    torch.testing.assert_close(
        got.double(), expected, rtol=2**-8, atol=2e-6 * size * max(1, terms / 64)
    )


@kinds
@shapes
def test_a_norm_equals_float64_to_rounding(rows, width, kind):
    x, _, weight, bias, dy, _ = sample(rows, width)
    bias = bias if kind == "LayerNorm" else None
    ours = lambda v, w, *b: (
        norms.layer_norm(v, w, *b, EPS) if b else norms.rms_norm(v, w, EPS)
    )
    theirs = lambda v, w, b=None: exact(v, w, b)
    leaves = [t for t in (x, weight, bias) if t is not None]
    outputs, gradients = run(ours, leaves, [dy])
    expected, slopes = run(theirs, [t.double() for t in leaves], [dy.double()])
    assert outputs[0].dtype == torch.bfloat16
    close(outputs[0], expected[0])
    for got, slope, terms in zip(gradients, slopes, (1, rows, rows)):
        close(got, slope, terms)


@kinds
@shapes
def test_a_norm_of_a_sum_equals_float64_of_the_rounded_sum(rows, width, kind):
    x, residual, weight, bias, dy, past = sample(rows, width)
    bias = bias if kind == "LayerNorm" else None
    ours = lambda x, r, w, b: norms.residual_norm(x, r, w, b, EPS)
    (y, total), (dx, d_residual, dw, *db) = run(
        ours, (x, residual, weight, bias), [dy, past]
    )
    assert torch.equal(total, x + residual) and torch.equal(dx, d_residual)
    leaves = [total.double(), weight.double(), bias if bias is None else bias.double()]
    [expected], (slope, *others) = run(exact, leaves, [dy.double()])
    close(y, expected)
    close(dx, slope + past.double())
    for got, other in zip((dw, *db), others, strict=True):
        close(got, other, rows)


def test_a_result_that_is_not_used_adds_nothing_to_gradients():
    x, residual, weight, bias, dy, past = sample(70, 64)
    leaves = [t.requires_grad_() for t in (x, residual, weight, bias)]
    y, total = norms.residual_norm(*leaves, EPS)
    nothing = torch.zeros_like(dy)
    alone = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    beside_zeros = torch.autograd.grad(
        (y, total), leaves, (dy, nothing), retain_graph=True
    )
    assert all(map(torch.equal, alone, beside_zeros))
    of_total = torch.autograd.grad(total, leaves, past, allow_unused=True)
    assert (
        torch.equal(of_total[0], past)
        and torch.equal(of_total[1], past)
        and of_total[2:] == (None, None)
    )


@pytest.mark.parametrize("width", [33, 96])
def test_bits_depend_neither_on_threads_nor_on_other_rows(width, monkeypatch):
    *leaves, dy, past = sample(300, width)
    ours = lambda x, r, w, b: norms.residual_norm(x, r, w, b, EPS)
    (y, total), whole = run(ours, leaves, (dy, past))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    (again, _), other = run(ours, leaves, (dy, past))
    assert torch.equal(y, again) and all(map(torch.equal, whole, other))
    some = slice(70, 73)
    of_part = (leaves[0][some], leaves[1][some], *leaves[2:])
    (part, _), gradients = run(ours, of_part, (dy[some], past[some]))
    assert torch.equal(part, y[some]) and torch.equal(gradients[0], whole[0][some])


def test_rows_that_lie_apart():
    x, residual, weight, bias, dy, past = sample(40, 96)
    apart = lambda t: torch.stack([t, t], 1)[:, 0]
    ours = lambda x, r, w, b: norms.residual_norm(x, r, w, b, EPS)
    outputs, gradients = run(ours, (x, residual, weight, bias), (dy, past))
    x, residual = apart(x).requires_grad_(), apart(residual).requires_grad_()
    assert not x.is_contiguous()
    again = norms.residual_norm(x, residual, weight, bias, EPS)
    assert all(map(torch.equal, again, outputs))
    assert torch.equal(
        torch.autograd.grad(again, x, (apart(dy), apart(past)))[0], gradients[0]
    )


def test_forward_keeps_the_normalized_numbers_and_two_of_each_row():
    x, residual, weight, bias, *_ = (t.requires_grad_() for t in sample(128, 256))
    with AliveBytes() as alive:
        before = alive.now()
        outputs = norms.residual_norm(x, residual, weight, bias, EPS)
        assert (
            alive.now() - before == 2 * x.nbytes + 8 * 128
        )  # both results, one of which is kept
        del outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_dtypes_are_not_compiled(dtype):
    x, residual, weight, bias, *_ = sample(4, 32, dtype)
    assert norms.layer_norm.choice(x, weight, bias, EPS) is norms.layer_norm.in_torch
    bf16 = x.bfloat16()
    assert (
        norms.residual_norm.choice(bf16, residual, weight, bias, EPS)
        is norms.residual_norm.in_torch
    )
    both = (bf16, residual.bfloat16())
    assert (
        norms.residual_norm.choice(*both, weight, bias, EPS) is compiled.residual_norm
    )
    assert norms.layer_norm.choice(bf16, weight, bias, EPS) is compiled.layer_norm
    assert norms.rms_norm.choice(bf16, weight, EPS) is compiled.rms_norm


def test_tensors_of_other_shapes_are_torchs_to_broadcast_or_to_refuse():
    x, residual, weight, bias, *_ = sample(4, 64)
    for one, other in ((x, residual[:1]), (x[:1], residual)):
        normed, total = norms.residual_norm(one, other, weight, bias, EPS)
        assert torch.equal(total, one + other)
        assert torch.equal(normed, norms.layer_norm(total, weight, bias, EPS))
    half = weight[:32], bias[:32]
    for norm, tensors in (
        (norms.layer_norm, (x, *half)),
        (norms.rms_norm, (x, half[0])),
        (norms.residual_norm, (x, residual, *half)),
    ):
        with pytest.raises(RuntimeError, match="normalized_shape|must match"):
            norm(*tensors, EPS)
    assert norms.layer_norm(x[:0], weight, bias, EPS).shape == (0, 64)
