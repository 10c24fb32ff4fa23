"""FlexAttention: its tiles and masks, its results and gradients without a GPU, and when it is chosen.

torch computes flex_attention on CPUs, too: written out, with the masks but without the tiles, forward and
backward (torch refuses the backward before it comes to the formula; `without_refusal`), and compiled with the
tiles, forward only. Triton's kernels need a GPU: tests/gpu/test_flex_attention.py.
"""

import logging
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as of_torch
from torch._dynamo.testing import CompileCounterWithBackend

from megatron_ds.batch.documents import Documents, document_numbers
from megatron_ds.extensions.kernels.gpu import flex_attention, flex_check, flex_choice
from megatron_ds.extensions.sparse_layouts.sparse_layouts import keyed, layout
from megatron_ds.ops import kernel_table
from megatron_ds.ops.alibi import Alibi, alibi_slopes
from megatron_ds.ops.attention_pattern import CAUSAL, FULL, AttentionPattern
from megatron_ds.ops.block_layout import BlockLayout
from megatron_ds.ops.core_attention import attention, reference_attention
from megatron_ds.ops.dropout import KeepMask, sample_keys
from megatron_ds.ops.kernel_table import selected
from megatron_ds.ops.key_visibility import KeyVisibility
from megatron_ds.ops.scoring import PLAIN, Scoring
from tests.harness.fake_cuda import FakeGpu, fake_cuda
from tests.ops.test_sparse_layouts import CASES, options
from tests.ops.test_windows import assert_near, draw, outcome

pytestmark = [pytest.mark.plan, pytest.mark.one_in(4)]

HEADS, CPU = 4, torch.device("cpu")
WINDOWS = [
    CAUSAL,
    FULL,
    AttentionPattern(left=20),
    AttentionPattern(left=0),
    AttentionPattern(left=300),
    AttentionPattern(False, 10, 150),
    AttentionPattern(False, None, 5),
    AttentionPattern(False, 200, 0),
]


def name_of(case):
    return f"{case[0]}-{case[2]}" if isinstance(case, tuple) else repr(case)


def pattern_of(case, block, positions, key=3):
    mode, more, causal = case
    blocks = -(-positions // block)
    seen = layout(options(mode, **more), blocks, HEADS, causal, keyed(blocks, key))
    return AttentionPattern(causal, layout=BlockLayout.of(block, seen))


def seen_by_element(pattern, positions):
    """bool [n or 1, positions, positions], written out."""
    distance = np.arange(positions) - np.arange(positions)[:, None]
    before, after = (
        positions if side is None else side for side in (pattern.left, pattern.right)
    )
    seen = ((distance >= -before) & (distance <= (0 if pattern.causal else after)))[
        None
    ]
    if pattern.layout is not None:
        one = np.ones((pattern.layout.block, pattern.layout.block), dtype=bool)
        seen = seen & np.kron(pattern.layout.seen, one)[:, :positions, :positions]
    return seen


def by_tile(seen, with_tail):
    """[n, tiles, tiles, 128, 128] of elements; with_tail: value of positions behind the last."""
    more = -seen.shape[-1] % 128
    seen = np.pad(seen, ((0, 0), (0, more), (0, more)), constant_values=with_tail)
    count = seen.shape[-1] // 128
    return seen.reshape(-1, count, 128, count, 128).transpose(0, 1, 3, 2, 4)


@pytest.mark.parametrize("case", [*CASES, *WINDOWS], ids=name_of)
@pytest.mark.parametrize(
    "block, positions",
    [(16, 512), (16, 300), (32, 1000), (64, 768), (48, 700), (128, 1024), (256, 1100)],
)
def test_tiles_are_those_of_the_elements(case, block, positions):
    pattern = pattern_of(case, block, positions) if isinstance(case, tuple) else case
    elements = by_tile(seen_by_element(pattern, positions), False)
    tiles = flex_attention.tiles_of(pattern, positions)
    assert np.array_equal(tiles.seen, elements.any(axis=(3, 4)))
    assert np.array_equal(tiles.whole, elements.all(axis=(3, 4)))


def shown_by(mask, samples, positions):
    """bool [b, n, positions, positions] of the scores that a BlockMask shows: whole tiles, and what mask_mod
    shows of the others that it lists. By rows, and by columns, as backward reads them."""
    found = []
    for rows in (
        ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
        ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
    ):
        partial, whole = (
            listed(*(getattr(mask, name) for name in pair), samples)
            for pair in (rows[:2], rows[2:])
        )
        if rows[0].startswith("q"):
            partial, whole = partial.transpose(0, 1, 3, 2), whole.transpose(0, 1, 3, 2)
        assert not (partial & whole).any()
        by_mod = of_torch.create_mask(
            mask.mask_mod, samples, HEADS, positions, positions, device="cpu"
        )
        one = np.ones((128, 128), dtype=bool)
        partial, whole = (
            np.kron(tiles, one)[..., :positions, :positions]
            for tiles in (partial, whole)
        )
        found.append(whole | partial & by_mod.numpy())
        assert not (whole & ~by_mod.numpy()).any()
    assert np.array_equal(*found)
    return found[0]


def listed(counts, columns, samples):
    tiles = np.zeros(columns.shape, dtype=bool)
    for at in np.ndindex(*counts.shape):
        tiles[(*at, columns[at][: counts[at]].tolist())] = True
    return np.broadcast_to(tiles, (samples, HEADS, *tiles.shape[2:]))


def documents_of(samples, positions, share=0.01):
    numbers = torch.rand(samples, positions, generator=torch.Generator().manual_seed(1))
    return Documents(document_numbers(numbers < share))


def padding_of(samples, positions, behind):
    hidden = torch.zeros(samples, 1, 1, positions, dtype=torch.bool)
    hidden[0, ..., behind:] = True
    return hidden


@pytest.mark.parametrize("case", [*CASES, *WINDOWS[2:]], ids=name_of)
@pytest.mark.parametrize(
    "block, positions, apart, padded",
    [
        (16, 512, False, False),
        (32, 700, True, True),
        (64, 500, True, False),
        (48, 512, False, True),
    ],
)
def test_a_block_mask_shows_the_scores_of_the_pattern(
    case, block, positions, apart, padded
):
    pattern = pattern_of(case, block, positions) if isinstance(case, tuple) else case
    documents = documents_of(2, positions) if apart else None
    padding = padding_of(2, positions, 250) if padded else None
    visible = KeyVisibility(pattern, documents, padding)
    mask = flex_attention.block_mask(visible, positions, CPU)
    expected = np.broadcast_to(
        seen_by_element(pattern, positions), (2, HEADS, positions, positions)
    )
    expected = expected & ~documents.foreign.numpy() if apart else expected
    expected = expected & ~padding.numpy() if padded else expected
    assert np.array_equal(shown_by(mask, 2, positions), expected)
    # FlexAttention's kernels take the memory order of contiguous lists for granted.
    lists = [
        getattr(mask, name)
        for name in mask._TENSOR_ATTRS
        if getattr(mask, name) is not None
    ]
    assert len(lists) == 8 and all(t.is_contiguous() for t in lists)


def test_tiles_of_other_documents_and_of_padding_are_not_computed():
    positions = 1024
    ids = torch.arange(positions).div(256, rounding_mode="floor").expand(1, -1)
    visible = KeyVisibility(CAUSAL, Documents(ids), padding_of(1, positions, 896))
    mask = flex_attention.block_mask(visible, positions, CPU)
    computed = mask.kv_num_blocks + mask.full_kv_num_blocks
    assert computed[0, 0].tolist() == [1, 2, 1, 2, 1, 2, 1, 1]  # of 8 rows of tiles
    assert mask.full_kv_num_blocks[0, 0].tolist() == [0, 1, 0, 1, 0, 1, 0, 1]


def test_few_tiles_of_a_layout_are_computed():
    pattern = pattern_of(("local", dict(num_sliding_window_blocks=5), True), 64, 16384)
    mask = flex_attention.block_mask(KeyVisibility(pattern), 16384, CPU)
    assert (
        mask.kv_num_blocks + mask.full_kv_num_blocks
    ).sum() == 2 * 128 - 1  # of 128 x 128 / 2


def test_masks_are_made_once():
    pattern = pattern_of(CASES[0], 16, 300)
    documents = documents_of(2, 300)
    padding = padding_of(2, 300, 280)
    for given in ((), (documents,), (documents, padding), (None, padding)):
        visible = KeyVisibility(pattern, *given)
        first, again = (flex_attention.block_mask(visible, 300, CPU) for _ in range(2))
        assert first is again
    assert flex_attention.block_mask(KeyVisibility(FULL), 300, CPU) is None


# --------------------------------------------------------------------------------------- results
@pytest.fixture
def without_refusal(monkeypatch):
    """torch refuses tensors of a CPU that require gradients before it comes to its formula of gradients."""
    monkeypatch.setattr(of_torch, "_validate_device", lambda *_: None)


@pytest.fixture
def written_out(without_refusal, monkeypatch):
    """flex_attention without compilation."""
    monkeypatch.setattr(of_torch, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    for name in ("compiled", "_compiled_for_check"):
        monkeypatch.setattr(flex_attention, name, lambda: of_torch.flex_attention)


def closed(documents, padding):
    masks = [
        mask for mask in (documents and documents.foreign, padding) if mask is not None
    ]
    if not masks:
        return None
    return masks[0] if len(masks) == 1 else masks[0] | masks[1]


@pytest.mark.parametrize("case", [*CASES, *WINDOWS], ids=name_of)
@pytest.mark.parametrize(
    "of",
    [
        (4, 16, False, False, False, False, None),
        (2, 32, True, True, True, False, 0.5),
        (1, 48, True, False, False, True, None),
    ],
)
def test_results_and_gradients_equal_attention_written_out(written_out, of, case):
    g, block, apart, padded, sink, alibi, cap = of
    s, slopes = 300, Alibi(alibi_slopes(HEADS)) if alibi else None
    pattern = pattern_of(case, block, s) if isinstance(case, tuple) else case
    documents, padding = (
        documents_of(2, s) if apart else None,
        padding_of(2, s, 250) if padded else None,
    )
    tensors = [
        draw(s, 2, heads, 16, seed=seed) for seed, heads in enumerate((HEADS, g, g))
    ]
    tensors = [*tensors, draw(HEADS, seed=3)] if sink else tensors
    mask = ~torch.from_numpy(seen_by_element(pattern, s))[None]
    others = closed(documents, padding)
    mask = mask if others is None else mask | others

    def flex(q, k, v, b=None):
        return flex_choice._flex(
            q,
            k,
            v,
            visible=KeyVisibility(pattern, documents=documents, mask=padding),
            scoring=Scoring(0.3, b, slopes, cap),
        )

    def oracle(q, k, v, b=None):
        return reference_attention(
            q,
            k,
            v,
            visible=KeyVisibility(FULL, mask=mask),
            scoring=Scoring(0.3, b, slopes, cap),
        )

    assert_near(
        outcome(flex, *tensors), outcome(oracle, *[t.double() for t in tensors])
    )


@pytest.mark.skipif(not shutil.which("g++"), reason="torch compiles it with g++")
def test_compiled_code_that_skips_tiles_has_the_same_results():
    s, documents = 600, documents_of(2, 600)
    pattern = pattern_of(CASES[1], 32, s)  # layouts of heads
    q, k, v = (draw(s, 2, heads, 16, seed=heads) for heads in (HEADS, 2, 2))
    with torch.no_grad():
        out = flex_choice._flex(
            q, k, v, visible=KeyVisibility(pattern, documents=documents)
        )
    expected = reference_attention(
        q, k, v, visible=KeyVisibility(pattern, mask=documents.foreign)
    )
    torch.testing.assert_close(
        out, expected, rtol=0, atol=1e-5
    )  # sums in another order


@pytest.fixture
def counter(without_refusal, monkeypatch):
    """flex_attention compiled anew, without generating code; counts compilations."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(of_torch.flex_attention, fullgraph=True, backend=counter)
    monkeypatch.setattr(flex_attention, "compiled", lambda: compiled)
    yield counter
    torch._dynamo.reset()


def test_layers_micro_batches_and_lengths_are_not_compiled_anew(counter):
    def step(s, layer, documents=None, **more):
        pattern = pattern_of(
            ("bigbird", dict(num_random_blocks=2, layout_per_head=True), True),
            16,
            s,
            layer,
        )
        q, k, v = (draw(s, 2, heads, 16).requires_grad_() for heads in (HEADS, 2, 2))
        flex_choice._flex(
            q, k, v, KeyVisibility(pattern, documents), **more
        ).sum().backward()
        return counter.frame_count

    assert [step(300, layer) for layer in range(3)] == [1, 1, 1]
    assert [step(s, 0) for s in (400, 520, 700)] == [2, 2, 2]
    slopes = [Scoring(alibi=Alibi(alibi_slopes(HEADS) * factor)) for factor in (1, 2)]
    assert [step(300, 0, scoring=scoring) for scoring in slopes] == [3, 3]
    assert (
        len(
            {
                step(300, 0, documents=documents_of(2, 300, share))
                for share in (0.01, 0.02, 0.03)
            }
        )
        == 1
    )


def test_the_check_leaves_the_first_length_of_a_run_to_code_of_its_own(
    counter, monkeypatch
):
    flex_attention._compiled_for_check.cache_clear()
    with monkeypatch.context() as patch:
        compile_ = torch.compile
        patch.setattr(
            torch,
            "compile",
            lambda *given, **named: compile_(*given, **named, backend=counter),
        )
        flex_attention._compiled_for_check()
    counts, in_run = [], flex_choice._flex
    for s, function in (
        (300, flex_attention.compiled_apart),
        (400, in_run),
        (520, in_run),
        (700, in_run),
    ):
        q, k, v = (draw(s, 2, heads, 16).requires_grad_() for heads in (HEADS, 2, 2))
        function(
            q, k, v, visible=KeyVisibility(AttentionPattern(left=20)), scoring=PLAIN
        ).sum().backward()
        counts.append(counter.frame_count)
    flex_attention._compiled_for_check.cache_clear()
    assert counts == [
        1,
        2,
        3,
        3,
    ]  # the check's; that of 400 tokens; that of all lengths


def bytes_of(tensors):
    """The bytes of the tensors' storages, each counted once."""
    return sum(
        {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors
        }.values()
    )


@pytest.mark.parametrize("sink", [False, True])
def test_a_plan_keeps_what_the_compiled_kernel_keeps(counter, sink):
    s, b, d = 300, 2, 16
    pattern = pattern_of(CASES[0], 16, s)

    def saved(device):
        q, k, v = (
            draw(s, b, heads, d).to(device).requires_grad_() for heads in (HEADS, 2, 2)
        )
        scoring = Scoring(sink=draw(HEADS).to(device)) if sink else PLAIN
        tensors = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: tensors.append(t) or t, lambda t: t
        ):
            out = flex_choice._flex(
                q, k, v, visible=KeyVisibility(pattern), scoring=scoring
            )
        out.sum().backward()
        assert q.grad.shape == q.shape and k.grad.shape == v.grad.shape == k.shape
        return out.shape, [
            t for t in tensors if t.is_floating_point()
        ]  # layers share lists of tiles

    shape, kept = saved("meta")
    assert shape == (s, b, HEADS * d)
    rows = b * HEADS * s  # with a sink, the factor of each, too
    assert bytes_of(kept) == 4 * (
        s * b * d * (2 * HEADS + 2 * 2) + rows * (2 if sink else 1)
    )
    assert bytes_of(saved("cpu")[1]) == bytes_of(kept)


# --------------------------------------------------------------------------------------- the choice
@pytest.fixture
def forgetting():
    caches = (
        kernel_table._candidates,
        flex_attention.reason_against,
        flex_check.reason_against,
    )
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def with_triton(forgetting, monkeypatch):
    monkeypatch.setattr(flex_attention, "find_spec", lambda name: True)
    monkeypatch.setattr(flex_check, "reason_against", lambda *_: "")


def chosen(device, dtype=torch.bfloat16, s=256, d=16, sk=None, values=None, **more):
    """Name of the implementation of the arguments."""
    q = torch.zeros(s, 2, HEADS, d, dtype=dtype, device=device)
    k, v = (
        torch.zeros(sk or s, 2, 2, d, dtype=kind, device=device)
        for kind in (dtype, values or dtype)
    )
    function = attention.choice(q, k, v, **more)
    return next(
        entry.name for entry in attention.implementations if entry.function is function
    )


LOCAL = KeyVisibility(
    pattern_of(("local", dict(num_sliding_window_blocks=3), True), 16, 256)
)
TAKEN = {
    "layout": dict(visible=LOCAL),
    "window": dict(visible=KeyVisibility(AttentionPattern(left=20))),
    "documents": dict(visible=KeyVisibility(documents=documents_of(2, 256))),
    "sink": dict(scoring=Scoring(sink=torch.zeros(HEADS))),
    "alibi": dict(scoring=Scoring(alibi=Alibi(alibi_slopes(HEADS)))),
    "capped": dict(scoring=Scoring(cap=2.0)),
    "padding": dict(visible=replace(LOCAL, mask=padding_of(2, 256, 99))),
    "fp16": dict(dtype=torch.float16, visible=LOCAL),
    "80 channels": dict(visible=LOCAL, d=80),
}
KEEP = KeepMask(
    0.1, sample_keys(1, "here", [0, 1]), range(HEADS), range(256), 256, device=CPU
)
REFUSED = {
    "plain": dict(),
    "bidirectional": dict(visible=KeyVisibility(FULL)),
    "one tile": dict(visible=LOCAL, s=128),
    "cached keys": dict(visible=LOCAL, s=200, sk=256),
    "dropout": dict(visible=LOCAL, keep=KEEP),
    "float64": dict(visible=LOCAL, dtype=torch.float64),
    "mixed": dict(visible=LOCAL, values=torch.float32),
    "8 channels": dict(visible=LOCAL, d=8),
    "512 channels": dict(visible=LOCAL, d=512),
    "mask": dict(
        visible=replace(LOCAL, mask=torch.zeros(2, 1, 256, 256, dtype=torch.bool))
    ),
    "places": dict(
        scoring=Scoring(alibi=Alibi(alibi_slopes(HEADS), torch.arange(256)))
    ),
}


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_a_gpu_computes_patterns_by_flex_attention_and_others_as_before(
    with_triton, device
):
    with fake_cuda(), FakeGpu():
        for cases, expected in ((TAKEN, "flex"), (REFUSED, "torch")):
            names = {name: chosen(device, **more) for name, more in cases.items()}
            assert names == dict.fromkeys(cases, expected)
        with selected("torch"):
            assert chosen(device, visible=LOCAL) == "torch"
    assert not any(chosen("cpu", **more) == "flex" for more in TAKEN.values())


def test_a_gpu_without_triton_computes_as_before_and_the_log_has_the_reason(
    forgetting, monkeypatch, caplog
):
    monkeypatch.setattr(flex_attention, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO), fake_cuda(), FakeGpu():
        assert [chosen("cuda", visible=LOCAL) for _ in range(2)] == ["torch"] * 2
    assert caplog.text.count("FlexAttention is not used: Triton is not installed") == 1
    assert chosen("meta", visible=LOCAL) == "flex"  # a plan is made on another machine


def test_arguments_that_it_does_not_take_are_logged_with_the_reason(
    with_triton, caplog
):
    kernel_table._log_once.cache_clear()
    with caplog.at_level(logging.INFO):
        chosen("meta", **REFUSED["dropout"])
    assert (
        "kernel attention: flex does not take these arguments (dropout of probabilities)"
        in caplog.text
    )


# --------------------------------------------------------------------------------------- the check
@pytest.mark.parametrize("dtype", flex_check.LIMITS)
def test_right_results_pass_the_check(written_out, forgetting, caplog, dtype):
    assert (
        flex_check.reason_against(
            flex_attention.compiled_apart, reference_attention, dtype, CPU
        )
        == ""
    )
    assert caplog.text == ""


@pytest.mark.parametrize("dtype", flex_check.LIMITS)
@pytest.mark.parametrize("wrong", ["pattern", "gradient", "compiler"])
def test_wrong_results_and_failing_compilers_are_found(
    written_out, forgetting, caplog, wrong, dtype
):
    def spoiled(q, k, v, visible, scoring):
        if wrong == "compiler":
            raise RuntimeError("no C compiler found")
        if wrong == "pattern":
            of_one_head = BlockLayout(32, visible.pattern.layout.seen[:1])
            visible = KeyVisibility(AttentionPattern(layout=of_one_head))
        k = k if wrong == "pattern" else k + 0.1 * (k - k.detach())
        return flex_attention.compiled_apart(q, k, v, visible, scoring=scoring)

    reasons = {
        flex_check.reason_against(spoiled, reference_attention, dtype, CPU)
        for _ in range(2)
    }
    assert len(reasons) == 1 and len(caplog.records) == 1
    assert ("no C compiler" if wrong == "compiler" else "wrong by") in reasons.pop()


def test_a_gpu_on_which_the_check_fails_computes_as_before(with_triton, monkeypatch):
    monkeypatch.setattr(flex_check, "reason_against", lambda *_: "results are wrong")
    with fake_cuda(), FakeGpu():
        assert chosen("cuda", visible=LOCAL) == "torch"


def test_the_host_does_not_wait_while_masks_are_made():
    pattern = pattern_of(CASES[1], 16, 300)
    with fake_cuda(), FakeGpu() as gpu:
        ids, padding = (
            t.pin_memory().to("cuda", non_blocking=True)
            for t in (documents_of(2, 300).ids, padding_of(2, 300, 250))
        )
        apart = SimpleNamespace(ids=ids)
        for given in ((), (apart,), (apart, padding)):
            visible = KeyVisibility(pattern, *given)
            flex_attention.block_mask(visible, 300, ids.device)
        assert gpu.order.waits == [] and not gpu.order.problems
