"""Soft caps: every path of attention, and of the head, computes C tanh(x / C) and its gradient."""

from functools import partial

import pytest
import torch

from megatron_ds.batch.documents import Documents
from megatron_ds.extensions.kernels.gpu import flex_attention
from megatron_ds.ops import attention_rows, core_attention
from megatron_ds.ops.alibi import Alibi, alibi_slopes
from megatron_ds.ops.attention_pattern import AttentionPattern
from megatron_ds.ops.attention_tiles import Runs
from megatron_ds.ops.core_attention import attention
from megatron_ds.ops.key_visibility import CAUSAL_KEYS, KeyVisibility
from megatron_ds.ops.partial_attention import PartialAttention, PartialGradients
from megatron_ds.ops.scoring import Scoring
from megatron_ds.ops.soft_cap import cap_, capped, slope_of

pytestmark = pytest.mark.plan

LENGTH, SAMPLES, HEADS, GROUPS, CHANNELS = 150, 2, 4, 2, 32
CAP = 0.7
ENDS = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
ENDS[0, 40] = ENDS[1, 120] = 1
VISIBLE = {
    "causal": CAUSAL_KEYS,
    "window": KeyVisibility(AttentionPattern(left=9)),
    "documents": KeyVisibility(documents=Documents(ENDS.cumsum(1) - ENDS)),
}


def drawn(dtype=torch.float32):
    draw = torch.Generator().manual_seed(1)
    shapes = [(LENGTH, SAMPLES, heads, CHANNELS) for heads in (HEADS, GROUPS, GROUPS)]
    shapes.append(shapes[0])
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def scoring_of(has_alibi, cap=CAP):
    alibi = Alibi(alibi_slopes(HEADS, torch.device("cpu"))) if has_alibi else None
    return Scoring(0.4, alibi=alibi, cap=cap)


def written_out(q, k, v, dout, visible, has_alibi):
    """Output and gradients in double precision."""
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    queries, keys, values = (t.permute(1, 2, 0, 3) for t in leaves)
    keys, values = (t.repeat_interleave(HEADS // GROUPS, 1) for t in (keys, values))
    scores = torch.tanh(queries @ keys.mT * 0.4 / CAP) * CAP
    here = torch.arange(LENGTH)
    distance = here[:, None] - here
    if has_alibi:
        slopes = alibi_slopes(HEADS, torch.device("cpu")).double()
        scores = scores - slopes[:, None, None] * distance.abs()
    hidden = distance < 0
    if visible.pattern.left is not None:
        hidden = hidden | (distance > visible.pattern.left)
    if visible.documents is not None:
        hidden = hidden | visible.documents.foreign
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    out = (p @ values).permute(2, 0, 1, 3)
    out.backward(dout.double())
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def called(function, q, k, v, dout, visible, scoring):
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = function(*leaves, visible, scoring=scoring)
    out.backward(dout.flatten(2))
    return [out.detach().unflatten(2, (HEADS, -1)), *(leaf.grad for leaf in leaves)]


def in_blocks(q, k, v, dout, visible, scoring):
    """Two blocks of keys, as of two context-parallel ranks."""
    queries = Runs((range(LENGTH),))
    halves = [range(70), range(70, LENGTH)]
    part = PartialAttention(q, queries, visible, scoring)
    for half in halves:
        rows = slice(half.start, half.stop)
        part.add(k[rows], v[rows], Runs((half,)))
    result = part.result()
    found = PartialGradients(
        q, queries, visible, scoring, result, dout.flatten(2), None
    )
    dkv = torch.zeros(2, *k.shape)
    for half in halves:
        rows = slice(half.start, half.stop)
        found.add(k[rows], v[rows], Runs((half,)), dkv[:, rows])
    return [result[0].unflatten(2, (HEADS, -1)), found.dq, *dkv]


PATHS = {
    "chosen": partial(called, attention),
    "by rows": partial(called, core_attention._by_rows),
    "in blocks": in_blocks,
}


@pytest.mark.parametrize("has_alibi", [False, True])
@pytest.mark.parametrize("visible", VISIBLE)
@pytest.mark.parametrize("path", PATHS)
def test_scores_are_capped_on_every_path(path, visible, has_alibi, monkeypatch):
    monkeypatch.setattr(attention_rows, "ROWS", 60)
    given = drawn()
    expected = written_out(*given, VISIBLE[visible], has_alibi)
    found = PATHS[path](*given, VISIBLE[visible], scoring_of(has_alibi))
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-5)
    without = PATHS[path](*given, VISIBLE[visible], scoring_of(has_alibi, None))
    assert (without[0].double() - expected[0]).abs().max() > 0.1


@pytest.mark.parametrize("has_alibi", [False, True])
def test_flex_attention_caps_before_the_bias(has_alibi):
    mod = flex_attention._score_mod(scoring_of(has_alibi))
    place = (torch.tensor(0), torch.tensor(3), torch.tensor(9), torch.tensor(4))
    slope = alibi_slopes(HEADS, torch.device("cpu"))[3] if has_alibi else 0.0
    expected = CAP * torch.tanh(torch.tensor(1.3) / CAP) - 5 * slope
    torch.testing.assert_close(mod(torch.tensor(1.3), *place), expected)


def test_low_precision_is_capped_too():
    given = drawn(torch.bfloat16)
    expected = written_out(*given, CAUSAL_KEYS, False)
    found = called(attention, *given, CAUSAL_KEYS, scoring_of(False))
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=0.05, atol=0.05)


def test_the_logits_keep_their_tangents_alone_and_have_the_gradient_of_torch():
    x = torch.linspace(-3, 3, 40, dtype=torch.float64).view(5, 8).requires_grad_()
    dy = torch.arange(40.0, dtype=torch.float64).view(5, 8)
    right = CAP * torch.tanh(x / CAP)
    (expected,) = torch.autograd.grad(right, x, dy)
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or t, lambda t: t
    )
    with hooks:
        y = capped(x * 1, CAP)
    assert len(kept) == 1
    y.detach().zero_()  # as the loss does
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], expected)
    torch.testing.assert_close(cap_(x.detach().clone(), CAP), right.detach())
    torch.testing.assert_close(slope_of(right.detach(), CAP) * dy, expected)
