"""Tiny models of the transformers library, one for each family and each choice that changes their files.

`saved(name, folder)` writes one with random weights, no two tensors alike, as `save_pretrained` does.
"""

from pathlib import Path

import torch

WINDOW = 7  # tokens
V, POSITIONS = 99, 24  # 99 rows need padding at every tensor-parallel size
SIZES = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=V,
    max_position_embeddings=POSITIONS,
)
GATED = dict(**SIZES, intermediate_size=48, num_key_value_heads=2)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
    rope_theta=500000.0,
)
GPT2 = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=V, n_positions=POSITIONS)
EXPERTS = dict(num_experts=4, moe_intermediate_size=16, num_experts_per_tok=2)
BIASED = dict(n_routed_experts=4, moe_intermediate_size=16, num_experts_per_tok=2)
WINDOWED = dict(use_sliding_window=True, sliding_window=WINDOW)
LATENT = dict(
    **SIZES,
    num_key_value_heads=4,
    intermediate_size=48,
    q_lora_rank=12,
    kv_lora_rank=10,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    n_routed_experts=8,
    moe_intermediate_size=16,
    num_experts_per_tok=4,
    n_shared_experts=1,
    routed_scaling_factor=2.5,
)
SCALED = dict(
    rope_type="yarn",
    factor=3.0,
    original_max_position_embeddings=8,
    mscale=1.0,
    mscale_all_dim=0.8,
    rope_theta=1e4,
)
STATES = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
)
MAMBA = dict(mamba_n_heads=8, mamba_n_groups=4, mamba_d_state=10, mamba_chunk_size=16)
SMALL_IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)

# name → (class of transformers without its ending, options)
MODELS = {
    "gpt2": ("GPT2LMHead", GPT2),
    "gpt2 untied": ("GPT2LMHead", GPT2 | dict(tie_word_embeddings=False, n_inner=40)),
    "llama": ("LlamaForCausalLM", GATED),
    "llama 3, tied, wide heads": (
        "LlamaForCausalLM",
        GATED | dict(tie_word_embeddings=True, head_dim=12, rope_parameters=LLAMA3),
    ),
    "llama, biases, linear scaling": (
        "LlamaForCausalLM",
        GATED
        | dict(
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4),
        ),
    ),
    "llama, yarn": (
        "LlamaForCausalLM",
        GATED
        | dict(
            rope_parameters=dict(
                rope_type="yarn",
                factor=3.0,
                original_max_position_embeddings=8,
                rope_theta=1e4,
            )
        ),
    ),
    "mistral": ("MistralForCausalLM", GATED | dict(sliding_window=None)),
    "mistral, window": ("MistralForCausalLM", GATED | dict(sliding_window=WINDOW)),
    "qwen2": ("Qwen2ForCausalLM", GATED),
    "qwen2, a layer with a window": (
        "Qwen2ForCausalLM",
        GATED | WINDOWED | dict(max_window_layers=1),
    ),
    "qwen3, tied": (
        "Qwen3ForCausalLM",
        GATED | dict(head_dim=16, tie_word_embeddings=True),
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        GATED
        | EXPERTS
        | STATES
        | dict(
            head_dim=16,
            num_hidden_layers=4,
            shared_expert_intermediate_size=24,
            mlp_only_layers=[1],
        ),
    ),
    "qwen3_5": (
        "Qwen3_5ForCausalLM",
        GATED | STATES | dict(head_dim=16, num_hidden_layers=4),
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForCausalLM",
        GATED
        | EXPERTS
        | STATES
        | dict(
            head_dim=16,
            shared_expert_intermediate_size=24,
            layer_types=["linear_attention", "full_attention"],
        ),
    ),
    "olmo2": ("Olmo2ForCausalLM", GATED | SMALL_IDS | dict(initializer_range=0.2)),
    "olmo_hybrid": (
        "OlmoHybridForCausalLM",
        GATED
        | STATES
        | dict(
            num_hidden_layers=3,
            linear_value_head_dim=4,  # transformers divides the taps into three equal parts
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            rope_parameters=dict(rope_type="default", rope_theta=None),
            **SMALL_IDS,
        ),
    ),
    "olmo_hybrid, rotary": (
        "OlmoHybridForCausalLM",
        GATED
        | STATES
        | dict(
            linear_value_head_dim=4,
            linear_allow_neg_eigval=False,
            layer_types=["linear_attention", "full_attention"],
            **SMALL_IDS,
        ),
    ),
    "bamba": (
        "BambaForCausalLM",
        GATED | MAMBA | dict(num_hidden_layers=3, attn_layer_indices=[1], **SMALL_IDS),
    ),
    "granite 4": (
        "GraniteMoeHybridForCausalLM",
        GATED
        | MAMBA
        | dict(
            num_hidden_layers=3,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=24,
            layer_types=["mamba", "attention", "mamba"],
            embedding_multiplier=1.5,
            residual_multiplier=0.22,
            attention_multiplier=0.3,
            logits_scaling=0.6,
        ),
    ),
    "granite 4, dense, rotary": (
        "GraniteMoeHybridForCausalLM",
        GATED
        | MAMBA
        | dict(
            num_local_experts=0,
            shared_intermediate_size=40,
            layer_types=["mamba", "attention"],
            position_embedding_type="rope",
            time_step_limit=(0.01, float("inf")),
        ),
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        GATED
        | MAMBA
        | dict(
            mamba_d_ssm=48,
            embedding_multiplier=1.7,
            lm_head_multiplier=0.6,
            attention_in_multiplier=0.9,
            attention_out_multiplier=0.8,
            key_multiplier=0.37,
            ssm_in_multiplier=1.3,
            ssm_out_multiplier=0.45,
            ssm_multipliers=[0.35, 0.25, 0.7, 1.2, 0.31],
            mlp_multipliers=[0.88, 0.6],
            **SMALL_IDS,
        ),
    ),
    "falcon_h1, a norm before the gate": (
        "FalconH1ForCausalLM",
        GATED | MAMBA | dict(mamba_d_ssm=48, mamba_rms_norm=True, **SMALL_IDS),
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        dict(
            hidden_size=32,
            num_hidden_layers=3,
            vocab_size=V,
            num_heads=8,
            head_dim=8,
            n_groups=4,
            state_size=10,
            chunk_size=16,
        ),
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        dict(
            hidden_size=32,
            layers_block_type=[
                "linear_attention",
                "mlp",
                "full_attention",
                "linear_attention",
            ],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=48,
            vocab_size=V,
            max_position_embeddings=POSITIONS,
            mamba_num_heads=8,
            mamba_head_dim=6,
            n_groups=4,
            ssm_state_size=10,
            chunk_size=16,
        ),
    ),
    "nemotron 3": (
        "NemotronHForCausalLM",
        dict(
            hidden_size=32,
            layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=V,
            max_position_embeddings=POSITIONS,
            mamba_num_heads=8,
            mamba_head_dim=6,
            n_groups=4,
            ssm_state_size=10,
            n_routed_experts=4,
            moe_intermediate_size=16,
            moe_shared_expert_intermediate_size=20,
            routed_scaling_factor=2.5,
        ),
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", SIZES | dict(intermediate_size=64)),
    "gpt_neox, serial, tied": (
        "GPTNeoXForCausalLM",
        SIZES
        | dict(
            intermediate_size=64, use_parallel_residual=False, tie_word_embeddings=True
        ),
    ),
    "gpt_neox, whole heads": (
        "GPTNeoXForCausalLM",
        SIZES | dict(intermediate_size=64, rotary_pct=1.0),
    ),
    "bloom": (
        "BloomForCausalLM",
        dict(hidden_size=48, n_layer=2, n_head=6, vocab_size=V),
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        GATED
        | dict(
            num_local_experts=4,
            num_experts_per_tok=2,
            head_dim=8,
            sliding_window=WINDOW,
            rope_parameters=dict(
                rope_type="yarn",
                factor=4.0,
                truncate=False,
                original_max_position_embeddings=8,
                rope_theta=1e4,
            ),
        ),
    ),
    "phi3, window": (
        "Phi3ForCausalLM",
        GATED | dict(sliding_window=WINDOW, **SMALL_IDS),
    ),
    "phi": (
        "PhiForCausalLM",
        SIZES | dict(intermediate_size=64, num_key_value_heads=2),
    ),
    "phi, normalized heads": (
        "PhiForCausalLM",
        SIZES | dict(intermediate_size=64, qk_layernorm=True),
    ),
    "gptj": ("GPTJForCausalLM", GPT2 | dict(rotary_dim=4)),
    "falcon 7b": ("FalconForCausalLM", SIZES),
    "falcon 40b": (
        "FalconForCausalLM",
        SIZES | dict(new_decoder_architecture=True, num_kv_heads=2),
    ),
    "falcon 11b": (
        "FalconForCausalLM",
        SIZES
        | dict(
            new_decoder_architecture=True,
            num_kv_heads=2,
            num_ln_in_parallel_attn=1,
            tie_word_embeddings=False,
            ffn_hidden_size=72,
        ),
    ),
    "falcon, serial, biases": (
        "FalconForCausalLM",
        SIZES | dict(parallel_attn=False, multi_query=False, bias=True),
    ),
    "mpt": (
        "MptForCausalLM",
        dict(d_model=32, n_heads=4, n_layers=2, vocab_size=V, max_seq_len=POSITIONS),
    ),
    "gemma": ("GemmaForCausalLM", GATED | dict(head_dim=12, **SMALL_IDS)),
    "gemma 2": (
        "Gemma2ForCausalLM",
        GATED
        | dict(
            num_hidden_layers=3,
            head_dim=12,
            query_pre_attn_scalar=5,
            sliding_window=WINDOW,
            attn_logit_softcapping=0.5,
            final_logit_softcapping=0.7,
            **SMALL_IDS,
        ),
    ),
    "gemma 2, no caps": (
        "Gemma2ForCausalLM",
        GATED
        | dict(
            head_dim=12,
            query_pre_attn_scalar=12,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            **SMALL_IDS,
        ),
    ),
    "gemma 3": (
        "Gemma3ForCausalLM",
        GATED
        | dict(
            num_hidden_layers=3,
            head_dim=12,
            query_pre_attn_scalar=20,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e4),
                sliding_attention=dict(rope_type="default", rope_theta=1e2),
            ),
        ),
    ),
    "gemma 3, wide window": (
        "Gemma3ForCausalLM",
        GATED | dict(head_dim=20, query_pre_attn_scalar=20, sliding_window=64),
    ),
    "opt": ("OPTForCausalLM", SIZES | dict(ffn_dim=64, word_embed_proj_dim=32)),
    "mixtral": (
        "MixtralForCausalLM",
        GATED | dict(num_local_experts=4, sliding_window=None),
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        GATED | EXPERTS | dict(shared_expert_intermediate_size=24, norm_topk_prob=True),
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        GATED | EXPERTS | dict(mlp_only_layers=[0], head_dim=8),
    ),
    "qwen2_moe, a layer with a window": (
        "Qwen2MoeForCausalLM",
        GATED
        | EXPERTS
        | WINDOWED
        | dict(shared_expert_intermediate_size=24, norm_topk_prob=True),
    ),
    "glm": ("GlmForCausalLM", GATED | dict(head_dim=12, **SMALL_IDS)),
    "glm4": (
        "Glm4ForCausalLM",
        GATED | dict(head_dim=8, attention_bias=False, **SMALL_IDS),
    ),
    "ernie4_5": ("Ernie4_5ForCausalLM", GATED | dict(head_dim=12, use_bias=True)),
    "seed_oss": (
        "SeedOssForCausalLM",
        GATED | dict(head_dim=16, residual_dropout=0.0, attention_dropout=0.0),
    ),
    "helium": ("HeliumForCausalLM", GATED | dict(head_dim=8, attention_bias=True)),
    "arcee": ("ArceeForCausalLM", GATED | SMALL_IDS),
    "nemotron": ("NemotronForCausalLM", GATED | dict(head_dim=12)),
    "ministral, a layer with a window": (
        "MinistralForCausalLM",
        GATED
        | dict(
            head_dim=12,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        GATED
        | BIASED
        | dict(
            num_hidden_layers=3,
            use_qk_norm=True,
            attention_bias=True,
            routed_scaling_factor=2.5,
            n_shared_experts=2,
        ),
    ),
    "dots1": (
        "Dots1ForCausalLM",
        GATED
        | BIASED
        | dict(
            first_k_dense_replace=0,
            n_shared_experts=1,
            norm_topk_prob=True,
            sliding_window=WINDOW,
            max_window_layers=1,
        ),
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        LATENT
        | dict(
            num_hidden_layers=3,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            num_mtp_layers=0,
            rope_parameters=SCALED,
        ),
    ),
    "deepseek_v3, one group, queries without a latent, other halves": (
        "DeepseekV3ForCausalLM",
        LATENT
        | dict(
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=0,
            num_mtp_layers=0,
            rms_norm_eps=1e-5,
            rope_interleave=False,
        ),
    ),
    # Its settings are those of DeepSeek-V3, whose class of transformers computes it.
    "kimi_k2": (
        "DeepseekV3ForCausalLM",
        LATENT
        | dict(
            num_hidden_layers=3,
            num_experts_per_tok=3,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            num_mtp_layers=0,
            routed_scaling_factor=2.827,
            rope_parameters=SCALED | {"rope_theta": 5e4},
        ),
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        LATENT
        | dict(
            n_group=4,
            topk_group=4,
            topk_method="group_limited_greedy",
            first_k_dense_replace=1,
            rope_parameters=SCALED,
        ),
    ),
    "deepseek_v2, queries without a latent": (
        "DeepseekV2ForCausalLM",
        LATENT | dict(q_lora_rank=None, topk_method="greedy", n_shared_experts=2),
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteForCausalLM",
        LATENT | dict(num_hidden_layers=3, routed_scaling_factor=1.8),
    ),
    "granite": (
        "GraniteForCausalLM",
        GATED
        | dict(
            embedding_multiplier=1.5,
            residual_multiplier=0.22,
            attention_multiplier=0.3,
            logits_scaling=0.6,
        ),
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        GATED | dict(no_rope_layer_interval=2, **SMALL_IDS),
    ),
    "smollm3, listed layers": (
        "SmolLM3ForCausalLM",
        GATED | dict(no_rope_layers=[0, 1], tie_word_embeddings=False, **SMALL_IDS),
    ),
    "cohere": ("CohereForCausalLM", GATED | dict(logit_scale=0.8, **SMALL_IDS)),
    "cohere2": (
        "Cohere2ForCausalLM",
        GATED
        | dict(
            num_hidden_layers=3,
            logit_scale=0.8,
            sliding_window=WINDOW,
            sliding_window_pattern=3,
            **SMALL_IDS,
        ),
    ),
    "stablelm": ("StableLmForCausalLM", GATED | dict(use_qkv_bias=True)),
    "stablelm, parallel": (
        "StableLmForCausalLM",
        GATED | dict(use_parallel_residual=True),
    ),
    "starcoder2": ("Starcoder2ForCausalLM", GATED),
    "starcoder2, window": (
        "Starcoder2ForCausalLM",
        GATED | dict(sliding_window=WINDOW, use_bias=False),
    ),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", GPT2),
    "gpt_bigcode, a key for each query": (
        "GPTBigCodeForCausalLM",
        GPT2 | dict(multi_query=False, n_inner=40),
    ),
    "biogpt": ("BioGptForCausalLM", SIZES | dict(intermediate_size=64)),
    "megatron-bert": ("MegatronBertForPreTraining", SIZES | dict(intermediate_size=64)),
}


# Models of text whose settings have a class of their own beside those of all inputs.
OF_TEXT = ("Gemma3", "Qwen3_5", "Qwen3_5Moe")


def saved(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, **options
) -> Path:
    """Write the model; options: of save_pretrained."""
    import transformers

    kind, config = MODELS[name]
    stem = (
        kind.removesuffix("ForCausalLM")
        .removesuffix("ForPreTraining")
        .removesuffix("LMHead")
    )
    stem = f"{stem}Text" if stem in OF_TEXT else stem
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}Model" if kind.endswith("Head") else kind)(
        getattr(transformers, f"{stem}Config")(**config)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases, which begin as ones and zeros
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer), alpha=0.3)
    model.to(dtype).save_pretrained(folder, **options)
    return folder
