"""The scan and the convolution against their definitions, against transformers, and against documents alone."""

import pytest
import torch
import torch.nn.functional as F

from megatron_ds.extensions.mixers.causal_conv import causal_conv, last_tokens
from megatron_ds.extensions.mixers.linear_scan import linear_scan
from megatron_ds.extensions.mixers.scan_states import scan_step, scan_with_states
from megatron_ds.extensions.plan_time.recorded_work import WorkRecorder
from megatron_ds.mpu.group import Traffic
from megatron_ds.pipeline.instruction import Op
from tests.mixers.recurrences import convolution, recurrence, wide_leaves

pytestmark = pytest.mark.plan

S, B, GROUPS, HEADS, DK, DV = 37, 2, 2, 6, 5, 7
CUTS = (0, 3, 4, 16, 17, 32, 37)  # documents of one token, at and beside ends of chunks


def inputs(has_rule: bool, length: int = S):
    draw = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(*shape, generator=draw)
    q = normal(length, B, GROUPS, DK)
    k = F.normalize(normal(length, B, GROUPS, DK), dim=-1)
    v = normal(length, B, HEADS, DV)
    decay = -F.softplus(normal(length, B, HEADS))
    beta = 2 * normal(length, B, HEADS).sigmoid() if has_rule else None
    return q, k, v, decay, beta


def documents_of(cuts) -> torch.Tensor:
    """Two samples, whose documents differ."""
    ids = torch.zeros(B, cuts[-1], dtype=torch.long)
    for at in cuts[1:-1]:
        ids[0, at:] += 1
    ids[1, 20:] = 3
    return ids


def near(found, expected, tolerance=2e-6):
    """Relative to the largest element."""
    return (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("has_rule", (False, True), ids=("state space", "delta rule"))
@pytest.mark.parametrize("apart", (False, True), ids=("joined", "apart"))
@pytest.mark.parametrize("chunk", (1, 4, 16, 64))
def test_the_scan_and_its_gradients_are_those_of_the_recurrence(has_rule, apart, chunk):
    given = inputs(has_rule)
    documents = documents_of(CUTS) if apart else None
    leaves = [None if t is None else t.requires_grad_() for t in given]
    wide = wide_leaves(given)
    out = linear_scan(*leaves, documents, chunk)
    expected = recurrence(*wide, documents)
    assert out.dtype == torch.float32
    assert near(out.double(), expected)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for own, reference in zip(leaves, wide, strict=True):
        if own is not None:
            assert near(own.grad.double(), reference.grad, 1e-5)


@pytest.mark.parametrize("has_rule", (False, True), ids=("state space", "delta rule"))
def test_documents_of_a_sequence_are_scanned_as_each_alone(has_rule):
    given = inputs(has_rule)
    documents = documents_of(CUTS)[:1]
    given = [None if t is None else t[:, :1] for t in given]
    together = linear_scan(*given, documents, 8)
    for first, last in zip(CUTS, CUTS[1:]):
        part = [None if t is None else t[first:last] for t in given]
        assert near(together[first:last], linear_scan(*part, None, 8), 1e-5)
    # Without the documents the later ones would read the first.
    assert not near(together, linear_scan(*given, None, 8), 1e-2)


@pytest.mark.parametrize("has_rule", (False, True), ids=("state space", "delta rule"))
@pytest.mark.parametrize("chunk", (1, 8, 64))
def test_texts_go_on_from_their_states_as_without_a_cut(has_rule, chunk):
    """Texts side by side, the first tokens of which are read at once, and the others one by one."""
    given = [None if t is None else t[:, :1] for t in inputs(has_rule)]
    cuts = list(zip(CUTS, CUTS[1:]))
    whole = [
        linear_scan(*(t if t is None else t[a:b] for t in given), None, 8)[:, 0]
        for a, b in cuts
    ]
    # Of each text at least one token, and at most five are left for later.
    read = [max(1, b - a - 5) for a, b in cuts]
    places = torch.cat([torch.arange(a, a + n) for (a, _), n in zip(cuts, read)])
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(read)])[None]
    ends = torch.tensor(read).cumsum(0) - 1
    prompts = [None if t is None else t[places] for t in given]
    out, states = scan_with_states(prompts, documents, ends, chunk)
    assert near(out[:, 0], torch.cat([w[:n] for w, n in zip(whole, read)]), 1e-5)
    for i, ((a, b), n) in enumerate(zip(cuts, read)):
        state = states[i : i + 1]
        for t in range(a + n, b):
            token = [None if x is None else x[t] for x in given]
            last, state = scan_step(token, state)
            assert near(last[0], whole[i][t - a], 1e-5)


def test_the_convolution_goes_on_from_its_last_tokens():
    x = torch.randn(S, 1, 6, generator=torch.Generator().manual_seed(4))
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))
    documents = torch.tensor([[0] * 2 + [1] * (S - 2)])
    ends = torch.tensor([1, 7])
    kept = last_tokens(x[:, 0], ends, 3, documents)
    assert torch.equal(kept[0], F.pad(x[:2, 0], (0, 0, 1, 0)))
    assert torch.equal(kept[1], x[5:8, 0])
    window = torch.cat((kept[1:].transpose(0, 1), x[8:9]))
    assert near(causal_conv(window, weight)[-1], causal_conv(x[2:], weight)[6])


@pytest.mark.parametrize("has_rule", (False, True), ids=("state space", "delta rule"))
def test_sums_of_long_fast_decays_keep_their_digits(has_rule):
    """A state that is forgotten within a token, and logarithms that sum to thousands within a chunk."""
    q, k, v, decay, beta = inputs(has_rule)
    decay = decay - 40.0
    out = linear_scan(q, k, v, decay, beta, None, 64)
    wide = [None if t is None else t.double() for t in (q, k, v, decay, beta)]
    assert out.isfinite().all()
    assert near(out.double(), recurrence(*wide))


def test_the_scan_of_16_bits_is_computed_in_fp32():
    narrow = [t.bfloat16() for t in inputs(True)]
    out = linear_scan(*narrow, None, 16)
    wide = linear_scan(*(t.float() for t in narrow), None, 16)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wide.bfloat16())


def test_the_delta_rule_is_that_of_transformers():
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v, decay, beta = inputs(True)
    by_sample = lambda t: t.transpose(0, 1)
    repeat = lambda t: by_sample(t.repeat_interleave(HEADS // GROUPS, 2))
    expected, _ = module.torch_recurrent_gated_delta_rule(
        repeat(q),
        repeat(k),
        by_sample(v),
        by_sample(decay),
        by_sample(beta),
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=True,
    )
    out = linear_scan(q * DK**-0.5, k, v, decay, beta, None, 16)
    # It adds 1e-6 to the squares of keys; and there q is normalized there, too.
    q = F.normalize(q, dim=-1)
    out = linear_scan(q * DK**-0.5, k, v, decay, beta, None, 16)
    assert near(by_sample(out), expected, 1e-5)


@pytest.mark.parametrize("length", (2, 3, S))
@pytest.mark.parametrize("apart", (False, True), ids=("joined", "apart"))
def test_the_convolution_and_its_gradients_are_those_of_the_definition(length, apart):
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(length, B, 6, generator=draw)
    weight = torch.randn(6, 4, generator=draw)
    bias = torch.randn(6, generator=draw)
    documents = documents_of(CUTS)[:, :length] if apart else None
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    wide = wide_leaves(leaves)
    out = causal_conv(*leaves, documents)
    expected = convolution(*wide, documents)
    assert near(out.double(), expected)
    weights = torch.randn(out.shape, generator=draw)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for own, reference in zip(leaves, wide, strict=True):
        assert near(own.grad.double(), reference.grad)


def test_the_convolution_is_torchs():
    x = torch.randn(S, B, 6, generator=torch.Generator().manual_seed(4))
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))
    padded = F.pad(x.permute(1, 2, 0), (3, 0))
    expected = F.silu(F.conv1d(padded, weight[:, None], groups=6)).permute(2, 0, 1)
    assert near(causal_conv(x, weight), expected)


@pytest.mark.parametrize("operation", (linear_scan, causal_conv), ids=lambda o: o.name)
def test_an_operation_states_the_flops_that_torch_does(operation):
    for make in operation.examples:
        arguments = make(40, 8, torch.float32, torch.device("cpu"))
        recorder = WorkRecorder(Traffic())
        with recorder.phase(Op.F):
            result = operation.in_torch(*arguments)
        with recorder.phase(Op.B):
            result.backward(torch.ones_like(result))
        seen = recorder.stage_work().flops
        assert seen[Op.F] == operation.forward_work(*arguments).flops
        assert seen[Op.B] == operation.backward_work(*arguments).flops
