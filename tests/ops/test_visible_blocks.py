"""Blocks of any size against their elements: seen where one is visible, whole where all are."""

import itertools

import numpy as np
import pytest
import torch

from megatron_ds.batch.documents import Documents, boundaries_of
from megatron_ds.errors import LayoutError
from megatron_ds.ops.attention_pattern import CAUSAL, FULL, AttentionPattern
from megatron_ds.ops.block_layout import BlockLayout
from megatron_ds.ops.key_visibility import KeyVisibility
from megatron_ds.ops.visible_blocks import Parts, keys_seen, of_ids, visible_blocks

pytestmark = pytest.mark.plan

LENGTH = 48
DRAW = np.random.default_rng(1)
PATTERNS = [
    CAUSAL,
    FULL,
    AttentionPattern(left=0),
    AttentionPattern(left=7),
    AttentionPattern(causal=False, left=3, right=5),
    AttentionPattern(causal=False, right=0),
    AttentionPattern(False, layout=BlockLayout.of(4, DRAW.random((3, 12, 12)) < 0.5)),
    AttentionPattern(False, layout=BlockLayout.of(16, DRAW.random((1, 3, 3)) < 0.5)),
]
IDS = torch.tensor([[0] * 5 + [1] * 20 + [2] * 23, [0] * 16 + [1] * 1 + [2] * 31])
RUNS = [
    (range(LENGTH), range(LENGTH)),
    (range(16, 40), range(32)),
    (range(4), range(8)),
]


def elements(pattern, queries, keys, documents):
    """bool [n or 1, q, k]: visible in some sample, and in all."""
    hidden = KeyVisibility(pattern, documents).hidden(queries, keys)
    if hidden is None:
        hidden = torch.zeros(1, 1, len(queries), len(keys), dtype=torch.bool)
    visible = ~hidden.numpy()
    return visible.any(0), visible.all(0)


@pytest.mark.parametrize("rows, columns", [(16, 16), (5, 3), (1, 48), (48, 1), (7, 16)])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_blocks_are_those_of_their_elements(pattern, apart, rows, columns):
    documents = Documents(IDS) if apart else None
    boundaries = boundaries_of(IDS) if apart else None
    for queries, keys in RUNS:
        parts = Parts.of(queries, rows), Parts.of(keys, columns)
        found = visible_blocks(pattern, *parts, boundaries)
        some, every = elements(pattern, queries, keys, documents)
        for i, j in np.ndindex(*found.seen.shape[1:]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            seen = some[:, *at].any((1, 2))
            assert np.array_equal(found.whole[:, i, j], every[:, *at].all((1, 2)))
            # A pattern and documents may hide a block between them, which is then computed with a mask.
            assert not (seen & ~found.seen[:, i, j]).any()
            assert apart or np.array_equal(seen, found.seen[:, i, j])


@pytest.mark.parametrize("size", [4, 16, 32])
def test_blocks_of_ids_are_those_of_boundaries(size):
    parts = Parts.of(range(LENGTH), size)
    of_host = visible_blocks(FULL, parts, parts, boundaries_of(IDS))
    of_device = of_ids(IDS, size)
    assert np.array_equal(of_device.seen.any(0).numpy(), of_host.seen)
    assert np.array_equal(of_device.whole.all(0).numpy(), of_host.whole)


@pytest.mark.parametrize("pattern", PATTERNS[:-2], ids=str)
@pytest.mark.parametrize("apart", [False, True])
def test_keys_that_are_left_out_are_seen_by_no_query(pattern, apart):
    documents, boundaries = (
        (Documents(IDS), boundaries_of(IDS)) if apart else (None,) * 2
    )
    runs = [range(*ends) for ends in itertools.combinations((0, 3, 5, 17, 30, 48), 2)]
    for queries, keys in itertools.product(runs, runs):
        some, _ = elements(pattern, queries, keys, documents)
        columns = some.any((0, 1)).nonzero()[0] + keys.start
        seen = keys_seen(pattern, boundaries, queries, keys)
        assert not len(columns) or seen.start <= columns[0] <= columns[-1] < seen.stop
        assert (
            apart
            or [*seen][:: max(1, len(seen) - 1)]
            == [*columns][:: max(1, len(columns) - 1)]
        )


def test_positions_that_a_layout_does_not_have_are_an_error():
    parts = Parts.of(range(LENGTH + 1), 16)
    with pytest.raises(
        LayoutError, match="49 tokens does not fit a sparse layout of 48"
    ):
        visible_blocks(PATTERNS[-1], parts, parts)


def test_a_mask_has_rows_of_all_positions_or_of_the_queries_that_attend():
    of_all = (
        torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0))
        < 0.5
    )
    last = range(40, LENGTH)
    rows = KeyVisibility(FULL, mask=of_all[:, :, 40:]).hidden(last, range(LENGTH))
    assert torch.equal(rows, of_all[:, :, 40:])
    assert torch.equal(
        rows, KeyVisibility(FULL, mask=of_all).hidden(last, range(LENGTH))
    )
    padding = of_all[:, :, :1]
    hidden = KeyVisibility(FULL, mask=padding).hidden(last, range(3, 9))
    assert torch.equal(hidden, padding[..., 3:9])
