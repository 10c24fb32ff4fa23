"""Our GPT is that of the transformers library, family by family, with the same weights."""

import math

import pytest
import torch

from megatron_ds.config.options.model import ModelConfig
from megatron_ds.models import MODELS, build_stage, run_layers
from megatron_ds.mpu.group import solo
from megatron_ds.ops.alibi import alibi_bias, alibi_slopes
from tests.harness.gpt_runs import make_batch
from tests.harness.model_runs import context_of
from tests.harness.plain_gpt import load_logical

pytestmark = pytest.mark.threads

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed"
)

V, H, N, G, L, S, F = 37, 24, 4, 2, 2, 10, 26
SHAPE = dict(
    num_layers=L,
    hidden_size=H,
    num_attention_heads=N,
    ffn_hidden_size=F,
    seq_length=S,
    vocab_size=V,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    make_vocab_size_divisible_by=8,
)
LLAMA = dict(
    num_query_groups=G,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    norm_epsilon=1e-6,
)
NEOX = dict(
    num_attention_heads=3,
    position_embedding_type="rope",
    rotary_percent=0.5,
    activation="gelu_exact",
    untie_embeddings_and_output_weights=True,
)
THEIR_LLAMA = dict(
    vocab_size=V,
    hidden_size=H,
    intermediate_size=F,
    num_hidden_layers=L,
    num_attention_heads=N,
    num_key_value_heads=G,
    max_position_embeddings=S,
    tie_word_embeddings=False,
    attention_dropout=0.0,
    rms_norm_eps=1e-6,
)
THEIR_NEOX = dict(
    vocab_size=V,
    hidden_size=H,
    intermediate_size=F,
    num_hidden_layers=L,
    num_attention_heads=3,
    max_position_embeddings=S,
    hidden_act="gelu",
    rope_parameters=dict(
        rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5
    ),
)
# Waves of 6, 499 and 40,000 tokens, of which the last is scaled; by 0.01, so that ten tokens show it.
ROPE = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=0.01,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
YARN = dict(
    rope_type="yarn",
    rope_theta=1e4,
    factor=4.0,
    original_max_position_embeddings=64,
    beta_fast=8,
)
NAMES = {
    "llama": (
        "model.embed_tokens",
        "model.norm",
        "lm_head",
        "model.layers.{}.",
        dict(
            input_layernorm="input_layernorm",
            pre_mlp_layernorm="post_attention_layernorm",
            linear_qkv="self_attn.{}_proj",
            linear_proj="self_attn.o_proj",
            linear_fc2="mlp.down_proj",
            linear_fc1=("mlp.gate_proj", "mlp.up_proj"),
            q_layernorm="self_attn.q_norm",
            k_layernorm="self_attn.k_norm",
        ),
    ),
    "neox": (
        "gpt_neox.embed_in",
        "gpt_neox.final_layer_norm",
        "embed_out",
        "gpt_neox.layers.{}.",
        dict(
            input_layernorm="input_layernorm",
            pre_mlp_layernorm="post_attention_layernorm",
            linear_qkv="attention.query_key_value",
            linear_proj="attention.dense",
            linear_fc1="mlp.dense_h_to_4h",
            linear_fc2="mlp.dense_4h_to_h",
        ),
    ),
    "opt": (
        "model.decoder.embed_tokens",
        "model.decoder.final_layer_norm",
        "lm_head",
        "model.decoder.layers.{}.",
        dict(
            input_layernorm="self_attn_layer_norm",
            pre_mlp_layernorm="final_layer_norm",
            linear_qkv="self_attn.{}_proj",
            linear_proj="self_attn.out_proj",
            linear_fc1="fc1",
            linear_fc2="fc2",
        ),
    ),
}
FAMILIES = {
    "llama 3.1": (
        "Llama",
        THEIR_LLAMA | dict(rope_parameters=ROPE),
        "llama",
        LLAMA | dict(rotary_base=5e5, use_rope_scaling=True, rope_scaling_factor=0.01),
    ),
    "llama, positions interpolated, tied": (
        "Llama",
        THEIR_LLAMA
        | dict(
            tie_word_embeddings=True,
            rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.5),
        ),
        "llama",
        LLAMA
        | dict(
            rotary_seq_len_interpolation_factor=2.5,
            untie_embeddings_and_output_weights=False,
        ),
    ),
    "llama, yarn": (
        "Llama",
        THEIR_LLAMA | dict(rope_parameters=YARN),
        "llama",
        LLAMA
        | dict(
            position_embedding_type="yarn",
            yarn_rotary_scaling_factor=4.0,
            original_max_position_embeddings=64,
            yarn_beta_fast=8.0,
        ),
    ),
    "llama, yarn, bounds within pairs": (
        "Llama",
        THEIR_LLAMA
        | dict(
            rope_parameters=YARN | dict(truncate=False, mscale=0.7, mscale_all_dim=1.1)
        ),
        "llama",
        LLAMA
        | dict(
            position_embedding_type="yarn",
            yarn_rotary_scaling_factor=4.0,
            original_max_position_embeddings=64,
            yarn_beta_fast=8.0,
            yarn_mscale=0.7,
            yarn_mscale_all_dim=1.1,
            yarn_correction_range_round_to_int=False,
        ),
    ),
    # Theirs follows the longest position in the batch, the last of our 10.
    "llama, dynamic": (
        "Llama",
        THEIR_LLAMA
        | dict(
            max_position_embeddings=4,
            rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0),
        ),
        "llama",
        LLAMA | dict(rotary_ntk_factor=2.0, original_max_position_embeddings=4),
    ),
    "mistral, wide heads": (
        "Mistral",
        THEIR_LLAMA | dict(head_dim=10, sliding_window=None),
        "llama",
        LLAMA | dict(kv_channels=10),
    ),
    "qwen2": ("Qwen2", THEIR_LLAMA, "llama", LLAMA | dict(add_qkv_bias=True)),
    "qwen3": (
        "Qwen3",
        THEIR_LLAMA | dict(head_dim=8),
        "llama",
        LLAMA | dict(kv_channels=8, qk_layernorm=True),
    ),
    "gpt-neox": (
        "GPTNeoX",
        THEIR_NEOX,
        "neox",
        NEOX | dict(use_parallel_residual=True),
    ),
    "gpt-neox, one after the other": (
        "GPTNeoX",
        THEIR_NEOX | dict(use_parallel_residual=False),
        "neox",
        NEOX,
    ),
    "opt": (
        "OPT",
        dict(
            vocab_size=V,
            hidden_size=H,
            word_embed_proj_dim=H,
            ffn_dim=F,
            num_hidden_layers=L,
            num_attention_heads=N,
            max_position_embeddings=S,
            dropout=0.0,
        ),
        "opt",
        dict(activation="relu"),
    ),
}


def peer(family, options):
    """The model with weights of which each matters."""
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**options)
    )
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(
                torch.randn(p.shape, generator=draw) * 1.5 / p.shape[-1] ** 0.5
                + (0.7 if "norm" in name and name.endswith("weight") else 0.0)
            )
    return model.eval()


def as_ours(theirs, config, names):
    """Logical tensors by our names. theirs: their state dict."""
    words, norm, head, layer, parts = NAMES[names]
    head = (
        head if f"{head}.weight" in theirs else "lm_head"
    )  # GPT-NeoX's name on disk and in memory
    modules = {
        "embedding.word_embeddings": words,
        "decoder.final_layernorm": norm,
        "output_layer": head,
    }
    for i in range(L):
        for ours, their in parts.items():
            inside = ""
            if "fc" in ours:
                inside = "mlp."
            elif "linear" in ours or ours[0] in "qk":
                inside = "self_attention."
            many = [their] if isinstance(their, str) else their
            modules[f"decoder.layers.{i}.{inside}{ours}"] = [
                layer.format(i) + name for name in many
            ]
    weights = {}
    for ours, their in modules.items():
        for leaf in ("weight", "bias"):
            found = [
                theirs.get(f"{name.format(part)}.{leaf}")
                for name in ([their] if isinstance(their, str) else their)
                for part in ("qkv" if "{}" in name else "-")
            ]
            if found[0] is not None:
                weights[f"{ours}.{leaf}"] = (
                    by_group(found, config) if len(found) == 3 else torch.cat(found)
                )
    if "model.decoder.embed_positions.weight" in theirs:
        weights["embedding.position_embeddings.weight"] = theirs[
            "model.decoder.embed_positions.weight"
        ][2:]
    return weights


def by_group(parts, config):
    """Rows of each group: its queries, its key, its value."""
    return torch.cat(
        [t.unflatten(0, (config.query_groups, -1)) for t in parts], 1
    ).flatten(0, 1)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_are_those_of_transformers(family):
    name, options, names, own = FAMILIES[family]
    theirs, config = peer(name, options), ModelConfig(**SHAPE | own)
    ours = build_stage(MODELS["gpt"](config, context_of()))
    weights = as_ours(theirs.state_dict(), config, names)
    load_logical(ours.parameters(), weights, solo())
    batch = make_batch(config, s=S)
    logits = run_layers(ours, None, batch)[..., :V].transpose(0, 1)
    expected = theirs(batch.tokens).logits
    assert expected.abs().max() > 1
    # both in fp32
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 6, 8, 14, 25])
def test_causal_bias_differs_from_that_of_transformers_by_a_constant_of_each_row(n):
    """BLOOM adds slope * key: the softmax is the same."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    s = 13
    theirs = build_alibi_tensor(torch.ones(1, s), n, torch.float32)  # [n, 1, s]
    ours = alibi_bias(alibi_slopes(n), torch.arange(s), torch.arange(s))
    past = torch.ones(s, s).tril().bool()
    rows = (ours - theirs).masked_fill(~past, math.nan)
    constant = -torch.arange(s) * alibi_slopes(n)[:, None]
    # fp32
    torch.testing.assert_close(
        rows[:, past],
        constant[:, :, None].expand(n, s, s)[:, past],
        rtol=1e-5,
        atol=1e-5,
    )
