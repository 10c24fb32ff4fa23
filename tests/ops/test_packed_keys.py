"""Compiled attention packs a key once for the queries that see it, in as little memory as they need."""

import pytest
import torch

from megatron_ds.batch.documents import Documents, document_numbers
from megatron_ds.extensions.kernels.cpu import compiled_attention as module
from megatron_ds.extensions.kernels.cpu.key_spans import UNIT, key_spans
from megatron_ds.ops.attention_pattern import CAUSAL, FULL, AttentionPattern
from megatron_ds.ops.core_attention import attention, reference_attention
from megatron_ds.ops.key_visibility import KeyVisibility
from tests.harness.instruction_sets import instruction_set  # noqa: F401
from tests.ops.test_compiled_attention import (
    assert_near,
    both_dtypes,
    draw,
    gradients,
    projected,
)
from tests.ops.test_compiled_layouts import pattern_of

pytestmark = pytest.mark.plan

S = 432
PATTERNS = {
    "causal": CAUSAL,
    "all": FULL,
    "window of 20": AttentionPattern(left=20),
    "window of 150": AttentionPattern(left=150),
    "both sides": AttentionPattern(False, 40, 90),
    **{
        case: pattern_of(case, 16, S // 16, 2)
        for case in ("fixed", "bigbird", "local", "dense")
    },
}


@both_dtypes
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    "packed_keys, threads", [(64, 1), (160, 1), (400, 1), (160, 5), (400, 16)]
)
@pytest.mark.parametrize("case", PATTERNS)
def test_with_memory_for_fewer_keys_it_computes_the_same(
    case, packed_keys, threads, apart, dtype, monkeypatch
):
    """On threads that divide heads, too."""
    pattern, documents = PATTERNS[case], None
    s = S - 5 if pattern.layout is None else S
    if apart:
        documents = Documents(document_numbers(draw(1, s).abs() < 0.02))
    packed, heads = projected(s, 2, 2, 64, samples=1, dtype=dtype)
    monkeypatch.setattr(module, "_packed_keys", lambda *_: packed_keys)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    out = attention(*heads, visible=KeyVisibility(pattern, documents=documents))
    expected = reference_attention(
        *(t.double() for t in heads),
        visible=KeyVisibility(pattern, mask=documents.foreign if apart else None),
    )
    assert_near(
        [out, *gradients(out, [packed])], [expected, *gradients(expected, [packed])]
    )


def tiles_of(plan, layout):
    """The units that each tile sees."""
    first = plan.first[layout]
    spans = [plan.spans[first[i] : first[i + 1]] for i in range(len(first) - 1)]
    return [
        {unit for start, stop, *_ in some for unit in plan.units[start:stop].tolist()}
        for some in spans
    ]


@pytest.mark.parametrize(
    "queries, keys",
    [
        (range(S), range(S)),
        (range(160, S), range(S)),
        (range(S), range(64, 272)),
        (range(208, 416), range(0, 208)),
    ],
)
@pytest.mark.parametrize("case", PATTERNS)
def test_units_live_from_the_first_tile_that_sees_them_to_the_last(case, queries, keys):
    plan = key_spans(PATTERNS[case], queries, keys, heads=2)
    for layout, live in enumerate(plan.live.tolist()):
        tiles, times = tiles_of(plan, layout), {}
        for number, units in enumerate(tiles):
            for unit in units:
                times.setdefault(unit, []).append(number)
        last = [times.get(unit, [-1])[-1] for unit in range(-(-len(keys) // UNIT))]
        assert plan.last_tile[layout].tolist() == last
        assert live == max(
            sum(t[0] <= i <= t[-1] for t in times.values()) for i in range(len(tiles))
        )


@pytest.mark.parametrize(
    "pattern, live",
    [
        (CAUSAL, 64),
        (AttentionPattern(left=0), 4),
        (AttentionPattern(left=160), 14),
        (AttentionPattern(False, 16, 32), 7),
        (pattern_of("local", 16, 64, 1), 8),
    ],
)
def test_of_a_window_the_units_of_a_tile_live(pattern, live):
    assert key_spans(pattern, range(1024), range(1024), heads=1).live.max() == live


@both_dtypes
@pytest.mark.parametrize(
    "case", ["window of 150", "both sides", "fixed", "bigbird", "local"]
)
def test_bits_do_not_depend_on_threads(case, dtype, monkeypatch):
    """A thread that begins with a later tile gives units other slots."""
    packed, heads = projected(S, 2, 2, 64, samples=1, dtype=dtype)
    results = []
    for threads in (1, 5, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        out = attention(*heads, visible=KeyVisibility(PATTERNS[case]))
        results.append([out.detach(), *gradients(out, [packed])])
    assert all(
        torch.equal(*pair)
        for other in results[1:]
        for pair in zip(results[0], other, strict=True)
    )


@both_dtypes
@pytest.mark.parametrize("left", [1023, 4095])
def test_there_is_memory_for_windows_of_usual_sizes(left, dtype):
    pattern, s = AttentionPattern(left=left), 2**19
    q = torch.empty(s, 1, 1, 64, dtype=dtype, device="meta")
    live = key_spans(pattern, range(2 * left), range(2 * left), heads=1).live.max()
    assert live * UNIT <= module._packed_keys("forward", q, q, pattern)
    assert left > 1023 or live * UNIT <= module._packed_keys("backward", q, q, pattern)


@both_dtypes
def test_of_long_sequences_memory_holds_what_windows_see(dtype):
    """Not the keys and values of 512k tokens, 256 MiB in fp32: each thread would hold a copy of a head."""
    count = getattr(module.functions(dtype), f"forward_bytes_{module.NAMES[dtype]}")
    s = 2**19
    q = torch.empty(s, 1, 1, 64, dtype=dtype, device="meta")
    packed_keys = module._packed_keys("forward", q, q, CAUSAL)
    held = count((s, s, 1, 1, 1, 64, packed_keys))
    assert (
        module.SOME_KEYS / 2 < held < module.SOME_KEYS + 2**19
        and UNIT * 16 < packed_keys < s
    )
