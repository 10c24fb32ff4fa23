"""Fast paths of the layer maths against the plain references beside them and against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from megatron_ds.ops.activation import ACTIVATIONS
from megatron_ds.ops.attention_pattern import FULL
from megatron_ds.ops.core_attention import attention, reference_attention
from megatron_ds.ops.dropout import KeepMask, sample_keys
from megatron_ds.ops.key_visibility import KeyVisibility
from megatron_ds.ops.norms import (
    NORMS,
    LayerNorm,
    RMSNorm,
    reference_layer_norm,
    reference_rms_norm,
)
from megatron_ds.ops.rotary import (
    apply_rotary,
    reference_rotary,
    rotary_channels,
    rotary_tables,
)
from megatron_ds.ops.rotary_scaling import (
    LinearScaling,
    Llama3Scaling,
    YarnScaling,
    ntk_base,
)
from megatron_ds.tensor_parallel.cross_entropy import reference_cross_entropy

pytestmark = pytest.mark.plan


def randn(*shape, dtype=torch.float32, seed=0):
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        .to(dtype)
        .requires_grad_()
    )


def gradients(y, *inputs):
    return torch.autograd.grad(
        y, inputs, torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    )


PLAIN = {
    "gelu": lambda x: (
        0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    ),
    "gelu_exact": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "relu": lambda x: x * (x > 0),
    "squared_relu": lambda x: (x * (x > 0)) ** 2,
    "geglu": lambda x: PLAIN["gelu"](x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "clamped_swiglu": lambda x: _clamped_swiglu(*x.chunk(2, -1)),
    "swiglu": lambda x: (
        (x[..., : x.shape[-1] // 2] * torch.sigmoid(x[..., : x.shape[-1] // 2]))
        * x[..., x.shape[-1] // 2 :]
    ),
}


def _clamped_swiglu(gate, up):
    gate = torch.where(gate > 7, 7.0, gate)
    up = torch.where(up.abs() > 7, up.sign() * 7, up)
    return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)


@pytest.mark.parametrize("size", [1, 9])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_equals_its_formula_forward_and_backward(name, size):
    x = (randn(3, 5, 14) * size).detach().requires_grad_()
    y, plain = ACTIVATIONS[name](x), PLAIN[name](x)
    assert y.shape[-1] * ACTIVATIONS[name].parts == x.shape[-1]
    torch.testing.assert_close(y, plain)
    torch.testing.assert_close(gradients(y, x), gradients(plain, x))


@pytest.mark.parametrize("name", ["swiglu", "geglu", "clamped_swiglu", "squared_relu"])
def test_activation_with_its_own_backward_takes_inputs_in_any_memory_order(name):
    x = randn(5, 3, 8).transpose(0, 1).detach().requires_grad_()
    y = ACTIVATIONS[name](x)
    grad = torch.ones(()).expand(y.shape)
    torch.testing.assert_close(
        torch.autograd.grad(y, x, grad), torch.autograd.grad(PLAIN[name](x), x, grad)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [1, 7, 384])
def test_norms_equal_their_references(hidden, dtype):
    # bf16: the reference rounds its gradients at other places than the fused kernel does.
    tolerance = (
        dict(rtol=1e-5, atol=1e-5)
        if dtype is torch.float32
        else dict(rtol=2e-2, atol=6e-2)
    )
    x = randn(5, 3, hidden, dtype=dtype)
    for kind, reference in (
        (LayerNorm, reference_layer_norm),
        (RMSNorm, reference_rms_norm),
    ):
        norm = kind(hidden, name="n", eps=1e-3, dtype=dtype)
        for i, parameter in enumerate(norm.parameters()):
            parameter.data.copy_(randn(hidden, seed=i + 1))
        y, plain = norm(x), reference(x, *norm.parameters(), 1e-3)
        assert y.dtype == dtype
        torch.testing.assert_close(y, plain, **tolerance)
        for ours, theirs in zip(
            gradients(y, x, *norm.parameters()), gradients(plain, x, *norm.parameters())
        ):
            torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("kind", NORMS)
def test_norm_parameters_carry_their_names_and_the_partial_gradient_mark(kind):
    specs = [
        p.spec
        for p in NORMS[kind](
            6, name="decoder.final_layernorm", partial_over=("tp",)
        ).parameters()
    ]
    assert (
        specs[0].name == "decoder.final_layernorm.weight"
        and specs[0].init.kind == "ones"
    )
    assert all(
        s.partial_over == ("tp",) and not s.decay and not s.splits for s in specs
    )


@pytest.mark.parametrize("percent", [1.0, 0.5, 0.3])
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_equals_its_reference_and_leaves_the_rest_of_the_channels(
    percent, per_sample, interleaved
):
    s, b, n, d = 5, 3, 2, 12
    positions = torch.arange(s) if not per_sample else torch.randint(0, 50, (b, s))
    channels = rotary_channels(d, percent)
    cos, sin = rotary_tables(positions, channels, base=500.0)
    x = randn(s, b, n, d)
    y, plain = (
        turn(x, cos, sin, interleaved) for turn in (apply_rotary, reference_rotary)
    )
    torch.testing.assert_close(y, plain)
    torch.testing.assert_close(gradients(y, x), gradients(plain, x))
    assert torch.equal(y[..., channels:], x[..., channels:])


def test_rotary_turns_pair_i_by_position_over_base_to_the_2i_over_r():
    cos, sin = rotary_tables(torch.tensor([3]), 4, base=100.0)
    y = apply_rotary(
        torch.tensor([1.0, 2.0, 0.0, 0.0]).view(1, 1, 1, 4), cos, sin
    ).flatten()
    angles, x = torch.tensor([3.0, 3.0 / 10.0]), torch.tensor([1.0, 2.0])
    torch.testing.assert_close(y, torch.cat((x * angles.cos(), x * angles.sin())))


@pytest.mark.parametrize("channels", [12, 8])
def test_interleaved_rotary_is_that_of_gpt_j_in_transformers(channels):
    theirs = pytest.importorskip(
        "transformers.models.gptj.modeling_gptj", reason="transformers is not installed"
    )
    x, positions = randn(5, 2, 3, 12), torch.arange(3, 8)
    cos, sin = rotary_tables(positions, channels, base=500.0)
    y = apply_rotary(x, cos, sin, True)
    of_positions = lambda table: table[None, :, 0, 0]  # [1, s, r/2]
    expected = theirs.apply_rotary_pos_emb(
        x[..., :channels].transpose(0, 1), *map(of_positions, (sin, cos))
    )
    torch.testing.assert_close(y[..., :channels].transpose(0, 1), expected)
    assert torch.equal(y[..., channels:], x[..., channels:])
    gradient = randn(5, 2, 3, 12, seed=2)
    torch.testing.assert_close(
        torch.autograd.grad(y, x, gradient)[0],  # turned back
        apply_rotary(gradient, cos, -sin, True),
    )


YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=512)


@pytest.mark.parametrize(
    "parameters, scalings",
    [
        (
            dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
            [Llama3Scaling(8.0)],
        ),
        (
            dict(
                rope_type="llama3",
                factor=32.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
            [Llama3Scaling(32.0)],
        ),
        (dict(rope_type="linear", factor=4.0), [LinearScaling(4.0)]),
        (YARN, [YarnScaling(8.0, 512, 5e5)]),
        (
            YARN | dict(truncate=False, beta_fast=16, beta_slow=2),
            [YarnScaling(8.0, 512, 5e5, 16.0, 2.0, rounds=False)],
        ),
        (
            YARN
            | dict(
                factor=40.0,
                original_max_position_embeddings=4096,
                mscale=0.707,
                mscale_all_dim=1.2,
            ),
            [YarnScaling(40.0, 4096, 5e5, mscale=0.707, mscale_all_dim=1.2)],
        ),
        (YARN | dict(original_max_position_embeddings=7), [YarnScaling(8.0, 7, 5e5)]),
        (YARN | dict(factor=1.0), [YarnScaling(1.0, 512, 5e5)]),
    ],
    ids=str,
)
def test_scaled_frequencies_are_those_of_transformers(parameters, scalings):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed"
    )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=parameters | {"rope_theta": 5e5},
    )
    expected, amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    plain = 5e5 ** (torch.arange(0, -128, -2) / 128)
    torch.testing.assert_close(scalings[0](plain), expected, rtol=1e-6, atol=0)
    cos, sin = rotary_tables(torch.tensor([1]), 128, 5e5, scalings)
    # fp32: the angle of a slow wave is that of its cosine, nearly 1, times the amplitude
    torch.testing.assert_close(
        torch.atan2(sin, cos).flatten(), expected, rtol=1e-5, atol=0
    )
    torch.testing.assert_close(
        torch.hypot(sin, cos), torch.full_like(sin, amplitude), rtol=1e-6, atol=0
    )
    assert (amplitude > 1) == (
        scalings[0].factor > 1
        and parameters["rope_type"] == "yarn"
        and "mscale" not in parameters
    )


@pytest.mark.parametrize(
    "length, share", [(512, 1.0), (513, 1.0), (4096, 1.0), (3000, 0.25)]
)
def test_the_base_of_dynamic_ntk_is_that_of_transformers_at_this_length(length, share):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed"
    )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters=dict(
            rope_type="dynamic", factor=2.5, rope_theta=1e4, partial_rotary_factor=share
        ),
    )
    expected, amplitude = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=length)
    channels = rotary_channels(128, share)
    base = ntk_base(1e4, channels, 2.5, 512, length)
    torch.testing.assert_close(
        base ** -(torch.arange(0, channels, 2) / channels), expected, rtol=1e-6, atol=0
    )
    assert amplitude == 1.0 and (base == 1e4) == (length == 512)
    assert (
        ntk_base(1e4, channels, 2.5, 512, 100) == 1e4
        and ntk_base(1e4, 2, 2.5, 512, 1000) > 1e4
    )


def test_rotary_scores_depend_on_the_distance_only():
    q, k = randn(1, 1, 1, 16), randn(1, 1, 1, 16, seed=1)
    at = lambda x, position: apply_rotary(
        x, *rotary_tables(torch.tensor([position]), 16)
    ).flatten()
    torch.testing.assert_close(
        at(q, 17) @ at(k, 11), at(q, 106) @ at(k, 100), rtol=1e-4, atol=1e-4
    )


def qkv(sq, sk, b, n, g, d):
    return randn(sq, b, n, d), randn(sk, b, g, d, seed=1), randn(sk, b, g, d, seed=2)


def loop_attention(q, k, v):
    """Causal attention one query at a time; the queries are the last of the keys."""
    (sq, b, n, d), (sk, _, g, _) = q.shape, k.shape
    out = torch.empty(sq, b, n, d)
    for i in range(sq):
        for j in range(b):
            for h in range(n):
                seen = sk - sq + i + 1
                p = torch.softmax(k[:seen, j, h * g // n] @ q[i, j, h] / d**0.5, dim=0)
                out[i, j, h] = p @ v[:seen, j, h * g // n]
    return out.flatten(2)


@pytest.mark.parametrize("sq, sk", [(7, 7), (1, 7), (3, 7), (1, 1)])
@pytest.mark.parametrize("n, g", [(4, 4), (6, 2), (3, 1)])
def test_attention_equals_a_loop_over_queries_and_heads(sq, sk, n, g):
    q, k, v = qkv(sq, sk, 2, n, g, 5)
    for function in (attention, reference_attention):
        out, expected = function(q, k, v), loop_attention(q, k, v)
        assert out.shape == (sq, 2, n * 5)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(gradients(out, q, k, v), gradients(expected, q, k, v)):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_attention_obeys_an_explicit_mask_together_with_causality():
    q, k, v = qkv(6, 6, 2, 4, 2, 8)
    mask = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(3)) < 0.4
    mask.diagonal(dim1=-2, dim2=-1).fill_(False)
    out = attention(q, k, v, visible=KeyVisibility(mask=mask))
    torch.testing.assert_close(
        out,
        reference_attention(q, k, v, visible=KeyVisibility(mask=mask)),
        rtol=1e-5,
        atol=1e-5,
    )
    joined = mask | torch.ones(6, 6, dtype=torch.bool).triu(1)
    torch.testing.assert_close(
        out, attention(q, k, v, visible=KeyVisibility(FULL, mask=joined))
    )
    assert not torch.allclose(out, attention(q, k, v))


def test_attention_without_causality_sees_the_future():
    q, k, v = qkv(6, 6, 2, 4, 4, 8)
    out = attention(q, k, v, visible=KeyVisibility(FULL))
    torch.testing.assert_close(
        out,
        reference_attention(q, k, v, visible=KeyVisibility(FULL)),
        rtol=1e-5,
        atol=1e-5,
    )
    torch.testing.assert_close(out[-1], attention(q, k, v)[-1])
    assert not torch.allclose(out[0], attention(q, k, v)[0])


def test_attention_dropout_zeroes_probabilities_where_the_mask_says():
    q, k, v = qkv(6, 6, 2, 4, 2, 6)
    keep = KeepMask(
        0.3, sample_keys(1, "a", (0, 1)), heads=range(4), rows=range(6), cols=6
    )
    values = (
        torch.eye(6).view(6, 1, 1, 6).expand(6, 2, 2, 6)
    )  # so the output is the probabilities
    p = attention(q, k, values, keep=keep).view(6, 2, 4, 6).permute(1, 2, 0, 3)
    plain = attention(q, k, values).view(6, 2, 4, 6).permute(1, 2, 0, 3)
    torch.testing.assert_close(p, plain * keep.mask / 0.7, rtol=1e-4, atol=1e-6)


def test_attention_works_in_bf16():
    # 8 bits of mantissa: other orders of rounding differ by about 1 %.
    q, k, v = (t.detach().bfloat16() for t in qkv(7, 7, 2, 4, 2, 8))
    out = attention(q, k, v)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.float(),
        reference_attention(q.float(), k.float(), v.float()),
        rtol=2e-2,
        atol=2e-2,
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_reference_cross_entropy_equals_torch_on_the_true_vocabulary(smoothing):
    logits, labels = randn(4, 3, 16), torch.randint(0, 13, (4, 3))
    expected = F.cross_entropy(
        logits[..., :13].flatten(0, 1),
        labels.flatten(),
        reduction="none",
        # torch's definition of smoothing
        label_smoothing=smoothing * 13 / 12,
    ).view(4, 3)
    torch.testing.assert_close(
        reference_cross_entropy(logits, labels, 13, smoothing), expected
    )
