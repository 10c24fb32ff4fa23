"""Compiled attention in fp32 and bf16 against the probabilities written out in double precision."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_ds.batch.documents import Documents, document_numbers
from megatron_ds.extensions.kernels.cpu import compiled_attention as module
from megatron_ds.extensions.kernels.cpu.key_spans import UNIT, key_spans
from megatron_ds.ops import widened_products
from megatron_ds.ops.alibi import Alibi, alibi_slopes
from megatron_ds.ops.attention_pattern import CAUSAL, FULL, AttentionPattern
from megatron_ds.ops.core_attention import attention, reference_attention
from megatron_ds.ops.kernel_table import selected
from megatron_ds.ops.key_visibility import KeyVisibility
from megatron_ds.ops.scoring import PLAIN, Scoring
from tests.harness.instruction_sets import SETS, instruction_set  # noqa: F401

pytestmark = pytest.mark.plan


def needs(dtype):
    reason = module.reason_against(dtype)
    return pytest.mark.skipif(bool(reason), reason=reason or "-")


compiled = needs(torch.bfloat16)
# Of the largest number: in bf16 probabilities, outputs and gradients are rounded, by 2^-8 each.
BOUNDS = {torch.float32: 4e-6, torch.bfloat16: 2 * 2**-8}
RUNS = "_CompiledAttentionBackward"
CASTS = "ToCopyBackward0"
both_dtypes = pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=needs(dtype)) for dtype in BOUNDS]
)


def draw(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def projected(s, n, g, d, samples=2, dtype=torch.bfloat16):
    """q, k and v as heads of one packed projection, which is a leaf."""
    packed = draw(s, samples, (n + 2 * g) * d, dtype=dtype).requires_grad_()
    return packed, [
        t.unflatten(2, (-1, d)) for t in packed.split([n * d, g * d, g * d], dim=2)
    ]


def written_out(q, k, v, is_causal, scale):
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
    scores = scale * torch.einsum("qbnd,kbnd->bnqk", q, k)
    if is_causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf
        )
    return torch.einsum("bnqk,kbnd->qbnd", scores.softmax(-1), v).flatten(2)


def gradients(out, leaves):
    return torch.autograd.grad(out, leaves, draw(*out.shape, seed=9).to(out.dtype))


def assert_near(ours, expected):
    for mine, theirs in zip(ours, expected, strict=True):
        assert (mine.double() - theirs).abs().max() <= BOUNDS[
            mine.dtype
        ] * theirs.abs().max()


@both_dtypes
def test_probabilities_below_the_normal_numbers_are_zero_in_the_kernel_alone(dtype):
    """An operation with a subnormal result takes fifty times as long on many processors."""
    q, k, v = (torch.zeros(32, 1, 1, 32, dtype=dtype) for _ in range(3))
    q[..., 0], k[1, ..., 0] = 1, -90  # the second key has exp(-90) = 8e-40 of a row
    v.requires_grad_()
    out = attention(
        q.requires_grad_(),
        k.requires_grad_(),
        v,
        visible=KeyVisibility(FULL),
        scoring=Scoring(scale=1.0),
    )
    assert out.grad_fn.name() == RUNS
    (dv,) = torch.autograd.grad(out, [v], torch.ones_like(out))
    assert dv[0].min() > 0 and dv[1].count_nonzero() == 0
    assert torch.full((64,), 1e-30).mul(1e-9).min() > 0  # the caller's setting is back


@both_dtypes
@pytest.mark.parametrize("pattern", [CAUSAL, FULL])
@pytest.mark.parametrize(
    "s, n, g, d",
    [
        (2, 2, 2, 64),
        (63, 3, 3, 64),
        (65, 4, 2, 32),
        (130, 6, 1, 128),
        (257, 2, 2, 96),
        (70, 2, 1, 160),
        (70, 1, 1, 256),
    ],
)
def test_it_equals_the_formula_forward_and_backward(s, n, g, d, pattern, dtype):
    packed, heads = projected(s, n, g, d, dtype=dtype)
    out = attention(*heads, visible=KeyVisibility(pattern), scoring=Scoring(scale=0.2))
    assert out.grad_fn.name() == RUNS and out.dtype == dtype
    expected = written_out(*heads, pattern.causal, 0.2)
    assert_near(
        [out, *gradients(out, [packed])], [expected, *gradients(expected, [packed])]
    )


@both_dtypes
@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scores_times_a_number_that_is_not_positive(scale, slopes, dtype):
    packed, heads = projected(90, 2, 2, 32, dtype=dtype)
    scoring = Scoring(scale=scale, alibi=Alibi(alibi_slopes(2)) if slopes else None)
    out = attention(*heads, scoring=scoring)
    expected = reference_attention(*(t.double() for t in heads), scoring=scoring)
    assert_near(
        [out, *gradients(out, [packed])], [expected, *gradients(expected, [packed])]
    )


@both_dtypes
@pytest.mark.parametrize("s", [16, 37, 90, 200])
def test_what_memory_contains_before_does_not_matter(s, dtype):
    packed, heads = projected(s, 2, 1, 32, dtype=dtype)
    results = []
    for fills in (False, True):  # new memory with bytes 0xff: NaN in all dtypes
        torch.use_deterministic_algorithms(fills)
        try:
            out = attention(*heads)
            results.append([out.detach(), *gradients(out, [packed])])
        finally:
            torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, *results))


@both_dtypes
@pytest.mark.parametrize(
    "sq, sk, pattern", [(5, 200, FULL), (200, 5, FULL), (37, 200, CAUSAL)]
)
def test_queries_and_keys_of_different_lengths(sq, sk, pattern, dtype):
    """Fewer causal queries are the last ones."""
    leaves = [
        draw(s, 2, 2, 64, seed=s, dtype=dtype).requires_grad_()
        for s in (sq, sk, sk + 1)
    ]
    q, k, v = leaves
    v = v[:sk]
    out = attention(q, k, v, visible=KeyVisibility(pattern))
    assert out.grad_fn.name() == RUNS
    expected = reference_attention(
        *(t.double() for t in (q, k, v)), visible=KeyVisibility(pattern)
    )
    assert_near(
        [out, *gradients(out, leaves)], [expected, *gradients(expected, leaves)]
    )


PADDING = (torch.arange(200) >= 187).expand(2, 1, 1, 200)
ALIBI = Scoring(alibi=Alibi(alibi_slopes(4)))
# which keys are visible, and what joins their scores
HIDING = {
    "window": (KeyVisibility(AttentionPattern(left=20)), PLAIN),
    "window of both sides": (
        KeyVisibility(AttentionPattern(causal=False, left=70, right=3)),
        PLAIN,
    ),
    "padding": (KeyVisibility(FULL, mask=PADDING), PLAIN),
    "sink": (KeyVisibility(), Scoring(sink=torch.tensor([0.5, -1.0, 2.0, 0.0]))),
    "alibi": (KeyVisibility(), ALIBI),
    "alibi of both sides": (KeyVisibility(FULL), ALIBI),
    "window and alibi": (KeyVisibility(AttentionPattern(left=33)), ALIBI),
}


@both_dtypes
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("case", HIDING)
def test_what_hides_keys_or_adds_to_scores(case, apart, dtype):
    (visible, scoring), (packed, heads) = (
        HIDING[case],
        projected(200, 4, 2, 32, dtype=dtype),
    )
    if apart:
        documents = Documents(document_numbers(draw(2, 200).abs() < 0.02))
        visible = replace(visible, documents=documents)
    out = attention(*heads, visible, scoring=scoring)
    assert RUNS in _names(out.grad_fn)
    expected = reference_attention(
        *(t.double() for t in heads), visible, scoring=scoring
    )
    assert_near(
        [out, *gradients(out, [packed])], [expected, *gradients(expected, [packed])]
    )


@both_dtypes
def test_numbers_within_a_head_may_lie_apart_and_rows_begin_anywhere(dtype):
    q, k, v = (
        draw(70, 2, 64, 2, seed=i, dtype=dtype).transpose(2, 3).requires_grad_()
        for i in range(3)
    )
    out, expected = attention(q, k, v), written_out(q, k, v, True, 0.125)
    assert_near(
        [out, *gradients(out, (q, k, v))], [expected, *gradients(expected, (q, k, v))]
    )
    odd = [
        draw(70, 1, 1, 65, seed=i, dtype=dtype)[..., 1:].requires_grad_()
        for i in range(3)
    ]
    assert_near([attention(*odd)], [written_out(*odd, True, 0.125)])


@both_dtypes
@pytest.mark.parametrize("g, d, pattern", [(2, 32, CAUSAL), (1, 32, FULL)])
def test_keys_of_long_sequences_in_runs(g, d, pattern, dtype):
    packed, heads = projected(1030, 2, g, d, samples=1, dtype=dtype)
    out, expected = (
        attention(*heads, visible=KeyVisibility(pattern)),
        written_out(*heads, pattern.causal, d**-0.5),
    )
    assert_near(
        [out, *gradients(out, [packed])], [expected, *gradients(expected, [packed])]
    )


@both_dtypes
@pytest.mark.parametrize(
    "s, n, g, samples, pattern",
    [
        (300, 3, 3, 1, CAUSAL),
        (260, 4, 1, 1, CAUSAL),
        (1100, 1, 1, 1, CAUSAL),
        (300, 2, 2, 2, FULL),
    ],
)
def test_bits_depend_neither_on_threads_nor_on_other_samples(
    s, n, g, samples, pattern, dtype, monkeypatch
):
    packed, heads = projected(s, n, g, 64, samples, dtype)
    results = []
    for threads in (1, 2, 5, 16):  # with many, heads are divided
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        out = attention(*heads, visible=KeyVisibility(pattern))
        results.append([out.detach(), *gradients(out, [packed])])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))
    alone = attention(*(t[:, :1] for t in heads), visible=KeyVisibility(pattern))
    assert torch.equal(alone.detach(), results[0][0][:, :1])


@both_dtypes
@pytest.mark.parametrize(
    "s, n, g, threads",
    [(200, 4, 4, 2), (200, 4, 2, 2), (1030, 2, 2, 1), (200, 1, 1, 8)],
)
def test_gradients_are_added_in_fp32_where_they_belong(
    s, n, g, threads, dtype, monkeypatch
):
    """To sums of any strides, without rounding to the dtype of the tensors; what lies between them stays."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    scoring = Scoring(0.125)
    block = module.ScoreBlock(KeyVisibility(), range(s), range(s))
    q, k, v, dout = (
        draw(s, 2, heads, 64, seed=i, dtype=dtype)
        for i, heads in enumerate((n, g, g, n))
    )
    out, lse = module.attend(q, k, v, block, scoring)
    arguments = (
        q,
        k,
        v,
        dout,
        module.OfRows(lse, module.row_dots(dout, out)),
        block,
        scoring,
    )
    wide = torch.full((2, s + 1, n + 2 * g + 1, 64), 7.0)
    sums = wide[:, :s, : n + 2 * g].zero_().transpose(0, 1).split([n, g, g], dim=2)
    for times in (1, 2):
        module.add_gradients_(sums, *arguments)
        for total, part in zip(sums, module.gradients(*arguments), strict=True):
            assert torch.equal((total / times).to(dtype), part)
    assert (wide[:, s:] == 7).all() and (wide[:, :, n + 2 * g :] == 7).all()
    assert dtype == torch.float32 or not torch.equal(sums[0].to(dtype), sums[0])


@both_dtypes
def test_scores_of_any_size(dtype):
    """The largest is subtracted; infinite and undefined inputs show."""
    q, k, v = (draw(80, 1, 1, 64, seed=i).to(dtype) for i in range(3))
    out = attention(q * 200, k * 20, v)
    assert_near([out], [written_out(q * 200, k * 20, v, True, 0.125)])
    out = attention(
        q * 30_000, k * 30_000, v
    )  # probabilities above 1 would be infinite
    assert_near([out], [written_out(q * 30_000, k * 30_000, v, True, 0.125)])
    k[30, 0, 0, 3] = torch.nan
    out = attention(q, k, v)
    assert out[30:].isnan().all() and out[:30].isfinite().all()


@both_dtypes
def test_what_is_kept_is_the_arguments_the_output_and_a_number_a_row(dtype):
    packed, (q, k, v) = projected(128, 4, 4, 32, dtype=dtype)
    kept = attention(q, k, v).grad_fn.saved_tensors
    assert sum(t.numel() * t.element_size() for t in kept[5:]) == 4 * 128 * 2 * 4
    assert {t.untyped_storage().data_ptr() for t in kept[:3]} == {packed.data_ptr()}
    turned = attention(q * 1, k * 1, v).grad_fn.saved_tensors  # as rotary positions do
    assert packed.data_ptr() not in {
        t.untyped_storage().data_ptr() for t in turned if t is not None
    }


@compiled
@pytest.mark.parametrize(
    "settings",
    [
        {"visible": KeyVisibility(mask=torch.zeros(1, 1, 160, 160, dtype=torch.bool))},
        {"d": 40},
        {"d": 288},
        {"dtype": torch.float64},
        {"scoring": Scoring(alibi=Alibi(alibi_slopes(2), torch.arange(160)))},
        {
            "keys": 9,
            "visible": KeyVisibility(
                FULL, mask=torch.zeros(1, 1, 1, 9, dtype=torch.bool)
            ),
        },
    ],
)
def test_what_it_does_not_take_goes_another_way(settings):
    settings = dict(settings)
    d, dtype, keys = (
        settings.pop(name, usual)
        for name, usual in (("d", 64), ("dtype", torch.float32), ("keys", 160))
    )
    q, k, v = (
        draw(s, 1, 2, d, seed=i).to(dtype).requires_grad_()
        for i, s in enumerate((160, keys, keys))
    )
    assert RUNS not in _names(attention(q, k, v, **settings).grad_fn)


@pytest.mark.parametrize(
    "others", [{"k": torch.bfloat16}, {"v": torch.bfloat16}, {"v": torch.float64}]
)
def test_tensors_of_several_dtypes_are_an_error(others):
    dtypes = {"q": torch.float32, "k": torch.float32, "v": torch.float32} | others
    with pytest.raises(RuntimeError):
        attention(
            *(
                draw(64, 1, 2, 64, seed=i).to(dtype)
                for i, dtype in enumerate(dtypes.values())
            )
        )


def _names(node):
    return {node.name()}.union(
        *(_names(following) for following, _ in node.next_functions if following)
    )


@compiled
def test_it_can_be_switched_off(monkeypatch):
    q, k, v = (draw(160, 1, 2, 64, seed=i).requires_grad_() for i in range(3))
    with selected("torch"):
        assert RUNS not in _names(attention(q, k, v).grad_fn)
    # Without products of bf16, the attention of fp32 copies is compiled.
    monkeypatch.setattr(
        widened_products, "has_products", lambda dtype: dtype == torch.float32
    )
    assert {RUNS, CASTS} <= _names(attention(q, k, v).grad_fn)


class Set:
    def __init__(self, *dtypes):
        for dtype in dtypes:
            setattr(self, f"forward_{module.NAMES[dtype]}", None)


LOW, WIDE = torch.bfloat16, torch.float32
FAKE_SETS = {
    "amx": Set(LOW),
    "avx512_bf16": Set(LOW),
    "avx512": Set(WIDE),
    "avx2": Set(WIDE),
}


@pytest.mark.parametrize(
    "names, low, wide",
    [
        ("amx avx512_bf16 avx512 avx2", "amx", "avx512"),
        ("avx512_bf16 avx512 avx2", "avx512_bf16", "avx512"),
        ("avx512 avx2", None, "avx512"),
        ("avx2", None, "avx2"),
        ("", None, None),
    ],
)
def test_the_fastest_instruction_set_with_the_dtype_is_taken(
    names, low, wide, monkeypatch
):
    class Fake:
        instruction_sets = staticmethod(names.split)

    for name, found in FAKE_SETS.items():
        setattr(Fake, name, found)
    monkeypatch.undo()  # of the fixture
    monkeypatch.setattr(module, "extension", lambda: Fake)
    monkeypatch.setattr(module, "functions", module.functions.__wrapped__)
    assert (module.functions(LOW), module.functions(WIDE)) == (
        FAKE_SETS.get(low),
        FAKE_SETS.get(wide),
    )
    assert module.reason_against(LOW) == ("" if low else "no AVX-512 BF16")
    assert module.reason_against(WIDE) == ("" if wide else "neither AVX-512 nor AVX2")


REFUSED = """
import ctypes, torch
stack = (ctypes.c_char * 8192)()                # too small for a signal's frame with tiles
class Stack(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(stack), 0, 8192)), None) == 0
from megatron_ds.ops.core_attention import attention
from megatron_ds.extensions.kernels.cpu import compiled_attention
assert "amx" not in compiled_attention.extension().instruction_sets()
q = torch.ones(40, 1, 1, 32, dtype=torch.bfloat16)
assert (attention(q, q, q) == 1).all()
"""


@pytest.mark.skipif("amx" not in SETS, reason="no AMX")
def test_without_the_systems_permission_tiles_are_not_taken():
    subprocess.run(
        [sys.executable, "-c", REFUSED], check=True, cwd=Path(__file__).parents[2]
    )


def test_an_installation_without_the_extension_does_without(monkeypatch):
    monkeypatch.setattr(module, "extension", lambda: None)
    assert module.reason_against(WIDE) == module.reason_against(LOW) == "not compiled"


@pytest.mark.parametrize(
    "pattern",
    [CAUSAL, FULL, AttentionPattern(left=40), AttentionPattern(False, 33, 70)],
)
@pytest.mark.parametrize(
    "queries, keys",
    [
        (range(200), range(200)),
        (range(150, 200), range(200)),
        (range(64, 128), range(0, 64)),
        (range(10, 77), range(40, 200)),
    ],
)
def test_spans_are_the_units_of_which_a_register_sees_something(pattern, queries, keys):
    plan = key_spans(pattern, queries, keys, heads=2)
    rows, columns = (
        torch.arange(queries.start, queries.stop),
        torch.arange(keys.start, keys.stop),
    )
    hidden = pattern.mask(rows, columns)
    seen = (
        torch.ones(len(rows), len(columns))
        if hidden is None
        else (~hidden[0, 0]).float()
    )
    padded = torch.nn.functional.pad(
        seen, (0, -len(columns) % UNIT, 0, -len(rows) % UNIT)
    )
    units = padded.unflatten(1, (-1, UNIT)).unflatten(0, (-1, UNIT)).amax((1, 3))
    times = torch.zeros_like(units)
    for tile in range(len(plan.first[0]) - 1):
        for start, stop, low, high in plan.spans[
            plan.first[0][tile] : plan.first[0][tile + 1]
        ]:
            times[
                4 * tile + low : 4 * tile + high, plan.units[start:stop].tolist()
            ] += 1
    assert torch.equal(times, units) and plan.layout_of_head.tolist() == [0, 0]
