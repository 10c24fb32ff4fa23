"""Values that are narrower or wider than keys: each implementation of attention computes them, or declines."""

import itertools

import pytest
import torch

from megatron_ds.ops.attention_pattern import CAUSAL, FULL, AttentionPattern
from megatron_ds.ops.attention_tiles import Runs
from megatron_ds.ops.core_attention import attention
from megatron_ds.ops.dropout import KeepMask, sample_keys
from megatron_ds.ops.keep_tables import keep_scale
from megatron_ds.ops.kernel_table import load_kernels
from megatron_ds.ops.key_visibility import KeyVisibility
from megatron_ds.ops.partial_attention import PartialAttention, PartialGradients
from megatron_ds.ops.scoring import PLAIN, Scoring

pytestmark = pytest.mark.plan

LENGTH, SAMPLES, HEADS, GROUPS = 24, 2, 4, 2
WIDTHS = [(6, 4), (4, 6), (64, 32), (32, 64), (64, 64)]
WINDOW = AttentionPattern(True, 5)
IDS = torch.tensor([3, 7])


def dropped():
    keys = sample_keys(1, "site", IDS)
    rows = range(LENGTH)
    cpu = torch.device("cpu")
    return KeepMask(0.3, keys, range(HEADS), rows, LENGTH, None, cpu)


# name → (visible, keep, scoring)
CASES = {
    "causal": (KeyVisibility(CAUSAL), None, PLAIN),
    "full": (KeyVisibility(FULL), None, PLAIN),
    "window": (KeyVisibility(WINDOW), None, PLAIN),
    "scale": (KeyVisibility(CAUSAL), None, Scoring(scale=0.3)),
    "cap": (KeyVisibility(CAUSAL), None, Scoring(cap=0.7)),
    "sink": (KeyVisibility(WINDOW), None, Scoring(sink=torch.arange(4.0) - 1)),
    "dropout": (KeyVisibility(CAUSAL), dropped(), PLAIN),
}


def inputs(width, of_values):
    """q, k, v and the gradient of the output."""
    draw = torch.Generator().manual_seed(3)
    shapes = (HEADS, width), (GROUPS, width), (GROUPS, of_values), (HEADS, of_values)
    return [torch.randn(LENGTH, SAMPLES, *of, generator=draw) for of in shapes]


def written_out(q, k, v, dout, visible, keep, scoring):
    """Output and gradients in fp64."""
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    queries = q.permute(1, 2, 0, 3)
    spread = (t.repeat_interleave(HEADS // GROUPS, 2) for t in (k, v))
    keys, values = (t.permute(1, 2, 0, 3) for t in spread)
    scores = queries @ keys.transpose(2, 3) * (scoring.scale or q.shape[3] ** -0.5)
    if scoring.cap is not None:
        scores = scoring.cap * (scores / scoring.cap).tanh()
    places = torch.arange(LENGTH)
    distance = places[:, None] - places
    hidden = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    if visible.pattern.causal:
        hidden |= distance < 0
    if visible.pattern.left is not None:
        hidden |= distance > visible.pattern.left
    scores = scores.masked_fill(hidden, -torch.inf)
    if scoring.sink is not None:
        column = scoring.sink.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    p = scores.softmax(-1)[..., :LENGTH]
    if keep is not None:
        p = p * keep.mask * keep_scale(keep.p)
    out = (p @ values).permute(2, 0, 1, 3)
    out.backward(dout.double())
    return out.detach().flatten(2), q.grad, k.grad, v.grad


def computed(function, q, k, v, dout, visible, keep, scoring):
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = function(*leaves, visible, keep=keep, scoring=scoring)
    out.backward(dout.flatten(2))
    return out.detach(), *(t.grad for t in leaves)


def agree(found, right):
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=5e-6)


def takes(entry, *arguments, **named):
    return entry.suits(*arguments, **named) and not entry.fits(*arguments, **named)


@pytest.mark.parametrize("width, of_values", WIDTHS)
@pytest.mark.parametrize("case", CASES)
def test_each_implementation_computes_these_widths_or_declines(case, width, of_values):
    load_kernels("cpu")
    visible, keep, scoring = CASES[case]
    q, k, v, dout = inputs(width, of_values)
    right = written_out(q, k, v, dout, visible, keep, scoring)
    agree(computed(attention, q, k, v, dout, visible, keep, scoring), right)
    ran = []
    for entry in attention.implementations:
        runs_here = entry.devices is None or "cpu" in entry.devices
        has_dtype = entry.dtypes is None or torch.float32 in entry.dtypes
        if not (runs_here and has_dtype) or entry.available():
            continue
        if takes(entry, q, k, v, visible, keep=keep, scoring=scoring):
            ran.append(entry.name)
            own = computed(entry.function, q, k, v, dout, visible, keep, scoring)
            agree(own, right)
    written = keep is not None or scoring.cap or scoring.sink is not None
    assert ("padded" in ran) == (width != of_values and not written) and "torch" in ran


def test_kernels_of_gpus_decline_other_widths():
    from megatron_ds.extensions.kernels.gpu.flex_attention import fits

    q, k, v, _ = inputs(64, 32)
    assert "64 and 32 channels" in fits(q, k, v)
    assert fits(q, k, k) == ""


def in_blocks(q, k, v, dout, visible, keep, scoring):
    """Output and gradients of two runs of queries, by two blocks of keys each."""
    half = LENGTH // 2
    runs = [Runs((range(half),)), Runs((range(half, LENGTH),))]
    keep_tile = None
    if keep is not None:
        keep_tile = lambda tile: (
            keep.mask[
                :,
                :,
                tile.queries.start : tile.queries.stop,
                tile.keys.start : tile.keys.stop,
            ],
            keep_scale(keep.p),
        )
    results = [torch.zeros_like(t) for t in (dout, q, k, v)]
    for queries in runs:
        rows = [*itertools.chain(*queries.ranges)]
        part = PartialAttention(
            q[rows], queries, visible, scoring, keep_tile, v.shape[3]
        )
        blocks = [(keys, [*itertools.chain(*keys.ranges)]) for keys in runs]
        for keys, columns in blocks:
            part.add(k[columns], v[columns], keys)
        result = part.result()
        gradients = PartialGradients(
            q[rows], queries, visible, scoring, result, dout[rows].flatten(2), keep_tile
        )
        for keys, columns in blocks:
            totals = [torch.zeros_like(t[columns]) for t in (k, v)]
            gradients.add(k[columns], v[columns], keys, totals)
            results[2][columns] += totals[0]
            results[3][columns] += totals[1]
        results[0][rows] = result[0].view_as(results[0][rows])
        results[1][rows] = gradients.dq
    return results[0].flatten(2), *results[1:]


@pytest.mark.parametrize("width, of_values", WIDTHS)
@pytest.mark.parametrize("case", CASES)
def test_blocks_of_keys_give_these_widths(case, width, of_values):
    """Context-parallel ranks attend by such tiles, of torch's kernel of CPUs; the oracle is written out."""
    visible, keep, scoring = CASES[case]
    tensors = inputs(width, of_values)
    settings = visible, keep, scoring
    agree(in_blocks(*tensors, *settings), written_out(*tensors, *settings))
