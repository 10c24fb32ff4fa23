"""Our models with experts are those of the transformers library, with the same weights.

Mixtral, Qwen2-MoE and Qwen3-MoE are compared whole. Of DeepSeek-V3 the feed-forward with experts is compared alone;
whole models are read from its folders in `compat_checkpoints`.
"""

import pytest
import torch
from safetensors.torch import load_file

from megatron_ds.batch.ledger import DISCARDING
from megatron_ds.config.options.model import ModelConfig
from megatron_ds.models import MODELS, build_stage, run_layers
from megatron_ds.models.block import transformer_block
from megatron_ds.mpu.group import solo
from tests.harness.gpt_runs import make_batch
from tests.harness.model_runs import context_of
from tests.harness.plain_gpt import TinyConfig, load_logical

pytestmark = pytest.mark.threads

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed"
)

V, H, N, G, D, L, S, E, F = 37, 24, 4, 2, 6, 2, 10, 5, 16
SIZES = dict(
    vocab_size=V,
    hidden_size=H,
    num_hidden_layers=L,
    num_attention_heads=N,
    num_key_value_heads=G,
    num_experts_per_tok=2,
    max_position_embeddings=S,
    tie_word_embeddings=False,
    rms_norm_eps=1e-5,
    attention_dropout=0.0,
)
OURS = dict(
    num_layers=L,
    hidden_size=H,
    num_attention_heads=N,
    num_query_groups=G,
    kv_channels=D,
    seq_length=S,
    vocab_size=V,
    make_vocab_size_divisible_by=8,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    num_experts=(E,),
    moe_router_topk=2,
    moe_ffn_hidden_size=F,
)

# Each: class, its options, ours, names of the router and of an expert's gate, up and down on disk.
MIXTRAL = (
    "Mixtral",
    dict(num_local_experts=E, intermediate_size=F),
    dict(add_bias_linear=False, ffn_hidden_size=F),
    "block_sparse_moe.gate",
    "block_sparse_moe.experts.{}.{}",
    ("w1", "w3", "w2"),
)
QWEN = ("mlp.gate", "mlp.experts.{}.{}", ("gate_proj", "up_proj", "down_proj"))
QWEN2 = (
    "Qwen2Moe",
    dict(
        num_experts=E,
        moe_intermediate_size=F,
        shared_expert_intermediate_size=10,
        norm_topk_prob=False,
    ),
    dict(
        add_bias_linear=False,
        add_qkv_bias=True,
        moe_router_pre_softmax=True,
        moe_shared_expert_intermediate_size=10,
        moe_shared_expert_gate=True,
    ),
    *QWEN,
)
QWEN3 = (
    "Qwen3Moe",
    dict(num_experts=E, moe_intermediate_size=F, head_dim=D, norm_topk_prob=True),
    dict(add_bias_linear=False, qk_layernorm=True),
    *QWEN,
)


def peer(family, options, directory):
    """(the model, its weights by their names on disk, its configuration)."""
    config = getattr(transformers, f"{family}Config")(**SIZES, **options)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(
                torch.randn(p.shape, generator=draw) * 1.5 / p.shape[-1] ** 0.5
                + (0.7 if "norm" in name else 0.0)
            )
    model.save_pretrained(directory, safe_serialization=True)
    return model.eval(), load_file(directory / "model.safetensors"), config


def as_ours(theirs, router, expert, names):
    """Their weights under our names."""
    ours = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
        "output_layer.weight": theirs["lm_head.weight"],
    }
    for i in range(L):
        name, layer = f"decoder.layers.{i}", f"model.layers.{i}"
        at = lambda key, layer=layer: theirs.get(f"{layer}.{key}")
        ours[f"{name}.input_layernorm.weight"] = at("input_layernorm.weight")
        ours[f"{name}.pre_mlp_layernorm.weight"] = at("post_attention_layernorm.weight")
        ours[f"{name}.self_attention.linear_proj.weight"] = at(
            "self_attn.o_proj.weight"
        )
        for leaf in ("weight", "bias"):
            parts = [at(f"self_attn.{part}_proj.{leaf}") for part in "qkv"]
            if parts[0] is not None:
                ours[f"{name}.self_attention.linear_qkv.{leaf}"] = by_group(*parts)
        for part in "qk":
            if at(f"self_attn.{part}_norm.weight") is not None:
                ours[f"{name}.self_attention.{part}_layernorm.weight"] = at(
                    f"self_attn.{part}_norm.weight"
                )
        ours[f"{name}.mlp.router.weight"] = at(f"{router}.weight")
        gate, up, down = (
            torch.stack([at(f"{expert.format(e, part)}.weight") for e in range(E)])
            for part in names
        )
        ours[f"{name}.mlp.experts.linear_fc1.weight"] = torch.cat((gate, up), 1)
        ours[f"{name}.mlp.experts.linear_fc2.weight"] = down
        if at("mlp.shared_expert.up_proj.weight") is not None:
            ours[f"{name}.mlp.shared_experts.linear_fc1.weight"] = torch.cat(
                [at(f"mlp.shared_expert.{part}_proj.weight") for part in ("gate", "up")]
            )
            ours[f"{name}.mlp.shared_experts.linear_fc2.weight"] = at(
                "mlp.shared_expert.down_proj.weight"
            )
            ours[f"{name}.mlp.shared_experts.gate_weight"] = at(
                "mlp.shared_expert_gate.weight"
            )
    return ours


def by_group(q, k, v):
    """Rows of each group: its queries, its key, its value."""
    q, k, v = (t.unflatten(0, (G, -1)) for t in (q, k, v))
    return torch.cat((q, k, v), 1).flatten(0, 1)


@pytest.mark.parametrize(
    "family, options, own, router, expert, names",
    [MIXTRAL, QWEN2, QWEN3],
    ids=["mixtral", "qwen2", "qwen3"],
)
@torch.no_grad()
def test_logits_are_those_of_transformers(
    family, options, own, router, expert, names, tmp_path
):
    model, disk, peer_config = peer(family, options, tmp_path)
    config = ModelConfig(**OURS, **own, rotary_base=rope_base(peer_config))
    weights = as_ours(disk, router, expert, names)
    ours = build_stage(MODELS["gpt"](config, context_of()))
    load_logical(ours.parameters(), weights, solo())
    batch = make_batch(config, s=S, ledger=DISCARDING)
    logits = run_layers(ours, None, batch)[..., :V].transpose(0, 1)
    expected = model(batch.tokens).logits
    assert expected.abs().max() > 1
    # both in fp32
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)


def rope_base(config) -> float:
    parameters = getattr(config, "rope_parameters", None)
    return parameters["rope_theta"] if parameters else config.rope_theta


@torch.no_grad()
def test_the_feed_forward_of_deepseek_v3_is_that_of_transformers():
    """16 experts in 4 groups, of which 2 are kept; 4 of a token, chosen with a bias; 2 shared experts."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    experts = 16
    block = DeepseekV3MoE(
        transformers.DeepseekV3Config(
            hidden_size=H,
            moe_intermediate_size=F,
            n_routed_experts=experts,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            n_shared_experts=2,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        )
    ).eval()
    draw = torch.Generator().manual_seed(5)
    for p in block.parameters():
        p.copy_(torch.randn(p.shape, generator=draw) * 1.5 / p.shape[-1] ** 0.5)
    block.gate.e_score_correction_bias.copy_(torch.rand(experts, generator=draw) / 2)
    theirs = block.state_dict()
    name = "decoder.layers.0.mlp"
    if "experts.gate_up_proj" in theirs:
        fc1, fc2 = theirs["experts.gate_up_proj"], theirs["experts.down_proj"]
    else:
        each = lambda part: torch.stack(
            [theirs[f"experts.{e}.{part}_proj.weight"] for e in range(experts)]
        )
        fc1, fc2 = torch.cat((each("gate"), each("up")), 1), each("down")
    shared = [
        theirs[f"shared_experts.{part}_proj.weight"] for part in ("gate", "up", "down")
    ]
    weights = {
        f"{name}.router.weight": theirs["gate.weight"],
        f"{name}.experts.linear_fc1.weight": fc1,
        f"{name}.experts.linear_fc2.weight": fc2,
        f"{name}.shared_experts.linear_fc1.weight": torch.cat(shared[:2]),
        f"{name}.shared_experts.linear_fc2.weight": shared[2],
    }
    config = TinyConfig(
        hidden_size=H,
        activation="swiglu",
        add_bias_linear=False,
        num_experts=(experts,),
        moe_router_topk=4,
        moe_router_score_function="sigmoid",
        moe_router_num_groups=4,
        moe_router_enable_expert_bias=True,
        moe_router_group_topk=2,
        moe_router_topk_scaling_factor=2.5,
        moe_ffn_hidden_size=F,
        moe_shared_expert_intermediate_size=2 * F,
    )
    ours = transformer_block(
        config, experts, "decoder.layers.0", context_of(), rotary=None
    ).mlp
    load_logical(ours.parameters(), weights, solo())
    x, batch = (
        torch.randn(10, 3, H, generator=draw),
        make_batch(config, ledger=DISCARDING),
    )
    without = ours(x, batch)
    ours.router.balance.bias.copy_(theirs["gate.e_score_correction_bias"])
    torch.testing.assert_close(ours(x, batch), block(x), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(without, ours(x, batch), atol=1e-2)
