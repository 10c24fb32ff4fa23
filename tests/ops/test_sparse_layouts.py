"""Sparse layouts equal DeepSpeed 0.19.6's; attention by blocks equals attention with the layout as a mask."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_ds.batch.documents import Documents, document_numbers
from megatron_ds.extensions.sparse_layouts.layer_layouts import sparse_layouts
from megatron_ds.extensions.sparse_layouts.sparse_layouts import (
    block_layout,
    keyed,
    layout,
)
from megatron_ds.extensions.sparse_layouts.sparse_options import SparseOptions
from megatron_ds.models.block import block_flops
from megatron_ds.ops.attention_pattern import AttentionPattern
from megatron_ds.ops.block_layout import BlockLayout
from megatron_ds.ops.core_attention import attention, reference_attention
from megatron_ds.ops.kernel_table import selected
from megatron_ds.ops.key_visibility import KeyVisibility
from megatron_ds.ops.scoring import Scoring
from tests.harness.plain_gpt import TinyConfig
from tests.ops.test_windows import assert_near, draw, outcome

pytestmark = pytest.mark.plan

# (options, causal, head) → rows of 8 blocks, "x n": the row n times. From DeepSpeed 0.19.6; random blocks by
# Python's random.seed(0).
GOLDEN = [
    ("fixed", dict(), False, 0, "11110001 x4 / 00011111 x4"),
    (
        "fixed",
        dict(),
        True,
        0,
        "10000000/11000000/11100000/11110000/00011000/00011100/00011110/00011111",
    ),
    (
        "fixed",
        dict(horizontal_global_attention=True),
        False,
        0,
        "11110001 x3 / 11111111 / 00011111 x3 / 11111111",
    ),
    *(
        (
            "fixed",
            dict(layout_per_head=True, num_different_global_patterns=4),
            True,
            head,
            f"10000000/11000000/11100000/11110000/{rows}",
        )
        for head, rows in enumerate(
            (
                "00011000/00011100/00011110/00011111",
                "00101000/00101100/00101110/00101111",
                "01001000/01001100/01001110/01001111",
                "10001000/10001100/10001110/10001111",
            )
        )
    ),
    ("variable", dict(), False, 0, "11110000 x4 / 10001111 x4"),
    (
        "variable",
        dict(local_window_blocks=(1, 2, 3)),
        True,
        0,
        "10000000/11000000/11100000/10010000/10011000/10011100/10000010/10000011",
    ),
    (
        "variable",
        dict(
            local_window_blocks=(2, 3),
            global_block_indices=(0,),
            global_block_end_indices=(2,),
            horizontal_global_attention=True,
        ),
        False,
        0,
        "11111111 x2 / 11111000 x3 / 11000111 x3",
    ),
    (
        "bigbird",
        dict(num_random_blocks=1),
        False,
        0,
        "11111111/11100010/11110000/10111000/10011101/10001110/10001111/10000011",
    ),
    (
        "bigbird",
        dict(num_random_blocks=1),
        True,
        0,
        "10000000/11000000/11100000/10110000/10011000/10011100/10010110/10001011",
    ),
    (
        "bigbird",
        dict(),
        False,
        0,
        "11111111/11100000/11110000/10111000/10011100/10001110/10000111/10000011",
    ),
    (
        "bslongformer",
        dict(),
        False,
        0,
        "11111111/11100000/11110000/10111000/10011100/10001110/10000111/10000011",
    ),
    (
        "bslongformer",
        dict(),
        True,
        0,
        "10000000/11000000/11100000/10110000/10011000/10001100/10000110/10000011",
    ),
    (
        "bslongformer",
        dict(global_block_indices=(0, 5)),
        False,
        0,
        "11111111/11100100/11110100/10111100/10011100/11111111/10000111/10000111",
    ),
    (
        "local",
        dict(),
        True,
        0,
        "10000000/11000000/01100000/00110000/00011000/00001100/00000110/00000011",
    ),
    (
        "local",
        dict(),
        False,
        0,
        "11000000/11100000/01110000/00111000/00011100/00001110/00000111/00000011",
    ),
    (
        "local",
        dict(num_sliding_window_blocks=4),
        True,
        0,
        "10000000/11000000/11100000/01110000/00111000/00011100/00001110/00000111",
    ),
    ("dense", dict(), False, 0, "11111111 x8"),
]


def options(mode, **more) -> SparseOptions:
    return SparseOptions(
        mode, **{f"sparse_{name}": value for name, value in more.items()}
    )


def rows_of(text: str) -> list[str]:
    rows = [row.strip().partition(" x") for row in text.split("/")]
    return [row for row, _, times in rows for _ in range(int(times or 1))]


def written(seen: np.ndarray) -> list[str]:
    return ["".join(str(int(x)) for x in row) for row in seen]


def by_python(seed: int):
    """DeepSpeed's way to draw, with its seed set."""
    generator = random.Random(seed)
    return lambda head, row, candidates, count: generator.sample(
        range(candidates), count
    )


@pytest.mark.parametrize(
    "mode, more, causal, head, golden",
    GOLDEN,
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else None,
)
def test_layouts_equal_deepspeeds(mode, more, causal, head, golden):
    seen = layout(options(mode, **more), 8, 4, causal, by_python(0))
    assert written(seen[head]) == rows_of(golden)
    assert more.get("layout_per_head") or (seen == seen[:1]).all()


def test_a_last_window_that_is_shorter_has_its_last_blocks_for_all():
    seen = layout(options("fixed"), 10, 1, False, keyed(10))[0]
    assert (
        written(seen) == rows_of("1111000101 x4 / 0001111101 x4 / 0001000111 x2")
        and seen.sum() == 56
    )


def test_a_causal_layout_has_nothing_above_the_diagonal_where_deepspeeds_has():
    """Two global blocks: DeepSpeed's second row of them sees the other, a later one."""
    deepspeeds = (
        "10000000/11000000/11110000/11110000/00111000/00111100/00111111/00111111"
    )
    seen = layout(options("fixed", num_global_blocks=2), 8, 1, True, keyed(8))[0]
    there = np.array([[int(x) for x in row] for row in rows_of(deepspeeds)], dtype=bool)
    assert np.array_equal(seen, np.tril(there)) and there.sum() == 30 == seen.sum() + 2


def test_rows_with_fewer_candidates_than_random_blocks_see_all_of_them():
    """DeepSpeed raises ValueError."""
    seen = layout(
        options("bigbird", num_random_blocks=3, num_sliding_window_blocks=1),
        9,
        1,
        True,
        keyed(9, 5),
    )[0]
    assert written(seen[:3]) == ["100000000", "110000000", "111000000"]
    assert {row.sum() for row in seen[4:]} <= {3, 4, 5} and not np.triu(seen, 1).any()
    # and variable ones of DeepSpeed see later blocks
    later = layout(options("variable", num_random_blocks=2), 9, 1, True, by_python(0))[
        0
    ]
    assert not np.triu(later, 1).any()


def test_random_blocks_are_functions_of_seed_layer_and_head():
    config = replace(
        TinyConfig(positions=64),
        sparse_attention="bigbird",
        sparse_block=4,
        sparse_num_random_blocks=2,
        sparse_layout_per_head=True,
    )
    name = "decoder.layers.1"
    ours = sparse_layouts().of_layer(config, name, 7, True)
    block_layout.cache_clear()
    assert np.array_equal(
        sparse_layouts().of_layer(config, name, 7, True).seen, ours.seen
    )
    assert not np.array_equal(
        sparse_layouts().of_layer(config, "decoder.layers.2", 7, True).seen, ours.seen
    )
    assert not np.array_equal(
        sparse_layouts().of_layer(config, name, 8, True).seen, ours.seen
    )
    assert not np.array_equal(ours.seen[0], ours.seen[1])
    halves = [ours.of_heads(range(first, first + 2)).seen for first in (0, 2)]
    assert np.array_equal(np.concatenate(halves), ours.seen)
    same = replace(config, sparse_layout_per_head=False)
    assert sparse_layouts().of_layer(same, name, 7, True).is_alike
    counts = [keyed(50, seed)(0, 20, 50, 1)[0] for seed in range(400)]
    assert len(set(counts)) > 45  # every block is drawn


CASES = [
    ("fixed", dict(), True),
    ("fixed", dict(layout_per_head=True, num_different_global_patterns=4), True),
    ("variable", dict(num_random_blocks=2, local_window_blocks=(1, 3)), False),
    ("bigbird", dict(num_random_blocks=2, layout_per_head=True), True),
    ("bigbird", dict(num_random_blocks=1), False),
    ("bslongformer", dict(global_block_indices=(0, 7)), True),
    ("local", dict(num_sliding_window_blocks=5), False),
    ("dense", dict(), True),
]


@pytest.mark.parametrize(
    "mode, more, causal", CASES, ids=[f"{c[0]}-{c[2]}" for c in CASES]
)
@pytest.mark.parametrize(
    "g, block, documents, padding, sink",
    [
        (4, 8, False, False, False),
        (2, 16, True, True, True),
        (2, 4, False, True, False),
    ],
)
def test_block_sparse_attention_equals_a_mask(
    g, block, documents, padding, sink, mode, more, causal
):
    s, n = 16 * block, 4
    chosen = BlockLayout.of(
        block, layout(options(mode, **more), 16, n, causal, keyed(16, 3))
    )
    pattern = AttentionPattern(causal, layout=chosen)
    ids = document_numbers(
        torch.rand(2, s, generator=torch.Generator().manual_seed(s)) < 0.02
    )
    closed = torch.zeros(2, s, dtype=torch.bool)
    closed[0, s - 9 :] = padding
    apart = Documents(ids) if documents else None
    seen = np.kron(chosen.seen, np.ones((block, block), dtype=bool))  # by element
    hidden = ~torch.from_numpy(seen)[None] | closed[:, None, None]
    hidden = hidden | apart.foreign if documents else hidden
    tensors = [draw(s, 2, n, 32), draw(s, 2, g, 32, seed=1), draw(s, 2, g, 32, seed=2)]
    tensors += [draw(n, seed=3)] * sink

    mask = closed[:, None, None] if padding else None

    def oracle(q, k, v, b=None):
        return reference_attention(
            q,
            k,
            v,
            visible=KeyVisibility(AttentionPattern(causal), mask=hidden),
            scoring=Scoring(None, b),
        )

    def called(q, k, v, b=None):
        return attention(
            q,
            k,
            v,
            visible=KeyVisibility(pattern, apart, mask),
            scoring=Scoring(None, b),
        )

    expected = outcome(oracle, *[t.double() for t in tensors])
    assert_near(outcome(called, *tensors), expected)
    with selected("torch"):
        assert_near(outcome(called, *tensors), expected)


def test_lengths_that_are_no_multiple_and_single_queries_take_the_mask():
    chosen = BlockLayout.of(8, layout(options("fixed"), 16, 2, True, keyed(16)))
    pattern = AttentionPattern(layout=chosen)
    q, k, v = draw(70, 1, 2, 16), draw(70, 1, 2, 16, seed=1), draw(70, 1, 2, 16, seed=2)
    whole = attention(q, k, v, visible=KeyVisibility(pattern))
    torch.testing.assert_close(
        whole,
        reference_attention(q, k, v, visible=KeyVisibility(pattern)),
        rtol=1e-5,
        atol=1e-5,
    )
    for at in (5, 40, 69):
        one = attention(
            q[at : at + 1], k[: at + 1], v[: at + 1], visible=KeyVisibility(pattern)
        )
        torch.testing.assert_close(one, whole[at : at + 1], rtol=1e-5, atol=1e-5)


def test_flops_are_those_of_the_blocks():
    config = TinyConfig()
    chosen = BlockLayout.of(
        4, layout(options("local", num_sliding_window_blocks=3), 8, 4, True, keyed(8))
    )
    scores = block_flops(
        config, 0, 32, 0, pattern=AttentionPattern(layout=chosen)
    ).scores
    assert scores == 12 * 24 * (8 * 16 / 2 + 7 * 16)
