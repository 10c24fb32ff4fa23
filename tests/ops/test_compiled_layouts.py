"""Compiled attention to the blocks of a layout computes what the probabilities written out say, no more."""

import pytest
import torch

from megatron_ds.batch.documents import Documents, document_numbers
from megatron_ds.extensions.kernels.cpu import compiled_attention
from megatron_ds.extensions.kernels.cpu.key_spans import UNIT, key_spans
from megatron_ds.extensions.sparse_layouts.sparse_layouts import keyed, layout
from megatron_ds.ops.attention_pattern import AttentionPattern
from megatron_ds.ops.attention_tiles import Runs
from megatron_ds.ops.block_layout import BlockLayout
from megatron_ds.ops.core_attention import attention, reference_attention
from megatron_ds.ops.key_visibility import KeyVisibility
from megatron_ds.ops.partial_attention import PartialAttention, PartialGradients
from megatron_ds.ops.scoring import Scoring
from tests.harness.instruction_sets import instruction_set  # noqa: F401
from tests.ops.test_sparse_layouts import options
from tests.ops.test_windows import draw, outcome

pytestmark = pytest.mark.plan

RUN = compiled_attention._run


def needs(dtype):
    reason = compiled_attention.reason_against(dtype)
    return pytest.mark.skipif(bool(reason), reason=reason or "-")


needs_kernel = needs(torch.float32)


def bounds(of_fp32, of_bf16):
    return [
        pytest.param(dtype, bound, marks=needs(dtype))
        for dtype, bound in ((torch.float32, of_fp32), (torch.bfloat16, of_bf16))
    ]


BIGBIRD = dict(num_random_blocks=2, num_sliding_window_blocks=3, layout_per_head=True)
CASES = {
    "fixed": (
        "fixed",
        dict(layout_per_head=True, num_different_global_patterns=4),
        True,
    ),
    "bigbird": ("bigbird", BIGBIRD, True),
    "both directions": ("bigbird", BIGBIRD, False),
    "local": ("local", dict(num_sliding_window_blocks=5), False),
    "dense": ("dense", {}, True),
}


def pattern_of(case: str, block: int, blocks: int, heads: int) -> AttentionPattern:
    mode, more, causal = CASES[case]
    seen = layout(options(mode, **more), blocks, heads, causal, keyed(blocks, 3))
    return AttentionPattern(causal, layout=BlockLayout.of(block, seen))


@pytest.mark.parametrize("dtype, bound", bounds(3e-6, 8e-3))
@pytest.mark.parametrize(
    "block, g, d, hides", [(16, 4, 64, False), (32, 2, 32, True), (48, 1, 96, True)]
)
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_equal_those_of_a_mask(
    case, block, g, d, hides, dtype, bound
):
    """Grouped keys, documents, padding and sinks where something hides; the last tile has fewer rows."""
    s, n = 9 * block, 4
    pattern = pattern_of(case, block, 9, n)
    apart = Documents(document_numbers(draw(2, s).abs() < 0.02)) if hides else None
    padding = (
        (torch.arange(s) >= s - 21)[None, None, None].expand(2, 1, 1, s)
        if hides
        else None
    )
    tensors = [
        draw(s, 2, heads, d, seed=i).to(dtype) for i, heads in enumerate((n, g, g))
    ]
    tensors += [draw(n, seed=3)] * hides

    def ours(q, k, v, sink=None):
        assert compiled_attention.suits(q, k, pattern)
        return attention(
            q,
            k,
            v,
            visible=KeyVisibility(pattern, documents=apart, mask=padding),
            scoring=Scoring(None, sink),
        )

    def oracle(q, k, v, sink=None):
        hidden = apart.foreign | padding if hides else None
        return reference_attention(
            q,
            k,
            v,
            visible=KeyVisibility(pattern, mask=hidden),
            scoring=Scoring(None, sink),
        )

    expected = outcome(oracle, *[t.double() for t in tensors])
    for mine, theirs in zip(outcome(ours, *tensors), expected, strict=True):
        assert (mine.double() - theirs).norm() <= bound * theirs.norm()


@needs_kernel
def test_rows_that_see_nothing_are_zero_and_move_nothing():
    seen = torch.eye(4, dtype=torch.bool)[None].clone()
    seen[0, 2, 2] = False
    pattern = AttentionPattern(False, layout=BlockLayout.of(32, seen.numpy()))
    tensors = [draw(128, 1, 2, 32, seed=i) for i in range(3)]
    out, *gradients = outcome(
        lambda q, k, v: attention(q, k, v, visible=KeyVisibility(pattern)), *tensors
    )
    assert not out[64:96].any() and out[:64].all() and out[96:].all()
    assert all(not dx[64:96].any() and dx.isfinite().all() for dx in gradients)


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=needs(dtype))
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_any_number_of_threads_and_any_strides_give_the_same_bits(dtype):
    pattern = pattern_of("fixed", 16, 20, 3)
    packed = draw(320, 2, 3, 3, 32).to(dtype)  # as of one projection
    call = lambda *tensors: attention(*tensors, visible=KeyVisibility(pattern))
    one = outcome(call, *[packed[:, :, :, i].contiguous() for i in range(3)])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        leaf = packed.clone().requires_grad_()
        out = call(*leaf.unbind(3))
        out.backward(draw(*out.shape, seed=9).to(dtype))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, one[0])
    assert all(torch.equal(leaf.grad[:, :, :, i], one[1 + i]) for i in range(3))


RUNS = {
    True: [Runs((range(48), range(144, 192))), Runs((range(48, 96), range(96, 144)))],
    False: [Runs((range(96),)), Runs((range(96, 192),))],
}


@needs_kernel
@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("dtype, bound", bounds(3e-6, 1e-2))
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_keys_compute_what_one_does(
    case, dtype, bound, hides, monkeypatch
):
    """The queries of two ranks, zigzag where causal, with one block of keys after the other."""
    pattern, (q, k, v, dout) = (
        pattern_of(case, 32, 6, 4),
        (
            draw(192, 2, heads, 32, seed=i).to(dtype)
            for i, heads in enumerate((4, 2, 2, 4))
        ),
    )
    apart = Documents(document_numbers(draw(2, 192).abs() < 0.02))
    padding = (
        (torch.arange(192) >= 185)[None, None, None].expand(2, 1, 1, 192)
        if hides
        else None
    )
    settings = (
        KeyVisibility(pattern, apart if hides else None, padding),
        Scoring(32**-0.5),
    )
    ways = []
    monkeypatch.setattr(
        compiled_attention,
        "_run",
        lambda name, *more: (ways.append(name), RUN(name, *more)),
    )
    ours = [torch.zeros(t.shape) for t in (q, q, k, v)]
    for queries in RUNS[pattern.causal]:
        rows = [i for run in queries.ranges for i in run]
        blocks = [
            (keys, [i for run in keys.ranges for i in run])
            for keys in RUNS[pattern.causal]
        ]
        partial = PartialAttention(q[rows], queries, *settings)
        for keys, columns in blocks:
            partial.add(k[columns], v[columns], keys)
        result = partial.result()
        parts = PartialGradients(
            q[rows], queries, *settings, result, dout[rows].flatten(2)
        )
        for keys, columns in blocks:
            dkv = torch.zeros(2, *k[columns].shape)
            parts.add(k[columns], v[columns], keys, dkv)
            ours[2][columns], ours[3][columns] = (
                ours[2][columns] + dkv[0],
                ours[3][columns] + dkv[1],
            )
        ours[0][rows], ours[1][rows] = result[0].view_as(q[rows]).float(), parts.dq
    hidden = apart.foreign | padding if hides else None
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out = reference_attention(*leaves, visible=KeyVisibility(pattern, mask=hidden))
    theirs = (
        out.view(q.shape),
        *torch.autograd.grad(out, leaves, dout.double().flatten(2)),
    )
    assert {"forward", "add_gradients"} == {*ways}
    for mine, right in zip(ours, theirs, strict=True):
        assert (mine.double() - right).norm() <= bound * right.norm()


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("case", CASES)
def test_spans_are_the_scores_that_a_layout_shows(case, block):
    """Each once, none in vain but those above the diagonal of a unit."""
    heads, blocks = 4, 9
    pattern = pattern_of(case, block, blocks, heads)
    plan = key_spans(pattern, *[range(block * blocks)] * 2, heads)
    units, (count,) = block * blocks // UNIT, {len(first) - 1 for first in plan.first}
    assert count == -(-units // 4)
    for head, number in enumerate(plan.layout_of_head):
        times = torch.zeros(units, units, dtype=torch.int64)
        for tile in range(count):
            for start, stop, low, high in plan.spans[
                plan.first[number][tile] : plan.first[number][tile + 1]
            ]:
                for register in range(4 * tile + low, 4 * tile + high):
                    times[
                        register, torch.from_numpy(plan.units[start:stop]).long()
                    ] += 1
        seen = torch.tensor(pattern.layout.of_heads(range(head, head + 1)).seen[0])
        each = block // UNIT
        seen = seen.repeat_interleave(each, 0).repeat_interleave(each, 1).long()
        assert torch.equal(times, seen.tril() if pattern.causal else seen)


@needs_kernel
def test_what_the_kernel_does_not_take_is_left_to_others():
    pattern, q = pattern_of("local", 16, 9, 2), draw(144, 1, 2, 32)
    assert compiled_attention.suits(q, q, pattern)
    others = [
        (q[:1], q, pattern),
        (q[:, :, :, :24], q[:, :, :, :24], pattern),
        (q.half(), q.half(), pattern),
        (q, q, AttentionPattern(layout=pattern.layout, left=9)),
        (q, q, pattern_of("local", 24, 6, 2)),
        (q[:100], q[:100], pattern),
    ]
    assert not any(compiled_attention.suits(*other) for other in others)
