"""Tensors of each family in Hugging Face folders: their names and the packings.

Names are those of the files that `save_pretrained` writes. Conv1D weights of GPT-2 are [in, out].
"""

from dataclasses import replace

from ....config.options.model import ModelConfig
from ..family import Row
from ..packings import (
    ALTERNATING,
    EXPERTS,
    EXPERTS_GATE_UP,
    EXPERTS_TRANSPOSED,
    GATE_UP,
    QKV_COLUMNS,
    QKV_ROWS,
    QKV_SPLIT,
    ROWS_FROM_2,
    SAME,
    TRANSPOSED,
)

WORDS = "embedding.word_embeddings.weight"
LAYER = "decoder.layers.{i}."


def _layer(ours: str, *theirs: str, **packing) -> Row:
    """Return a row of a layer of a decoder, weight and bias."""
    return Row(
        f"{LAYER}{ours}.{{leaf}}",
        " ".join(f"{name}.{{leaf}}" for name in theirs),
        **packing,
    )


def _llama_layers(norms: str = "model.layers.{i}") -> tuple[Row, ...]:
    attention = "model.layers.{i}.self_attn"
    return (
        Row(WORDS, "model.embed_tokens.weight"),
        Row("output_layer.weight", "lm_head.weight"),
        Row("decoder.final_layernorm.{leaf}", "model.norm.{leaf}"),
        _layer("input_layernorm", f"{norms}.input_layernorm"),
        _layer(
            "self_attention.linear_qkv",
            *(f"{attention}.{part}_proj" for part in "qkv"),
            packing=QKV_SPLIT,
        ),
        _layer("self_attention.q_layernorm", f"{attention}.q_norm"),
        _layer("self_attention.k_layernorm", f"{attention}.k_norm"),
        _layer("self_attention.linear_proj", f"{attention}.o_proj"),
        _layer("pre_mlp_layernorm", f"{norms}.post_attention_layernorm"),
    )


MLP = "model.layers.{i}.mlp"
LLAMA_ROWS = (
    *_llama_layers(),
    _layer("mlp.linear_fc1", f"{MLP}.gate_proj", f"{MLP}.up_proj", packing=GATE_UP),
    _layer("mlp.linear_fc2", f"{MLP}.down_proj"),
)
GLM_ROWS = (
    *_llama_layers(),
    _layer("post_self_attn_layernorm", "model.layers.{i}.post_self_attn_layernorm"),
    _layer("post_mlp_layernorm", "model.layers.{i}.post_mlp_layernorm"),
    _layer("mlp.linear_fc1", f"{MLP}.gate_up_proj"),
    _layer("mlp.linear_fc2", f"{MLP}.down_proj"),
)
# Feed-forwards without a gate.
UNGATED_ROWS = (
    *_llama_layers(),
    _layer("mlp.linear_fc1", f"{MLP}.up_proj"),
    _layer("mlp.linear_fc2", f"{MLP}.down_proj"),
)
STARCODER2_ROWS = (
    *_llama_layers(),
    _layer("mlp.linear_fc1", f"{MLP}.c_fc"),
    _layer("mlp.linear_fc2", f"{MLP}.c_proj"),
)
SPARSE = "model.layers.{i}.block_sparse_moe"
MIXTRAL_ROWS = (
    *_llama_layers(),
    _layer("mlp.router", f"{SPARSE}.gate"),
    _layer(
        "mlp.experts.linear_fc1",
        f"{SPARSE}.experts.{{e}}.w1",
        f"{SPARSE}.experts.{{e}}.w3",
        packing=EXPERTS_GATE_UP,
    ),
    _layer("mlp.experts.linear_fc2", f"{SPARSE}.experts.{{e}}.w2", packing=EXPERTS),
)
QWEN_MOE_ROWS = (
    *LLAMA_ROWS,
    _layer("mlp.router", f"{MLP}.gate"),
    _layer(
        "mlp.experts.linear_fc1",
        f"{MLP}.experts.{{e}}.gate_proj",
        f"{MLP}.experts.{{e}}.up_proj",
        packing=EXPERTS_GATE_UP,
    ),
    _layer("mlp.experts.linear_fc2", f"{MLP}.experts.{{e}}.down_proj", packing=EXPERTS),
    _layer(
        "mlp.shared_experts.linear_fc1",
        f"{MLP}.shared_expert.gate_proj",
        f"{MLP}.shared_expert.up_proj",
        packing=GATE_UP,
    ),
    _layer("mlp.shared_experts.linear_fc2", f"{MLP}.shared_expert.down_proj"),
    Row(f"{LAYER}mlp.shared_experts.gate_weight", f"{MLP}.shared_expert_gate.weight"),
)
BIASED_MOE_ROWS = (
    Row(f"{LAYER}mlp.router.expert_bias", f"{MLP}.gate.e_score_correction_bias"),
    _layer(
        "mlp.shared_experts.linear_fc1",
        f"{MLP}.shared_experts.gate_proj",
        f"{MLP}.shared_experts.up_proj",
        packing=GATE_UP,
    ),
    _layer("mlp.shared_experts.linear_fc2", f"{MLP}.shared_experts.down_proj"),
    *QWEN_MOE_ROWS,
)
LATENT_ROWS = (
    *(
        _layer(f"self_attention.{ours}", f"model.layers.{{i}}.self_attn.{theirs}")
        for ours, theirs in (
            ("linear_q_proj", "q_proj"),
            ("linear_q_down_proj", "q_a_proj"),
            ("q_layernorm", "q_a_layernorm"),
            ("linear_q_up_proj", "q_b_proj"),
            ("linear_kv_down_proj", "kv_a_proj_with_mqa"),
            ("kv_layernorm", "kv_a_layernorm"),
            ("linear_kv_up_proj", "kv_b_proj"),
        )
    ),
    *BIASED_MOE_ROWS,
)
GPT_OSS_ROWS = (
    *_llama_layers(),
    Row(
        f"{LAYER}self_attention.core_attention.softmax_offset",
        "model.layers.{i}.self_attn.sinks",
    ),
    _layer("mlp.router", f"{MLP}.router"),
    Row(
        f"{LAYER}mlp.experts.linear_fc1.weight",
        f"{MLP}.experts.gate_up_proj",
        ALTERNATING,
    ),
    Row(
        f"{LAYER}mlp.experts.linear_fc1.bias",
        f"{MLP}.experts.gate_up_proj_bias",
        ALTERNATING,
    ),
    Row(
        f"{LAYER}mlp.experts.linear_fc2.weight",
        f"{MLP}.experts.down_proj",
        EXPERTS_TRANSPOSED,
    ),
    Row(f"{LAYER}mlp.experts.linear_fc2.bias", f"{MLP}.experts.down_proj_bias"),
)
GPT2_ROWS = (
    Row(WORDS, "transformer.wte.weight"),
    Row("output_layer.weight", "lm_head.weight"),
    Row("embedding.position_embeddings.weight", "transformer.wpe.weight"),
    Row("decoder.final_layernorm.{leaf}", "transformer.ln_f.{leaf}"),
    _layer("input_layernorm", "transformer.h.{i}.ln_1"),
    _layer(
        "self_attention.linear_qkv",
        "transformer.h.{i}.attn.c_attn",
        packing=QKV_COLUMNS,
    ),
    _layer(
        "self_attention.linear_proj",
        "transformer.h.{i}.attn.c_proj",
        packing=TRANSPOSED,
    ),
    _layer("pre_mlp_layernorm", "transformer.h.{i}.ln_2"),
    _layer("mlp.linear_fc1", "transformer.h.{i}.mlp.c_fc", packing=TRANSPOSED),
    _layer("mlp.linear_fc2", "transformer.h.{i}.mlp.c_proj", packing=TRANSPOSED),
)
# The projections are no Conv1D; rows of one group, or of a key for each query, are ours.
GPT_BIGCODE_ROWS = tuple(replace(row, packing=SAME) for row in GPT2_ROWS)
NEOX = "gpt_neox.layers.{i}"
GPT_NEOX_ROWS = (
    Row(WORDS, "gpt_neox.embed_in.weight"),
    Row("output_layer.weight", "embed_out.weight"),
    Row("decoder.final_layernorm.{leaf}", "gpt_neox.final_layer_norm.{leaf}"),
    _layer("input_layernorm", f"{NEOX}.input_layernorm"),
    _layer("self_attention.linear_qkv", f"{NEOX}.attention.query_key_value"),
    _layer("self_attention.linear_proj", f"{NEOX}.attention.dense"),
    _layer("pre_mlp_layernorm", f"{NEOX}.post_attention_layernorm"),
    _layer("mlp.linear_fc1", f"{NEOX}.mlp.dense_h_to_4h"),
    _layer("mlp.linear_fc2", f"{NEOX}.mlp.dense_4h_to_h"),
)
BLOOMS = "transformer.h.{i}"
BLOOM_ROWS = (
    Row(WORDS, "transformer.word_embeddings.weight"),
    Row("embedding.norm.{leaf}", "transformer.word_embeddings_layernorm.{leaf}"),
    Row("output_layer.weight", "lm_head.weight"),
    Row("decoder.final_layernorm.{leaf}", "transformer.ln_f.{leaf}"),
    _layer("input_layernorm", f"{BLOOMS}.input_layernorm"),
    _layer("self_attention.linear_qkv", f"{BLOOMS}.self_attention.query_key_value"),
    _layer("self_attention.linear_proj", f"{BLOOMS}.self_attention.dense"),
    _layer("pre_mlp_layernorm", f"{BLOOMS}.post_attention_layernorm"),
    _layer("mlp.linear_fc1", f"{BLOOMS}.mlp.dense_h_to_4h"),
    _layer("mlp.linear_fc2", f"{BLOOMS}.mlp.dense_4h_to_h"),
)
ATTENTION = "model.layers.{i}.self_attn"
PHI3_ROWS = (
    Row(WORDS, "model.embed_tokens.weight"),
    Row("output_layer.weight", "lm_head.weight"),
    Row("decoder.final_layernorm.weight", "model.norm.weight"),
    _layer("input_layernorm", "model.layers.{i}.input_layernorm"),
    _layer("self_attention.linear_qkv", f"{ATTENTION}.qkv_proj", packing=QKV_ROWS),
    _layer("self_attention.linear_proj", f"{ATTENTION}.o_proj"),
    _layer("pre_mlp_layernorm", "model.layers.{i}.post_attention_layernorm"),
    _layer("mlp.linear_fc1", f"{MLP}.gate_up_proj"),
    _layer("mlp.linear_fc2", f"{MLP}.down_proj"),
)
GEMMA_ROWS = (
    _layer("post_self_attn_layernorm", "model.layers.{i}.post_attention_layernorm"),
    _layer("pre_mlp_layernorm", "model.layers.{i}.pre_feedforward_layernorm"),
    _layer("post_mlp_layernorm", "model.layers.{i}.post_feedforward_layernorm"),
    *LLAMA_ROWS,
)
PHI_ROWS = (
    Row(WORDS, "model.embed_tokens.weight"),
    Row("output_layer.{leaf}", "lm_head.{leaf}"),
    Row("decoder.final_layernorm.{leaf}", "model.final_layernorm.{leaf}"),
    _layer("input_layernorm", "model.layers.{i}.input_layernorm"),
    _layer(
        "self_attention.linear_qkv",
        *(f"{ATTENTION}.{part}_proj" for part in "qkv"),
        packing=QKV_SPLIT,
    ),
    _layer("self_attention.q_layernorm", f"{ATTENTION}.q_layernorm"),
    _layer("self_attention.k_layernorm", f"{ATTENTION}.k_layernorm"),
    _layer("self_attention.linear_proj", f"{ATTENTION}.dense"),
    _layer("mlp.linear_fc1", f"{MLP}.fc1"),
    _layer("mlp.linear_fc2", f"{MLP}.fc2"),
)
GPTJ_ROWS = (
    Row(WORDS, "transformer.wte.weight"),
    Row("output_layer.{leaf}", "lm_head.{leaf}"),
    Row("decoder.final_layernorm.{leaf}", "transformer.ln_f.{leaf}"),
    _layer("input_layernorm", "transformer.h.{i}.ln_1"),
    _layer(
        "self_attention.linear_qkv",
        *(f"transformer.h.{{i}}.attn.{part}_proj" for part in "qkv"),
        packing=QKV_SPLIT,
    ),
    _layer("self_attention.linear_proj", "transformer.h.{i}.attn.out_proj"),
    _layer("mlp.linear_fc1", "transformer.h.{i}.mlp.fc_in"),
    _layer("mlp.linear_fc2", "transformer.h.{i}.mlp.fc_out"),
)
MPTS = "transformer.blocks.{i}"
MPT_ROWS = (
    Row(WORDS, "transformer.wte.weight"),
    Row("output_layer.weight", "lm_head.weight"),
    Row("decoder.final_layernorm.weight", "transformer.norm_f.weight"),
    _layer("input_layernorm", f"{MPTS}.norm_1"),
    _layer("self_attention.linear_qkv", f"{MPTS}.attn.Wqkv", packing=QKV_ROWS),
    _layer("self_attention.linear_proj", f"{MPTS}.attn.out_proj"),
    _layer("pre_mlp_layernorm", f"{MPTS}.norm_2"),
    _layer("mlp.linear_fc1", f"{MPTS}.ffn.up_proj"),
    _layer("mlp.linear_fc2", f"{MPTS}.ffn.down_proj"),
)


def _has_two_norms(model: ModelConfig) -> bool:
    """Return whether attention and feed-forward run at once, each with its own norm."""
    return model.use_parallel_residual and not model.shared_block_norm


FALCON_ROWS = (
    _layer("input_layernorm", f"{BLOOMS}.ln_attn", suits=_has_two_norms),
    _layer("pre_mlp_layernorm", f"{BLOOMS}.ln_mlp", suits=_has_two_norms),
    *BLOOM_ROWS,
)
OPTS = "model.decoder.layers.{i}"
OPT_ROWS = (
    Row(WORDS, "model.decoder.embed_tokens.weight"),
    Row("output_layer.weight", "lm_head.weight"),
    Row(
        "embedding.position_embeddings.weight",
        "model.decoder.embed_positions.weight",
        ROWS_FROM_2,
    ),
    Row("decoder.final_layernorm.{leaf}", "model.decoder.final_layer_norm.{leaf}"),
    _layer("input_layernorm", f"{OPTS}.self_attn_layer_norm"),
    _layer(
        "self_attention.linear_qkv",
        *(f"{OPTS}.self_attn.{part}_proj" for part in "qkv"),
        packing=QKV_SPLIT,
    ),
    _layer("self_attention.linear_proj", f"{OPTS}.self_attn.out_proj"),
    _layer("pre_mlp_layernorm", f"{OPTS}.final_layer_norm"),
    _layer("mlp.linear_fc1", f"{OPTS}.fc1"),
    _layer("mlp.linear_fc2", f"{OPTS}.fc2"),
)
BIOGPTS = "biogpt.layers.{i}"
BIOGPT_ROWS = (
    Row(WORDS, "biogpt.embed_tokens.weight"),
    Row("output_layer.weight", "output_projection.weight"),
    Row(
        "embedding.position_embeddings.weight",
        "biogpt.embed_positions.weight",
        ROWS_FROM_2,
    ),
    Row("decoder.final_layernorm.{leaf}", "biogpt.layer_norm.{leaf}"),
    _layer("input_layernorm", f"{BIOGPTS}.self_attn_layer_norm"),
    _layer(
        "self_attention.linear_qkv",
        *(f"{BIOGPTS}.self_attn.{part}_proj" for part in "qkv"),
        packing=QKV_SPLIT,
    ),
    _layer("self_attention.linear_proj", f"{BIOGPTS}.self_attn.out_proj"),
    _layer("pre_mlp_layernorm", f"{BIOGPTS}.final_layer_norm"),
    _layer("mlp.linear_fc1", f"{BIOGPTS}.fc1"),
    _layer("mlp.linear_fc2", f"{BIOGPTS}.fc2"),
)
BERT = "encoder.layers.{i}."
BERT_LAYER = "bert.encoder.layer.{i}"
MEGATRON_BERT_ROWS = (
    *(
        Row(
            f"embedding.{ours}_embeddings.weight",
            f"bert.embeddings.{theirs}_embeddings.weight",
        )
        for ours, theirs in (
            ("word", "word"),
            ("position", "position"),
            ("tokentype", "token_type"),
        )
    ),
    Row(f"{BERT}input_layernorm.{{leaf}}", f"{BERT_LAYER}.attention.ln.{{leaf}}"),
    Row(
        f"{BERT}self_attention.linear_qkv.{{leaf}}",
        " ".join(
            f"{BERT_LAYER}.attention.self.{part}.{{leaf}}"
            for part in ("query", "key", "value")
        ),
        QKV_SPLIT,
    ),
    Row(
        f"{BERT}self_attention.linear_proj.{{leaf}}",
        f"{BERT_LAYER}.attention.output.dense.{{leaf}}",
    ),
    Row(f"{BERT}pre_mlp_layernorm.{{leaf}}", f"{BERT_LAYER}.ln.{{leaf}}"),
    Row(f"{BERT}mlp.linear_fc1.{{leaf}}", f"{BERT_LAYER}.intermediate.dense.{{leaf}}"),
    Row(f"{BERT}mlp.linear_fc2.{{leaf}}", f"{BERT_LAYER}.output.dense.{{leaf}}"),
    Row("encoder.final_layernorm.{leaf}", "bert.encoder.ln.{leaf}"),
    Row("pooler.dense.{leaf}", "bert.pooler.dense.{leaf}"),
    Row("binary_head.{leaf}", "cls.seq_relationship.{leaf}"),
    Row("lm_head.dense.{leaf}", "cls.predictions.transform.dense.{leaf}"),
    Row("lm_head.layer_norm.{leaf}", "cls.predictions.transform.LayerNorm.{leaf}"),
    Row("output_layer.bias", "cls.predictions.bias"),
    Row("output_layer.weight", "cls.predictions.decoder.weight"),
)
