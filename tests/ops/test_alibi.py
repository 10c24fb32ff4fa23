"""ALiBi: slopes and bias against closed forms, attention against a bias that is written out."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_ds.batch.documents import Documents
from megatron_ds.ops.alibi import Alibi, alibi_bias, alibi_slopes
from megatron_ds.ops.attention_pattern import CAUSAL, FULL, AttentionPattern
from megatron_ds.ops.core_attention import attention, reference_attention
from megatron_ds.ops.dropout import KeepMask, sample_keys
from megatron_ds.ops.kernel_table import selected
from megatron_ds.ops.key_visibility import KeyVisibility
from megatron_ds.ops.scoring import Scoring
from tests.harness.plain_gpt import plain_slopes

pytestmark = pytest.mark.plan


def alibi_of(n, places=None):
    return Scoring(alibi=Alibi(alibi_slopes(n), places))


@pytest.mark.parametrize("n", range(1, 71))
def test_slopes_are_those_of_the_paper_for_any_number_of_heads(n):
    torch.testing.assert_close(
        alibi_slopes(n), torch.tensor(plain_slopes(n)), rtol=1e-7, atol=0
    )
    assert len(alibi_slopes(n).unique()) == n


def test_slopes_of_eight_heads_are_the_papers():
    assert alibi_slopes(8).tolist() == [
        1 / 2,
        1 / 4,
        1 / 8,
        1 / 16,
        1 / 32,
        1 / 64,
        1 / 128,
        1 / 256,
    ]


def test_bias_is_minus_slope_times_distance_at_any_positions():
    queries, keys = torch.tensor([[5, 0, 7], [1, 2, 3]]), torch.tensor([[0, 9], [4, 2]])
    bias = alibi_bias(torch.tensor([0.5, 0.25]), queries, keys)
    assert bias.shape == (2, 2, 3, 2)
    for b, n, i, j in torch.cartesian_prod(*map(torch.arange, bias.shape)).tolist():
        assert bias[b, n, i, j] == -(0.5, 0.25)[n] * abs(
            queries[b, i].item() - keys[b, j].item()
        )


def written_out(q, k, v, hidden):
    """softmax(q kᵀ / √d - slope |i - j|) v in float64. hidden: bool [b or 1, sq, sk]"""
    (sq, _, n, d), (sk, _, g, _) = q.shape, k.shape
    keys, values = (t.repeat_interleave(n // g, dim=2) for t in (k, v))
    scores = torch.einsum("ibnd,jbnd->bnij", q, keys) / d**0.5
    distance = (torch.arange(sk - sq, sk)[:, None] - torch.arange(sk)).abs().double()
    scores -= (
        torch.tensor(plain_slopes(n), dtype=torch.float64)[:, None, None] * distance
    )
    p = scores.masked_fill(hidden[:, None], -math.inf).softmax(-1)
    return torch.einsum("bnij,jbnd->ibnd", p, values).flatten(2)


def drawn(sq, sk, b, n, g, d=16):
    draw = partial(
        torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(sk)
    )
    return draw(sq, b, n, d), draw(sk, b, g, d), draw(sk, b, g, d), draw(sq, b, n * d)


def check(function, q, k, v, dout, hidden):
    """Output and gradients in fp32 against fp64."""
    exact = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = written_out(*exact, hidden)
    expected.backward(dout)
    ours = [t.float().requires_grad_() for t in (q, k, v)]
    result = function(*ours)
    result.backward(dout.float())
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    for mine, true in zip(ours, exact):
        torch.testing.assert_close(mine.grad.double(), true.grad, rtol=1e-4, atol=1e-5)


def future(sq, sk):
    return torch.ones(1, sq, sk, dtype=torch.bool).triu(1 + sk - sq)


@pytest.mark.parametrize(
    "function", [attention, reference_attention], ids=["fused", "reference"]
)
@pytest.mark.parametrize(
    "sq, sk, n, g", [(7, 7, 4, 4), (9, 9, 6, 2), (1, 9, 3, 1), (4, 9, 5, 5)]
)
@pytest.mark.parametrize("pattern", [CAUSAL, FULL], ids=["causal", "full"])
def test_attention_has_the_bias_of_the_distance(function, sq, sk, n, g, pattern):
    q, k, v, dout = drawn(sq, sk, 2, n, g)
    hidden = (
        future(sq, sk) if pattern.causal else torch.zeros(1, sq, sk, dtype=torch.bool)
    )
    check(
        partial(function, visible=KeyVisibility(pattern), scoring=alibi_of(n)),
        q,
        k,
        v,
        dout,
        hidden,
    )


@pytest.mark.parametrize(
    "pattern",
    [
        CAUSAL,
        FULL,
        AttentionPattern(left=40),
        AttentionPattern(causal=False, left=5, right=70),
    ],
    ids=str,
)
@pytest.mark.parametrize("s, n, g", [(150, 6, 2), (300, 3, 1)])
def test_windows_leave_it_as_it_is(pattern, s, n, g):
    q, k, v, dout = drawn(s, s, 2, n, g, d=32)
    here = torch.arange(s)
    outside = pattern.hidden(here, here)
    hidden = (
        torch.zeros(1, s, s, dtype=torch.bool) if outside is None else outside[None]
    )
    attend = partial(attention, visible=KeyVisibility(pattern), scoring=alibi_of(n))
    check(attend, q, k, v, dout, hidden)
    with selected("torch"):
        check(attend, q, k, v, dout, hidden)


@pytest.mark.parametrize("pattern", [CAUSAL, FULL], ids=["causal", "full"])
def test_documents_and_masks_hide_what_they_hide_without_it(pattern):
    s, n = 9, 6
    q, k, v, dout = drawn(s, s, 2, n, 2)
    ids = torch.tensor([[0] * 4 + [1] * 5, [0] * 8 + [1]])
    mask = torch.zeros(2, 1, 1, s, dtype=torch.bool)
    mask[0, ..., 2] = True
    hidden = (ids[:, :, None] != ids[:, None]) | (
        future(s, s) if pattern.causal else False
    )
    visible = KeyVisibility(pattern, Documents(ids))
    attend = partial(attention, scoring=alibi_of(n))
    check(partial(attend, visible=visible), q, k, v, dout, hidden)
    visible = replace(visible, mask=mask)
    check(partial(attend, visible=visible), q, k, v, dout, hidden | mask[:, 0])


def test_distances_are_those_of_the_places_of_the_tokens():
    n, whole = 4, 12
    places = torch.tensor([[0, 3, 4, 9, 11], [1, 2, 5, 6, 10]])
    q, k, v, dout = drawn(whole, whole, 2, n, 2)
    others = torch.ones(2, whole, dtype=torch.bool).scatter(1, places, False)
    expected = written_out(q, k, v, future(whole, whole) | others[:, None])
    take = lambda t: t[places.T, torch.arange(2)]
    for function in (attention, reference_attention):
        out = function(take(q), take(k), take(v), scoring=alibi_of(n, places))
        torch.testing.assert_close(
            out, take(expected), rtol=1e-6, atol=1e-6
        )  # fp32 slopes


def test_dropout_falls_on_the_biased_probabilities():
    n, s = 4, 6
    q, k, _, _ = drawn(s, s, 2, n, 2, d=s)
    q, k = q.float(), k.float()
    keep = KeepMask(
        0.3, sample_keys(1, "a", (0, 1)), heads=range(n), rows=range(s), cols=s
    )
    values = (
        torch.eye(s).view(s, 1, 1, s).expand(s, 2, 2, s)
    )  # so the output is the probabilities
    alibi = alibi_of(n)
    p = (
        attention(q, k, values, keep=keep, scoring=alibi)
        .view(s, 2, n, s)
        .permute(1, 2, 0, 3)
    )
    plain = attention(q, k, values, scoring=alibi).view(s, 2, n, s).permute(1, 2, 0, 3)
    torch.testing.assert_close(p, plain * keep.mask / 0.7, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("s", [20, 150])
def test_bf16_strays_no_further_than_without_the_bias(s):
    q, k, v, _ = (t.bfloat16() for t in drawn(s, s, 1, 6, 2))
    exact = written_out(*(t.double() for t in (q, k, v)), future(s, s))
    plain = attention(q.double(), k.double(), v.double())
    error = lambda out, true: (out.double() - true).norm() / true.norm()
    assert error(attention(q, k, v, scoring=alibi_of(6)), exact) < 1.5 * error(
        attention(q, k, v), plain
    )
