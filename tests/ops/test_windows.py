"""Windows and sinks: every path of attention equals the probabilities written out."""

import pytest
import torch

from megatron_ds.batch.documents import Documents, document_numbers
from megatron_ds.models.block import block_flops, patterns
from megatron_ds.ops.attention_pattern import CAUSAL, FULL, AttentionPattern
from megatron_ds.ops.core_attention import attention, reference_attention
from megatron_ds.ops.dropout import KeepMask, sample_keys
from megatron_ds.ops.kernel_table import selected
from megatron_ds.ops.key_visibility import KeyVisibility
from megatron_ds.ops.scoring import Scoring
from tests.harness.plain_gpt import TinyConfig

pytestmark = pytest.mark.plan

WINDOWS = [
    CAUSAL,
    FULL,
    AttentionPattern(left=20),
    AttentionPattern(left=0),
    AttentionPattern(left=300),
    AttentionPattern(False, 10, 30),
    AttentionPattern(False, None, 5),
]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def written_out(
    q, k, v, sink=None, *, pattern=CAUSAL, hidden=None, scale=0.3, keep=1.0
):
    """One head at a time: exp(s) / (exp(sink) + Σ exp(s)), zeros where nothing is seen; in float64."""
    s, _, n, _ = q.shape
    distance = torch.arange(s) - torch.arange(s)[:, None]
    left = s if pattern.left is None else pattern.left
    right = s if pattern.right is None else pattern.right
    if pattern.causal:
        right = 0
    seen = (distance >= -left) & (distance <= right)
    seen = seen[None] if hidden is None else seen & ~hidden[:, 0]  # [b, s, s]
    heads = []
    for i in range(n):
        j = i * k.shape[2] // n
        scores = scale * torch.einsum("qbd,kbd->bqk", q[:, :, i], k[:, :, j])
        exponents = scores.exp() * seen
        total = exponents.sum(-1, keepdim=True) + (0 if sink is None else sink[i].exp())
        p = (
            exponents
            / total.clamp_min(1e-300)
            * (keep if isinstance(keep, float) else keep[:, i])
        )
        heads.append(torch.einsum("bqk,kbd->qbd", p, v[:, :, j]))
    return torch.cat(heads, dim=-1)


def outcome(function, *tensors):
    """The result, and the gradients of its sum with fixed weights."""
    tensors = [t.clone().requires_grad_() for t in tensors]
    out = function(*tensors)
    return [
        out.detach(),
        *torch.autograd.grad(out, tensors, draw(*out.shape, seed=9).to(out.dtype)),
    ]


def assert_near(ours, expected):
    # fp32 against fp64
    for mine, theirs in zip(ours, expected, strict=True):
        scale = theirs.abs().max().clamp_min(1)
        torch.testing.assert_close(
            mine.double() / scale, theirs / scale, rtol=0, atol=5e-6
        )


def inputs(s, n, g, with_sink):
    tensors = [draw(s, 2, n, 32), draw(s, 2, g, 32, seed=1), draw(s, 2, g, 32, seed=2)]
    return tensors + [draw(n, seed=3)] * with_sink


@pytest.mark.parametrize("sink", [False, True], ids=["plain", "sink"])
@pytest.mark.parametrize("pattern", WINDOWS, ids=str)
@pytest.mark.parametrize(
    "s, n, g, documents, padding",
    [
        (200, 4, 2, False, False),
        (333, 2, 2, True, False),
        (64, 2, 1, False, True),
        (90, 2, 2, True, True),
    ],
)
def test_every_path_equals_attention_written_out(
    s, n, g, documents, padding, pattern, sink
):
    ids = document_numbers(
        torch.rand(2, s, generator=torch.Generator().manual_seed(s)) < 0.02
    )
    closed = torch.zeros(2, s, dtype=torch.bool)
    closed[0, s - 9 :], closed[1, :7] = padding, padding
    apart = Documents(ids) if documents else None
    hidden = closed[:, None, None] | (apart.foreign if documents else False)
    tensors = inputs(s, n, g, sink)
    expected = outcome(
        lambda *t: written_out(*t, pattern=pattern, hidden=hidden),
        *[t.double() for t in tensors],
    )

    def chosen(q, k, v, b=None):
        return attention(
            q,
            k,
            v,
            visible=KeyVisibility(
                pattern, apart, closed[:, None, None] if padding else None
            ),
            scoring=Scoring(0.3, b),
        )

    def reference(q, k, v, b=None):
        return reference_attention(
            q,
            k,
            v,
            visible=KeyVisibility(pattern, mask=hidden),
            scoring=Scoring(0.3, b),
        )

    assert_near(outcome(reference, *tensors), expected)
    assert_near(outcome(chosen, *tensors), expected)
    with selected("torch"):
        assert_near(outcome(chosen, *tensors), expected)


def test_dropout_falls_on_probabilities_of_windows_and_sinks_as_on_others():
    s, pattern = 40, AttentionPattern(left=7)
    keep = KeepMask(
        0.3, sample_keys(1, "a", (0, 1)), heads=range(4), rows=range(s), cols=s
    )
    tensors = inputs(s, 4, 2, True)
    expected = outcome(
        lambda *t: written_out(*t, pattern=pattern, keep=keep.mask / 0.7),
        *[t.double() for t in tensors],
    )
    # the factor of dropout is in 24 bits
    assert_near(
        outcome(
            lambda q, k, v, b: attention(
                q,
                k,
                v,
                visible=KeyVisibility(pattern),
                keep=keep,
                scoring=Scoring(0.3, b),
            ),
            *tensors,
        ),
        expected,
    )


def test_each_layer_has_the_pattern_that_the_options_give_it():
    window = AttentionPattern(left=4)
    config = TinyConfig(num_layers=5, window_size=(4, 0), window_attn_skip_freq="2")
    assert patterns(config, True) == [window, CAUSAL, window, CAUSAL, window]
    config = TinyConfig(
        num_layers=5, window_size=(4, 0), window_attn_skip_freq="([1]+[0])*2+[0]"
    )
    assert patterns(config, True) == [window, CAUSAL, window, CAUSAL, CAUSAL]
    config = TinyConfig(num_layers=2, window_size=(-1, 3))
    assert patterns(config, False) == [AttentionPattern(False, None, 3)] * 2
    assert patterns(TinyConfig(), False) == [FULL] * 3


@pytest.mark.parametrize("left", [0, 1, 7, 39, 100])
def test_flops_of_a_window_are_those_of_its_scores(left):
    s, config = 40, TinyConfig()
    flops = lambda pattern: block_flops(config, 0, s, 0, pattern=pattern).scores
    seen = sum(min(i, left) + 1 for i in range(s))
    # half of a causal matrix, as Megatron counts it, leaves out half of the diagonal
    assert flops(AttentionPattern(left=left)) == pytest.approx(
        12 * 24 * (seen - min(left + 1, s) / 2)
    )
    assert flops(AttentionPattern(left=s)) == flops(CAUSAL) == flops(FULL) / 2
    both = sum(min(i, left) + 1 + min(s - 1 - i, left) for i in range(s))
    symmetric = flops(AttentionPattern(False, left, left)) / (12 * 24)
    assert abs(symmetric - both) <= s
