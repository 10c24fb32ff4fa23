"""The families of models in Hugging Face folders: their names of tensors and the packings.

Names are those of the files that `save_pretrained` writes. Conv1D weights of GPT-2 are [in, out].
"""

from functools import partial

from ..family import Family, Row
from ..packings import (
    EXPERTS,
    EXPERTS_GATE_UP,
    GATE_UP,
    QKV_COLUMNS,
    QKV_SPLIT,
    ROWS_FROM_2,
    TRANSPOSED,
)
from .huggingface_settings import (
    BLOOM,
    GPT2,
    GPT_NEOX,
    LLAMA,
    LLAMA_BIAS,
    MEGATRON_BERT,
    MISTRAL,
    MIXTRAL,
    OPT,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    notes,
    options,
    settings,
)

WORDS = "embedding.word_embeddings.weight"
LAYER = "decoder.layers.{i}."


def _layer(ours: str, *theirs: str, **packing) -> Row:
    """A row of a layer of a decoder, weight and bias."""
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
        Row("decoder.final_layernorm.weight", "model.norm.weight"),
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


def _family(
    model_type: str, architecture: str, rows: tuple[Row, ...], table: tuple, **others
) -> Family:
    return Family(
        model_type,
        rows,
        partial(options, table),
        partial(settings, table),
        about={"model_type": model_type, "architectures": [architecture]},
        notes=partial(notes, table),
        **others,
    )


EMBED = "model.embed_tokens.weight"
HEAD = (("lm_head.weight", EMBED),)
INVERSE = ("*.rotary_emb.inv_freq",)
# Where several families can express a model, the first is written.
FAMILIES = {
    family.name: family
    for family in (
        _family(
            "gpt2",
            "GPT2LMHeadModel",
            GPT2_ROWS,
            GPT2,
            prefix="transformer.",
            ignored=("*.attn.bias", "*.attn.masked_bias"),
            tied=(("lm_head.weight", "transformer.wte.weight"),),
        ),
        _family(
            "llama",
            "LlamaForCausalLM",
            LLAMA_ROWS,
            (*LLAMA, *LLAMA_BIAS),
            prefix="model.",
            tied=HEAD,
            ignored=INVERSE,
        ),
        _family(
            "mistral",
            "MistralForCausalLM",
            LLAMA_ROWS,
            MISTRAL,
            prefix="model.",
            tied=HEAD,
            ignored=INVERSE,
        ),
        _family(
            "qwen2",
            "Qwen2ForCausalLM",
            LLAMA_ROWS,
            QWEN2,
            prefix="model.",
            tied=HEAD,
            ignored=INVERSE,
        ),
        _family(
            "qwen3", "Qwen3ForCausalLM", LLAMA_ROWS, QWEN3, prefix="model.", tied=HEAD
        ),
        _family(
            "mixtral",
            "MixtralForCausalLM",
            MIXTRAL_ROWS,
            MIXTRAL,
            prefix="model.",
            tied=HEAD,
            ignored=INVERSE,
        ),
        _family(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            QWEN_MOE_ROWS,
            QWEN2_MOE,
            prefix="model.",
            tied=HEAD,
        ),
        _family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            QWEN_MOE_ROWS,
            QWEN3_MOE,
            prefix="model.",
            tied=HEAD,
        ),
        _family(
            "gpt_neox",
            "GPTNeoXForCausalLM",
            GPT_NEOX_ROWS,
            GPT_NEOX,
            prefix="gpt_neox.",
            ignored=(
                "*.attention.bias",
                "*.attention.masked_bias",
                "*.attention.rotary_emb.inv_freq",
            ),
            tied=(("embed_out.weight", "gpt_neox.embed_in.weight"),),
        ),
        _family(
            "opt",
            "OPTForCausalLM",
            OPT_ROWS,
            OPT,
            prefix="model.",
            tied=(("lm_head.weight", "model.decoder.embed_tokens.weight"),),
        ),
        _family(
            "bloom",
            "BloomForCausalLM",
            BLOOM_ROWS,
            BLOOM,
            prefix="transformer.",
            tied=(("lm_head.weight", "transformer.word_embeddings.weight"),),
        ),
        _family(
            "megatron-bert",
            "MegatronBertForPreTraining",
            MEGATRON_BERT_ROWS,
            MEGATRON_BERT,
            ignored=("bert.embeddings.position_ids",),
            tied=(
                (
                    "cls.predictions.decoder.weight",
                    "bert.embeddings.word_embeddings.weight",
                ),
                ("cls.predictions.decoder.bias", "cls.predictions.bias"),
            ),
        ),
    )
}
SHARED_NORM = "it has one norm for both halves of a block"
SCALED_EMBEDDINGS = "its embeddings are scaled by the square root of the hidden size"
NO_ROTARY = "some of its layers have no rotary positions"
LATENT = "its attention is latent (MLA)"
MULTIMODAL = (
    "it has more than text: give the folder of its language model, if there is one"
)
NORM_BEHIND = "its norms come after attention and feed-forward, before the sums"
NO_TABLE = "there is no table of the names of its tensors here"
# Reasons of model types that have no table above. A name that is neither here nor there may be misspelt.
REFUSED = {
    "bert": "its norms come after the sums (post-LN), and in this package before them, as in "
    "Megatron's BERT, which is model_type megatron-bert",
    "roberta": "its norms come after the sums (post-LN), and in this package before them",
    "gemma": SCALED_EMBEDDINGS,
    "gemma2": "its scores of attention and its logits are capped by a tanh, which no fused kernel computes",
    "gemma3": MULTIMODAL,
    "gemma3_text": SCALED_EMBEDDINGS,
    "gptj": SHARED_NORM,
    "phi": SHARED_NORM,
    "cohere": SHARED_NORM,
    "falcon": "its blocks have one norm, or another order of queries, keys and values",
    "mpt": "its norms have no biases, which this package does not compute (ALiBi it does)",
    "gpt_oss": "its experts have biases and a clamped activation",
    "gpt_neo": "its attention scores are not scaled",
    "gpt_neox_japanese": NO_TABLE,
    "gpt_bigcode": NO_TABLE,
    "starcoder2": NO_TABLE,
    "stablelm": NO_TABLE,
    "phi3": NO_TABLE,
    "phimoe": NO_TABLE,
    "ministral": NO_TABLE,
    "olmo": "its norms have no weights",
    "olmo2": NORM_BEHIND,
    "olmo3": NORM_BEHIND,
    "olmoe": NO_TABLE,
    "smollm3": NO_ROTARY,
    "llama4": MULTIMODAL,
    "llama4_text": NO_ROTARY,
    "mllama": MULTIMODAL,
    "mistral3": MULTIMODAL,
    "qwen2_vl": MULTIMODAL,
    "qwen2_5_vl": MULTIMODAL,
    "qwen3_vl": MULTIMODAL,
    "qwen3_next": "its attention is linear in most layers",
    "granite": "its embeddings, scores, residuals and logits have multipliers",
    "mamba": "it is a state-space model",
    "mamba2": "it is a state-space model",
    "t5": "it has an encoder and a decoder",
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
}
