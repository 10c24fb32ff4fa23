"""Tiles cover what queries see, once, and nothing that all of them do not see; partial attention against an
explicit softmax, and the golden values of a merge."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from megatron_ds.batch.documents import Documents
from megatron_ds.extensions.kernels.cpu import compiled_attention
from megatron_ds.ops import attention_tiles, partial_attention
from megatron_ds.ops.alibi import Alibi, alibi_slopes
from megatron_ds.ops.attention_pattern import CAUSAL, FULL, AttentionPattern
from megatron_ds.ops.attention_tiles import Runs, TileLimits, tiles
from megatron_ds.ops.block_layout import BlockLayout
from megatron_ds.ops.key_visibility import KeyVisibility
from megatron_ds.ops.partial_attention import PartialAttention, PartialGradients
from megatron_ds.ops.scoring import Scoring
from tests.harness.plain_gpt import plain_slopes

pytestmark = pytest.mark.plan

LENGTH, SAMPLES, HEADS, GROUPS, CHANNELS = 24, 2, 4, 2, 8
ZIGZAG = [Runs((range(0, 6), range(18, 24))), Runs((range(6, 12), range(12, 18)))]


def blocks(size, heads):
    """About a third of the blocks."""
    draw = torch.Generator().manual_seed(size)
    return BlockLayout.of(
        size, torch.rand(heads, *[LENGTH // size] * 2, generator=draw).lt(0.35).numpy()
    )


PATTERNS = {
    "causal": CAUSAL,
    "full": FULL,
    "window": AttentionPattern(left=5),
    "both sides": AttentionPattern(causal=False, left=2, right=4),
    "blocks of heads": AttentionPattern(layout=blocks(4, HEADS)),
    "blocks": AttentionPattern(causal=False, layout=blocks(3, 1)),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    limits = TileLimits(rows=4, columns=5, rows_of_layout=5, gap=4)
    monkeypatch.setattr(attention_tiles, "LIMITS", limits)


def documents():
    ends = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    ends[0, 7] = ends[0, 13] = ends[1, 19] = 1
    return Documents(ends.cumsum(1) - ends)


def padding(start=20):
    return (torch.arange(LENGTH) >= start).expand(SAMPLES, 1, 1, -1)


def of_a_device(documents):
    """Documents whose boundaries are unknown."""
    return SimpleNamespace(
        ids=documents.ids, foreign=documents.foreign, boundaries=None
    )


def visible_of(pattern, hides):
    apart = of_a_device(documents()) if "unknown" in hides else documents()
    return KeyVisibility(
        PATTERNS[pattern],
        apart if "documents" in hides else None,
        padding() if "padding" in hides else None,
    )


def hidden_of(visible):
    """bool [b, 1 or n, s, s], from the definition."""
    here = torch.arange(LENGTH)
    far = here[None] - here[:, None]
    hidden = torch.zeros(SAMPLES, 1, LENGTH, LENGTH, dtype=torch.bool)
    pattern = visible.pattern
    if pattern.causal:
        hidden |= far > 0
    if pattern.left is not None:
        hidden |= far < -pattern.left
    if pattern.right is not None and not pattern.causal:
        hidden |= far > pattern.right
    if pattern.layout is not None:
        size = pattern.layout.block
        shown = torch.tensor(pattern.layout.seen)[
            :, here[:, None] // size, here // size
        ]
        hidden = hidden | ~shown
    if visible.documents is not None:
        hidden |= visible.documents.foreign
    return hidden if visible.mask is None else hidden | visible.mask


HIDES = ("", "documents", "padding", "documents, padding", "unknown documents")
CASES = [*itertools.product(PATTERNS, HIDES)]


@pytest.mark.parametrize("pattern, hides", CASES)
def test_tiles_cover_each_visible_element_once_and_skip_hidden_blocks(pattern, hides):
    visible = visible_of(pattern, hides)
    hidden, count = hidden_of(visible), torch.zeros(LENGTH, LENGTH, dtype=torch.long)
    for queries, keys in itertools.product(ZIGZAG, ZIGZAG):
        for tile in tiles(visible, queries, keys):
            rows, columns = (
                [*itertools.chain(*runs.ranges)][part]
                for runs, part in ((queries, tile.rows), (keys, tile.columns))
            )
            assert rows == [*tile.queries] and columns == [*tile.keys]
            there = hidden[:, :, rows][..., columns]
            mask = None if tile.is_whole else visible.hidden(tile.queries, tile.keys)
            assert torch.equal(
                there,
                torch.zeros_like(there) if mask is None else mask.expand_as(there),
            )
            count[
                tile.queries.start : tile.queries.stop, tile.keys.start : tile.keys.stop
            ] += 1
    assert count.max() == 1 and bool((count[~hidden.all(1).all(0)] == 1).all())
    if pattern != "full" or hides in ("documents", "documents, padding"):
        assert count.sum() < LENGTH * LENGTH


# ------------------------------------------------------------------------------ sequences of many tokens
TOKENS, RANKS = 1 << 17, 8


def known(*boundaries):
    """Documents of one sample, without ids."""
    return SimpleNamespace(boundaries=(boundaries,))


def drawn_boundaries(least, most):
    draw, at = torch.Generator().manual_seed(least), 0
    while (at := at + int(torch.randint(least, most + 1, (), generator=draw))) < TOKENS:
        yield at


def tiles_of_rank(visible, rank):
    """Over all keys, of a rank with two chunks."""
    chunk = TOKENS // (2 * RANKS)
    runs = [
        Runs(
            (
                range(i * chunk, (i + 1) * chunk),
                range(TOKENS - (i + 1) * chunk, TOKENS - i * chunk),
            )
        )
        for i in range(RANKS)
    ]
    return [tile for keys in runs for tile in tiles(visible, runs[rank], keys)]


@pytest.fixture
def large_tiles(small_tiles, monkeypatch):
    monkeypatch.setattr(attention_tiles, "LIMITS", TileLimits())


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("rank", range(RANKS))
def test_one_document_has_the_tiles_of_a_causal_mask(rank):
    found = tiles_of_rank(KeyVisibility(CAUSAL, known()), rank)
    assert len(found) == 17 and found == tiles_of_rank(KeyVisibility(CAUSAL), rank)


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("pattern", [CAUSAL, FULL])
@pytest.mark.parametrize("rank", [0, 5])
def test_long_documents_need_no_mask(pattern, rank):
    """Tiles are whole or triangles, and have each score of the documents once."""
    boundaries = (*drawn_boundaries(512, 9000),)
    # A part of a document in a chunk may be shorter than ROWS; here, none is.
    chunk = TOKENS // (2 * RANKS)
    boundaries = tuple(at for at in boundaries if 512 <= at % chunk <= chunk - 512)
    visible = KeyVisibility(pattern, known(*boundaries))
    found, edges = tiles_of_rank(visible, rank), [0, *boundaries, TOKENS]
    assert all(tile.is_whole or tile.is_triangle for tile in found)
    scores = sum(
        len(t.queries) * (len(t.keys) if t.is_whole else (len(t.keys) + 1) / 2)
        for t in found
    )
    own = (
        torch.arange(TOKENS)
        .view(2 * RANKS, chunk)[[rank, 2 * RANKS - 1 - rank]]
        .flatten()
    )
    number = torch.bucketize(own, torch.tensor(edges), right=True)
    first, last = (torch.tensor(edges)[number + i] for i in (-1, 0))
    assert scores == int((own + 1 if pattern.causal else last).sub(first).sum())


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("pattern", [CAUSAL, AttentionPattern(left=4095)])
def test_short_documents_share_tiles(pattern):
    """32 pieces of 512 queries see at most 30 keys before them, perhaps of another chunk."""
    assert (
        len(tiles_of_rank(KeyVisibility(pattern, known(*drawn_boundaries(10, 30))), 3))
        <= 2 * 32
    )
    in_one = tiles_of_rank(KeyVisibility(pattern, known()), 3)
    assert in_one == tiles_of_rank(KeyVisibility(pattern), 3) and len(in_one) <= 4 * 32
    assert len(in_one) < len(
        tiles_of_rank(KeyVisibility(pattern, SimpleNamespace(boundaries=None)), 3)
    )


def inputs(dtype=torch.float32, channels=CHANNELS):
    draw = torch.Generator().manual_seed(3)
    q, dout = (
        torch.randn(LENGTH, SAMPLES, HEADS, channels, generator=draw) for _ in range(2)
    )
    k, v = (
        torch.randn(LENGTH, SAMPLES, GROUPS, channels, generator=draw) for _ in range(2)
    )
    return [t.to(dtype) for t in (q, k, v, dout)]


def explicit(q, k, v, dout, hidden, keep=1.0, bias=0.0):
    """Output and gradients in fp64; 0 where a query sees nothing."""
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    queries = q.permute(1, 2, 0, 3)
    keys, values = (
        t.permute(1, 2, 0, 3).repeat_interleave(HEADS // GROUPS, 1) for t in (k, v)
    )
    scores = queries @ keys.transpose(2, 3) / math.sqrt(q.shape[-1]) + bias
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    p = p.masked_fill(hidden.all(-1, keepdim=True), 0.0) * keep
    out = (p @ values).permute(2, 0, 1, 3).flatten(2)
    out.backward(dout.double().flatten(2))
    return out.detach(), q.grad, k.grad, v.grad


def partial(q, k, v, dout, visible, keep=None, **of_scores):
    """The same over two blocks of keys, for the queries of each of two ranks."""
    scoring = Scoring(**of_scores)
    results = [torch.zeros_like(t, dtype=torch.float32) for t in (q, q, k, v)]
    for queries in ZIGZAG:
        rows = [*itertools.chain(*queries.ranges)]
        part = PartialAttention(q[rows], queries, visible, scoring, keep)
        blocks = [(keys, [*itertools.chain(*keys.ranges)]) for keys in ZIGZAG]
        for keys, columns in blocks:
            part.add(k[columns], v[columns], keys)
        out, sums = part.result()
        gradients = PartialGradients(
            q[rows],
            queries,
            visible,
            scoring,
            (out, sums),
            dout[rows].flatten(2),
            keep,
        )
        for keys, columns in blocks:
            dkv = torch.zeros(2, len(columns), SAMPLES, *k.shape[2:])
            gradients.add(k[columns], v[columns], keys, dkv)
            results[2][columns] += dkv[0]
            results[3][columns] += dkv[1]
        results[0][rows] = out.view_as(results[0][rows]).float()
        results[1][rows] = gradients.dq
    return results[0].flatten(2), *results[1:]


@pytest.mark.parametrize("pattern, hides", CASES)
def test_partial_attention_over_blocks_is_attention_over_all_keys(pattern, hides):
    visible, values = visible_of(pattern, hides), inputs()
    for ours, right in zip(
        partial(*values, visible), explicit(*values, hidden_of(visible)), strict=True
    ):
        torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=2e-6)


@pytest.mark.skipif(
    bool(compiled_attention.reason_against(torch.bfloat16)),
    reason="not compiled for bf16",
)
@pytest.mark.parametrize("pattern", ["causal", "full"])
def test_tiles_of_bf16_run_in_compiled_attention(pattern, monkeypatch):
    for name in ("_CPU", "_CPU_BACKWARD"):
        monkeypatch.setattr(partial_attention, name, None)
    values, visible = inputs(torch.bfloat16, 32), visible_of(pattern, "")
    for ours, right in zip(
        partial(*values, visible), explicit(*values, hidden_of(visible)), strict=True
    ):
        torch.testing.assert_close(ours.double(), right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "pattern, hides", [("causal", ""), ("full", "padding"), ("causal", "documents")]
)
@pytest.mark.parametrize("dropout", [False, True])
def test_alibi_is_added_tile_by_tile(pattern, hides, dropout):
    here, kept = (
        torch.arange(LENGTH),
        torch.ones(SAMPLES, HEADS, LENGTH, LENGTH, dtype=torch.bool),
    )
    kept[:, :, ::3, 1::4] = not dropout
    part = lambda run: slice(run.start, run.stop)
    keep = lambda tile: (kept[:, :, part(tile.queries), part(tile.keys)], 1.5)
    visible = visible_of(pattern, hides)
    added = {
        "alibi": Alibi(alibi_slopes(HEADS)),
        "keep": keep if dropout else None,
    }
    bias = (
        -(here - here[:, None]).abs().double()
        * torch.tensor(plain_slopes(HEADS))[:, None, None].double()
    )
    right = explicit(
        *inputs(), hidden_of(visible), kept * 1.5 if dropout else 1.0, bias
    )
    for ours, true in zip(partial(*inputs(), visible, **added), right, strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=1e-5, atol=1e-5)  # fp32


@pytest.mark.parametrize("columns", [1, 15, 16, 639])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_bias_are_aligned_and_its_values_are_those_of_the_mask(
    columns, dtype
):
    """torch's attention of GPUs refuses rows that do not begin at a multiple of 16 bytes."""
    draw = torch.Generator().manual_seed(columns)
    hidden = torch.rand(SAMPLES, 1, 7, columns, generator=draw) < 0.5
    falling = -torch.rand(1, HEADS, 7, columns, generator=draw)
    for parts in ((hidden, None), (None, falling), (hidden, falling)):
        right = sum(
            torch.zeros_like(part, dtype=dtype).masked_fill(part, -math.inf)
            if part.dtype == torch.bool
            else part.to(dtype)
            for part in parts
            if part is not None
        )
        bias = partial_attention._bias(*parts, dtype)
        assert torch.equal(bias, right) and bias.dtype == dtype
        assert bias.stride(3) == 1 and all(
            step * bias.itemsize % 16 == 0 for step in bias.stride()[:3]
        )
    assert partial_attention._bias(None, None, dtype) is None


def test_dropout_keeps_the_probabilities_that_its_mask_keeps():
    kept = (
        torch.rand(
            SAMPLES, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)
        )
        < 0.7
    )
    cut = lambda tile: (
        kept[
            :,
            :,
            tile.queries.start : tile.queries.stop,
            tile.keys.start : tile.keys.stop,
        ],
        1.5,
    )
    visible, values = KeyVisibility(CAUSAL, documents()), inputs()
    for ours, right in zip(
        partial(*values, visible, keep=cut),
        explicit(*values, hidden_of(visible), kept * 1.5),
        strict=True,
    ):
        torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=5e-6)


def test_sixteen_bits_are_merged_in_fp32():
    visible, values = KeyVisibility(CAUSAL), inputs(torch.bfloat16)
    for ours, right in zip(
        partial(*values, visible), explicit(*values, hidden_of(visible)), strict=True
    ):
        assert (ours - right).abs().max() < 0.02 * right.abs().max()


def test_a_query_without_any_key_has_zero_output_and_gradients():
    blind = KeyVisibility(FULL, mask=padding(0))
    assert not any(part.any() for part in partial(*inputs(), blind))


def test_the_golden_merge():
    """Output and log-sum-exp over keys 0 and 1, then over all four."""
    q = torch.tensor([[1.0, 2], [0.5, -1]])[:, None, None]
    k = torch.tensor([[1.0, 0], [0, 1], [-1, 1], [2, 0.5]])[:, None, None]
    v = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, -1]])[:, None, None]
    part = PartialAttention(q, Runs((range(2),)), KeyVisibility(FULL))
    part.add(k[:2], v[:2], Runs((range(2),)))
    out, sums = part.result()
    right = torch.tensor([[0.330238, 0.669762], [0.742817, 0.257183]])
    torch.testing.assert_close(out[:, 0], right, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        sums[0, 0], torch.tensor([1.815047, 0.650859]), rtol=0, atol=1e-6
    )
    part.add(k[2:], v[2:], Runs((range(2, 4),)))
    out, sums = part.result()
    right = torch.tensor([[1.256116, -0.133287], [1.252486, -0.158595]])
    torch.testing.assert_close(out[:, 0], right, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        sums[0, 0], torch.tensor([2.804065, 1.304958]), rtol=0, atol=1e-6
    )
    dkv = torch.zeros(2, 4, 1, 1, 2)
    gradients = PartialGradients(
        q,
        Runs((range(2),)),
        KeyVisibility(FULL),
        Scoring(),
        (out, sums),
        torch.tensor([[1.0, 0], [0.5, 1]])[:, None],
    )
    gradients.add(k, v, Runs((range(4),)), dkv)
    right = torch.tensor([[0.531506, -0.110632], [-0.315118, 0.055019]])
    torch.testing.assert_close(gradients.dq[:, 0, 0], right, rtol=0, atol=1e-6)
    dk = [
        [-0.017827, -0.053324],
        [-0.196097, -0.492861],
        [0.012025, -0.113028],
        [0.201899, 0.659213],
    ]
    dv = [
        [0.315929, 0.386198],
        [0.315969, 0.133712],
        [0.169775, 0.093891],
        [0.698328, 0.386198],
    ]
    torch.testing.assert_close(
        dkv[:, :, 0, 0], torch.tensor([dk, dv]), rtol=0, atol=1e-6
    )


def test_the_kernels_for_gpus_have_the_arguments_that_torch_takes():
    """On tensors without memory, which check names, types and shapes."""
    q, k, v, dout = (t.to("meta").permute(1, 2, 0, 3) for t in inputs())
    operands = partial_attention._Operands(
        q,
        k,
        v,
        Scoring(0.5),
        torch.zeros(SAMPLES, 1, LENGTH, LENGTH, device="meta"),
    )
    out, sums = partial_attention._gpu_forward(operands)
    assert out.shape == q.shape and sums.shape == q.shape[:3]
    final = partial_attention._Final(dout, out, sums)
    shapes = [t.shape for t in partial_attention._gpu_backward(operands, final)]
    assert shapes == [q.shape, k.shape, v.shape]
