"""AttentionPattern: ranges of keys, full blocks and masks against the definition, element by element."""

import itertools

import pytest
import torch

from megatron_ds.ops.attention_pattern import CAUSAL, FULL, AttentionPattern
from megatron_ds.ops.visible_blocks import Parts, visible_blocks

pytestmark = pytest.mark.plan

PATTERNS = [
    CAUSAL,
    FULL,
    AttentionPattern(left=2),
    AttentionPattern(causal=False, left=1, right=2),
    AttentionPattern(causal=False, right=0),
    AttentionPattern(left=0),
]


def sees(pattern, query, key):
    if pattern.causal and key > query:
        return False
    if pattern.left is not None and key < query - pattern.left:
        return False
    return pattern.right is None or pattern.causal or key <= query + pattern.right


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_answers_agree_with_the_definition(pattern):
    runs = [range(a, b) for a, b in itertools.combinations(range(8), 2)]
    for queries, keys in itertools.product(runs, runs):
        seen = torch.tensor([[sees(pattern, q, k) for k in keys] for q in queries])
        columns = [k for k, column in zip(keys, seen.T, strict=True) if column.any()]
        part = pattern.keys_of(queries, keys)
        assert list(part) == (
            list(range(columns[0], columns[-1] + 1)) if columns else []
        )
        blocks = visible_blocks(pattern, *(Parts.of(run, 8) for run in (queries, keys)))
        assert bool(blocks.whole.all()) == bool(seen.all())
        assert bool(blocks.seen.any()) == bool(seen.any())
        hidden = pattern.hidden(torch.tensor(list(queries)), torch.tensor(list(keys)))
        assert seen.all() if hidden is None else torch.equal(hidden, ~seen)
