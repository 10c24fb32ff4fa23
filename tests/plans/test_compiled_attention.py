"""Compiled attention in bf16 against the probabilities written out in double precision."""

import pytest
import torch

from megatron_ds.ops import core_attention
from megatron_ds.ops.attention_pattern import CAUSAL, FULL, AttentionPattern
from megatron_ds.ops.core_attention import attention
from megatron_ds.ops.cpu import compiled_attention as module
from megatron_ds.ops.cpu import widened_products
from megatron_ds.ops.kernel_table import selected
from megatron_ds.ops.scoring import Scoring

compiled = pytest.mark.skipif(bool(module.reason_against()), reason=module.reason_against() or "-")
BF16 = 2**-8            # relative error of a rounding; probabilities, outputs and gradients are rounded
RUNS = "_CompiledAttentionBackward"


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def projected(s, n, g, d, samples=2):
    """q, k and v as heads of one packed projection, which is a leaf."""
    packed = draw(s, samples, (n + 2 * g) * d).requires_grad_()
    return packed, [t.unflatten(2, (-1, d)) for t in packed.split([n * d, g * d, g * d], dim=2)]


def written_out(q, k, v, is_causal, scale):
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
    scores = scale * torch.einsum("qbnd,kbnd->bnqk", q, k)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bnqk,kbnd->qbnd", scores.softmax(-1), v).flatten(2)


def gradients(out, leaves):
    return torch.autograd.grad(out, leaves, draw(*out.shape, seed=9).to(out.dtype))


def assert_near(ours, expected):
    for mine, theirs in zip(ours, expected, strict=True):
        assert (mine.double() - theirs).abs().max() <= 2 * BF16 * theirs.abs().max()


@compiled
@pytest.mark.parametrize("pattern", [CAUSAL, FULL])
@pytest.mark.parametrize("s, n, g, d", [(2, 2, 2, 64), (63, 3, 3, 64), (65, 4, 2, 32), (130, 6, 1, 128),
                                        (257, 2, 2, 96)])
def test_it_equals_the_formula_forward_and_backward(s, n, g, d, pattern):
    packed, heads = projected(s, n, g, d)
    out = attention(*heads, pattern=pattern, scoring=Scoring(scale=0.2))
    assert out.grad_fn.name() == RUNS and out.dtype == torch.bfloat16
    expected = written_out(*heads, pattern.causal, 0.2)
    assert_near([out, *gradients(out, [packed])], [expected, *gradients(expected, [packed])])


@compiled
@pytest.mark.parametrize("sq, sk", [(5, 200), (200, 5)])
def test_queries_and_keys_of_different_lengths(sq, sk):
    leaves = [draw(s, 2, 2, 64, seed=s).requires_grad_() for s in (sq, sk, sk + 1)]
    q, k, v = leaves[0], leaves[1], leaves[2][:sk]
    out = attention(q, k, v, pattern=FULL)
    assert out.grad_fn.name() == RUNS
    expected = written_out(q, k, v, False, 0.125)
    assert_near([out, *gradients(out, leaves)], [expected, *gradients(expected, leaves)])


@compiled
def test_numbers_within_a_head_may_lie_apart():
    q, k, v = (draw(70, 2, 64, 2, seed=i).transpose(2, 3).requires_grad_() for i in range(3))
    out, expected = attention(q, k, v), written_out(q, k, v, True, 0.125)
    assert_near([out, *gradients(out, (q, k, v))], [expected, *gradients(expected, (q, k, v))])


@compiled
@pytest.mark.parametrize("g, d, pattern", [(2, 32, CAUSAL), (1, 32, FULL)])
def test_keys_of_long_sequences_in_runs(g, d, pattern):
    packed, heads = projected(1030, 2, g, d, samples=1)
    out, expected = attention(*heads, pattern=pattern), written_out(*heads, pattern.causal, d**-0.5)
    assert_near([out, *gradients(out, [packed])], [expected, *gradients(expected, [packed])])


@compiled
@pytest.mark.parametrize("s, n, g, samples, pattern", [(300, 3, 3, 1, CAUSAL), (260, 4, 1, 1, CAUSAL),
                                                       (1100, 1, 1, 1, CAUSAL), (300, 2, 2, 2, FULL)])
def test_bits_depend_neither_on_threads_nor_on_other_samples(s, n, g, samples, pattern, monkeypatch):
    packed, heads = projected(s, n, g, 64, samples)
    results = []
    for threads in (1, 2, 5, 16):                       # with many, heads are divided
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        out = attention(*heads, pattern=pattern)
        results.append([out.detach(), *gradients(out, [packed])])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))
    alone = attention(*(t[:, :1] for t in heads), pattern=pattern)
    assert torch.equal(alone.detach(), results[0][0][:, :1])


@compiled
def test_scores_of_any_size():
    """The largest is subtracted; infinite and undefined inputs show."""
    q, k, v = (draw(80, 1, 1, 64, seed=i) for i in range(3))
    out = attention(q * 200, k * 20, v)
    assert_near([out], [written_out(q * 200, k * 20, v, True, 0.125)])
    k[30, 0, 0, 3] = torch.nan
    out = attention(q, k, v)
    assert out[30:].isnan().all() and out[:30].isfinite().all()


@compiled
def test_what_is_kept_is_the_arguments_the_output_and_a_number_a_row():
    packed, (q, k, v) = projected(128, 4, 4, 32)
    kept = attention(q, k, v).grad_fn.saved_tensors
    assert sum(t.numel() * t.element_size() for t in kept[4:]) == 4 * 128 * 2 * 4
    assert {t.untyped_storage().data_ptr() for t in kept[:3]} == {packed.data_ptr()}
    turned = attention(q * 1, k * 1, v).grad_fn.saved_tensors      # as rotary positions do
    assert packed.data_ptr() not in {t.untyped_storage().data_ptr() for t in turned}


@compiled
@pytest.mark.parametrize("settings", [
    {"pattern": AttentionPattern(left=20)}, {"mask": torch.zeros(1, 1, 1, 160, dtype=torch.bool)},
    {"scoring": Scoring(sink=torch.zeros(2))}, {"d": 40}, {"dtype": torch.float32}])
def test_what_it_does_not_take_goes_another_way(settings):
    d, dtype = settings.pop("d", 64), settings.pop("dtype", torch.bfloat16)
    q, k, v = (draw(160, 1, 2, d, seed=i).to(dtype).requires_grad_() for i in range(3))
    assert RUNS not in _names(attention(q, k, v, **settings).grad_fn)


def _names(node):
    return {node.name()}.union(*(_names(following) for following, _ in node.next_functions if following))


@compiled
def test_it_can_be_switched_off(monkeypatch):
    q, k, v = (draw(160, 1, 2, 64, seed=i).requires_grad_() for i in range(3))
    with selected("torch"):
        assert RUNS not in _names(attention(q, k, v).grad_fn)
    monkeypatch.setattr(widened_products, "has_products", lambda dtype: dtype == torch.float32)
    assert RUNS not in _names(attention(q, k, v).grad_fn)


def test_a_processor_without_its_instructions_or_with_faster_ones_does_without(monkeypatch):
    class Fake:
        has_products, has_tiles = staticmethod(lambda: True), staticmethod(lambda: True)

    monkeypatch.setattr(module, "extension", lambda: Fake)
    assert module.reason_against() == "AMX is faster"
    Fake.has_products = staticmethod(lambda: False)
    assert module.reason_against() == "no AVX-512 BF16"
    monkeypatch.setattr(module, "extension", lambda: None)
    assert module.reason_against() == "not compiled"
    entry = next(e for e in core_attention.attention.implementations if e.name == "c++")
    assert entry.available is not None and entry.dtypes == (torch.bfloat16,)
