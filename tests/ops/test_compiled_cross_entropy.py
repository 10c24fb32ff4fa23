"""The compiled softmax and its gradient against float64: rows of any length at any address, any logits, any
threads. Processors with AVX-512 BF16 have code of their own for bf16; its registers hold 32 numbers, its
partial sums 2048.
"""

import pytest
import torch

from megatron_ds.extensions.kernels.cpu import compiled_attention as attention
from megatron_ds.extensions.kernels.cpu import compiled_cross_entropy as compiled

pytestmark = [
    pytest.mark.plan,
    pytest.mark.skipif(not compiled.extension(), reason="the extension is not built"),
]

WIDTHS = [
    1,
    2,
    3,
    15,
    16,
    17,
    31,
    32,
    33,
    47,
    63,
    65,
    97,
    2047,
    2049,
    2079,
    2080,
    2081,
    4100,
    50257,
]
# Of a number, by rounding it to bf16 after arithmetic in fp32.
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8}
PADDING = 3
dtypes = pytest.mark.parametrize("dtype", compiled.DTYPES, ids=str)


def sample(width, dtype, rows=6, scale=3.0):
    """(logits with rubbish in the last PADDING columns; columns, the first and last among them)."""
    g = torch.Generator().manual_seed(width)
    logits = (scale * torch.randn(rows, width + PADDING, generator=g)).to(dtype)
    logits[:, width:] = torch.tensor([torch.nan, 1e4, torch.inf])
    column = torch.randint(0, width, (rows, 1), generator=g)
    column[0], column[1] = 0, width - 1
    return logits, column


def softmax(logits, column, valid):
    """(probabilities, those of `column`, lse) of a copy."""
    p = logits.clone()
    return p, *compiled.softmax_(p, column, valid)


def same(a, b):
    """Bit for bit, of all tensors; a NaN is a NaN."""
    return all(
        torch.equal(x.isnan(), y.isnan())
        and torch.equal(x.nan_to_num(), y.nan_to_num())
        for x, y in zip(a, b, strict=True)
    )


@dtypes
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_softmax_and_losses_equal_float64(width, scale, dtype):
    logits, column = sample(width, dtype, scale=scale)
    p, at_column, lse = softmax(logits, column, width)
    exact = logits[:, :width].double()
    loss = exact.logsumexp(-1, keepdim=True) - exact.gather(1, column)
    got = lse.double() - exact.gather(1, column)
    # lse, up to 140 here, is rounded
    torch.testing.assert_close(got, loss, rtol=1e-6, atol=1e-6 if scale < 30 else 8e-6)
    # differences of fp32 logits, up to 200 here, are rounded
    rtol, exact_p = 1e-5 if dtype == torch.float32 else 4e-6, exact.softmax(-1)
    torch.testing.assert_close(
        at_column.double(), exact_p.gather(1, column), rtol=rtol, atol=1e-37
    )
    torch.testing.assert_close(
        p[:, :width].double(), exact_p, rtol=ROUNDING[dtype] + rtol, atol=1e-37
    )
    assert p[:, width:].count_nonzero() == 0


def test_each_exponential_is_exact():
    """Of every bf16 number from -95 to 0, in the second of three columns."""
    numbers = (
        torch.arange(-(2**15), 2**15, dtype=torch.int32)
        .to(torch.int16)
        .view(torch.bfloat16)
    )
    numbers = numbers[(numbers <= 0) & (numbers > -95)]
    logits = torch.zeros(len(numbers), 3, dtype=torch.bfloat16)
    logits[:, 1], logits[:, 2] = numbers, -torch.inf
    _, at_column, _ = softmax(logits, torch.ones(len(numbers), 1, dtype=torch.int64), 3)
    exact, numbers = logits.double().softmax(-1)[:, 1], numbers.double()
    error = ((at_column[:, 0].double() - exact) / exact).abs()
    assert len(numbers) > 17_000
    assert error[numbers > -20].max() < 1e-6
    assert error[numbers > -87.3].max() < 4e-6
    assert (
        at_column[numbers < -87.4].count_nonzero() == 0
    )  # below the smallest normal number


@pytest.mark.parametrize("logit", [-0.1, -0.5, -2.0, -7.0])
def test_sums_of_long_rows_stay_exact_where_all_roundings_have_one_direction(logit):
    logits = torch.full((1, 250_001), logit, dtype=torch.bfloat16)
    logits[0, 77] = 0
    _, _, lse = softmax(logits, torch.zeros(1, 1, dtype=torch.int64), 250_001)
    has_vectors = not attention.reason_against(torch.bfloat16)
    exact = logits.double().logsumexp(-1, keepdim=True)
    # without AVX-512 BF16: 16 partial sums of 15,625 numbers
    torch.testing.assert_close(
        lse.double(), exact, rtol=2e-7 if has_vectors else 4e-5, atol=0
    )


@dtypes
@pytest.mark.parametrize("width", [1, 5, 31, 32, 33, 65, 2081])
@pytest.mark.parametrize(
    "what", [torch.nan, -torch.nan, torch.inf], ids=["nan", "-nan", "inf"]
)
def test_nan_and_infinity_reach_the_row_wherever_they_are_and_no_other_row(
    what, width, dtype
):
    clean, column = sample(width, dtype)
    expected = softmax(clean, column, width)
    for at in {0, width // 2, width - 1}:
        logits = clean.clone()
        logits[3, at] = torch.tensor(what)
        if what != what:
            logits[4, :width] = what  # nothing else
        p, at_column, lse = softmax(logits, column, width)
        is_damaged = torch.tensor([False, False, False, True, what != what, False])
        assert p[is_damaged, :width].isnan().all() or width > 1 and what == torch.inf
        assert p[3, at].isnan() and p[:, width:].count_nonzero() == 0
        assert not lse[is_damaged].isfinite().any()
        results = [
            [t[~is_damaged] for t in all_rows]
            for all_rows in ((p, at_column, lse), expected)
        ]
        assert same(*results)


@dtypes
@pytest.mark.parametrize("width", [2, 31, 33, 2081])
def test_the_largest_logits_and_minus_infinity(width, dtype):
    logits, column = sample(width, dtype, rows=5)
    largest = torch.finfo(dtype).max
    logits[0, :width], logits[0, -PADDING - 1] = -torch.inf, -5.0
    logits[1, :width], logits[1, -PADDING - 1] = -largest, largest
    logits[2, :width] = -largest
    logits[3, :width] = largest
    logits[4, :width] = -torch.inf
    p, at_column, lse = softmax(logits, torch.full_like(column, width - 1), width)
    certain = torch.zeros(width)
    certain[-1] = 1
    assert torch.equal(p[0, :width].float(), certain) and torch.equal(
        p[1, :width].float(), certain
    )
    assert torch.equal(p[2:4, :width], torch.full((2, width), 1 / width).to(dtype))
    assert at_column[:2].tolist() == [[1.0], [1.0]] and lse[:2].tolist() == [
        [-5.0],
        [largest],
    ]
    assert p[4, :width].isnan().all() and lse[4].isnan()


@dtypes
def test_rows_without_valid_columns_have_no_sum(dtype):
    logits, column = (
        torch.full((2, 40), torch.nan, dtype=dtype),
        torch.zeros(2, 1, dtype=torch.int64),
    )
    p, at_column, lse = softmax(logits, column, 0)
    assert (
        not p.any()
        and at_column.tolist() == [[0.0]] * 2
        and lse.tolist() == [[-torch.inf]] * 2
    )


def gradient_arguments(width, dtype, rows=6):
    """(p, column, elsewhere, factors), as `gradient_` takes them."""
    logits, column = sample(width, dtype, rows)
    g = torch.Generator().manual_seed(1)
    factor, everywhere, at_label = (torch.randn(rows, 1, generator=g) for _ in range(3))
    return (
        logits,
        column,
        torch.arange(rows).unsqueeze(-1) % 3 == 2,
        (factor, everywhere / width, at_label),
    )


@dtypes
@pytest.mark.parametrize("width", WIDTHS)
def test_the_gradient_equals_float64(width, dtype):
    p, column, elsewhere, (factor, everywhere, at_label) = gradient_arguments(
        width, dtype
    )
    p[:, :width] = p[:, :width].softmax(-1)
    exact = p[:, :width].double() * factor - everywhere
    exact.scatter_(
        1, column, torch.where(elsewhere, exact.gather(1, column), at_label.double())
    )
    got = p.clone()
    compiled.gradient_(got, width, column, elsewhere, (factor, everywhere, at_label))
    # fp32: the difference has the rounding of the product
    torch.testing.assert_close(
        got[:, :width].double(), exact, rtol=ROUNDING[dtype] + 1e-6, atol=1e-6 / width
    )
    assert same([got[:, width:]], [p[:, width:]])


@dtypes
@pytest.mark.parametrize("width", [1, 31, 32, 33, 65, 2081])
def test_addresses_change_no_bit_and_what_lies_around_is_left_alone(width, dtype):
    logits, column = sample(width, dtype)
    *facts, factors = gradient_arguments(width, dtype)[1:]
    results = []
    for first in (0, 1, 7, 30):
        memory = torch.full((logits.numel() + 64,), 77.0, dtype=dtype)
        rows = memory[first : first + logits.numel()].view_as(logits)
        rows.copy_(logits)
        facts_forward = compiled.softmax_(rows, column, width)
        p = rows.clone()
        compiled.gradient_(rows, width, *facts, factors)
        assert (memory[:first] == 77).all() and (
            memory[first + logits.numel() :] == 77
        ).all()
        results.append((*facts_forward, p, rows.clone()))
    assert all(same(result, results[0]) for result in results)


@dtypes
def test_threads_and_other_rows_change_no_bit(dtype, monkeypatch):
    logits, column = sample(2081, dtype, rows=11)
    p, column, elsewhere, factors = gradient_arguments(2081, dtype, rows=11)
    results = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        gradient = p.clone()
        compiled.gradient_(gradient, 2081, column, elsewhere, factors)
        results.append((*softmax(logits, column, 2081), gradient))
    assert same(*results)
    assert same(
        [t[4:5] for t in results[0][:3]],
        softmax(logits[4:5].clone(), column[4:5], 2081),
    )
