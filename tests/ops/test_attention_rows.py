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


@pytest.mark.parametrize("name, keys", [("causal", 2 * ROWS), ("window", ROWS + 3)])
def test_scores_of_all_rows_are_never_in_memory(name, keys, monkeypatch):
    """On a CPU also not those of keys that a part does not see: the second of three parts has most."""
    monkeypatch.setattr(f"{__name__}.CHANNELS", 1)  # else q, k and v are larger
    case = VISIBLE[name], keep_mask(), False, False
    for function, pairs in (
        (reference_attention, LENGTH * LENGTH),
        (core_attention._by_rows, ROWS * keys),
    ):
        with LargestResult() as largest:
            results(function, *case)
        assert largest.numbers == SAMPLES * HEADS * pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_dropout_does_not_grow_with_the_square_of_the_length(
    dtype, monkeypatch
):
    """The implementation that a CPU chooses: no tensor has more numbers than a few rows, or than q, k and v."""
    monkeypatch.undo()  # ROWS

    def largest(length: int) -> int:
        q, k, v = (torch.randn(length, 1, 2, 32).to(dtype) for _ in range(3))
        keep = KeepMask(
            0.1, sample_keys(1, "here", (0,)), range(2), range(length), length
        )
        with LargestResult() as found:
            out = attention(q.requires_grad_(), k, v, keep=keep)
            out.float().sum().backward()
        return found.numbers

    numbers = {length: largest(length) for length in (1024, 4096)}
    assert numbers[4096] <= 2 * attention_rows.CPU_PAIRS == numbers[1024]


@pytest.mark.parametrize("function", [core_attention._by_rows, reference_attention])
def test_values_may_have_fewer_channels_than_keys(function):
    q, k, v, _ = leaves()
    narrow = v[..., :3]
    everything = function(q, k, v, keep=keep_mask()).unflatten(2, (HEADS, -1))
    found = function(q, k, narrow, keep=keep_mask()).unflatten(2, (HEADS, -1))
    assert found.shape == (LENGTH, SAMPLES, HEADS, 3)
    torch.testing.assert_close(found, everything[..., :3], rtol=1e-12, atol=1e-12)


def test_backward_keeps_the_arguments_alone():
    kept = []
    q, k, v, _ = leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, id):
        core_attention._by_rows(q, k, v, keep=keep_mask())
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (q, k, v)}


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_devices_attend_by_rows_where_probabilities_are_needed(device):
    q, k, v, sink = (t.detach().to(device) for t in leaves(torch.float32))
    keep = keep_mask()
    choose = lambda **named: attention.choice(q, k, v, CAUSAL_KEYS, **named)
    assert choose(keep=keep) is core_attention._by_rows
    assert choose() is attention.in_torch
    short = [t[:ROWS] for t in (q, k, v)]
    assert attention.choice(*short, CAUSAL_KEYS, keep=keep) is attention.in_torch
