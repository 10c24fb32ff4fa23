"""Attention with dropout or a sink, some rows at a time: the numbers of all rows together, and never all scores."""

import pytest
import torch

from megatron_ds.batch.documents import Documents
from megatron_ds.host.dispatch_mode import DispatchMode
from megatron_ds.ops import attention_rows, core_attention
from megatron_ds.ops.alibi import Alibi, alibi_slopes
from megatron_ds.ops.attention_pattern import AttentionPattern
from megatron_ds.ops.core_attention import attention, reference_attention
from megatron_ds.ops.dropout import KeepMask, sample_keys
from megatron_ds.ops.key_visibility import CAUSAL_KEYS, KeyVisibility
from megatron_ds.ops.scoring import Scoring

pytestmark = pytest.mark.plan

LENGTH, SAMPLES, HEADS, GROUPS, CHANNELS, ROWS = 13, 2, 4, 2, 4, 5
ENDS = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
ENDS[0, 4] = ENDS[1, 9] = 1
PADDING = (torch.arange(LENGTH) >= 11).expand(SAMPLES, 1, 1, -1)
VISIBLE = {
    "causal": CAUSAL_KEYS,
    "window": KeyVisibility(AttentionPattern(left=3)),
    "all": KeyVisibility(AttentionPattern(causal=False)),
    "documents": KeyVisibility(documents=Documents(ENDS.cumsum(1) - ENDS)),
    "padding": KeyVisibility(AttentionPattern(causal=False), mask=PADDING),
}


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(attention_rows, "ROWS", ROWS)


def leaves(dtype=torch.float64):
    draw = torch.Generator().manual_seed(1)
    shapes = [(LENGTH, SAMPLES, heads, CHANNELS) for heads in (HEADS, GROUPS, GROUPS)]
    made = [torch.randn(s, generator=draw, dtype=dtype) for s in (*shapes, (HEADS,))]
    return [t.requires_grad_() for t in made]


def keep_mask():
    """Heads 2 to 5 of a rank, and rows from 3 on of the sequence."""
    keys = sample_keys(1, "here", (3, 4))
    return KeepMask(0.3, keys, range(2, 2 + HEADS), range(3, 3 + LENGTH), LENGTH)


def results(function, visible, keep, has_sink, has_alibi):
    q, k, v, sink = leaves()
    alibi = Alibi(alibi_slopes(HEADS, torch.device("cpu"))) if has_alibi else None
    scoring = Scoring(sink=sink if has_sink else None, alibi=alibi)
    out = function(q, k, v, visible, keep=keep, scoring=scoring)
    given = [q, k, v, *([sink] if has_sink else [])]
    weights = torch.arange(out.numel(), dtype=out.dtype).sin().view(out.shape)
    return [out, *torch.autograd.grad(out, given, weights)]


@pytest.mark.parametrize("name", VISIBLE)
@pytest.mark.parametrize(
    ("drops", "has_sink", "has_alibi"),
    [
        (True, False, False),
        (True, True, False),
        (False, True, False),
        (True, False, True),
    ],
)
def test_the_numbers_are_those_of_all_rows(name, drops, has_sink, has_alibi):
    case = VISIBLE[name], keep_mask() if drops else None, has_sink, has_alibi
    got = results(core_attention._by_rows, *case)
    expected = results(reference_attention, *case)
    for mine, right in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


class LargestResult(DispatchMode):
    """The most numbers of a floating-point result."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            self.numbers = max(self.numbers, out.numel())
        return out


def test_scores_of_all_rows_are_never_in_memory():
    case = CAUSAL_KEYS, keep_mask(), False, False
    for function, rows in (
        (reference_attention, LENGTH),
        (core_attention._by_rows, ROWS),
    ):
        with LargestResult() as largest:
            results(function, *case)
        assert largest.numbers == SAMPLES * HEADS * rows * LENGTH


def test_backward_keeps_the_arguments_alone():
    kept = []
    q, k, v, _ = leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, id):
        core_attention._by_rows(q, k, v, keep=keep_mask())
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (q, k, v)}


def test_gpus_attend_by_rows_where_probabilities_are_needed():
    q, k, v, sink = (t.detach().to("meta") for t in leaves(torch.bfloat16))
    keep = keep_mask()
    choose = lambda **named: attention.choice(q, k, v, CAUSAL_KEYS, **named)
    assert choose(keep=keep) is core_attention._by_rows
    assert choose() is attention.in_torch
    short = [t[:ROWS] for t in (q, k, v)]
    assert attention.choice(*short, CAUSAL_KEYS, keep=keep) is attention.in_torch
