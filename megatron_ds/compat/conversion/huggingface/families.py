"""The families of models in Hugging Face folders: their names of tensors and the packings.

Names are those of the files that `save_pretrained` writes. Conv1D weights of GPT-2 are [in, out].
"""

from functools import partial

from ..family import Family, Row
from .rows import (
    BLOOM_ROWS,
    FALCON_ROWS,
    GEMMA_ROWS,
    GPT2_ROWS,
    GPT_NEOX_ROWS,
    GPT_OSS_ROWS,
    GPTJ_ROWS,
    LLAMA_ROWS,
    MEGATRON_BERT_ROWS,
    MIXTRAL_ROWS,
    MPT_ROWS,
    OPT_ROWS,
    PHI3_ROWS,
    PHI_ROWS,
    QWEN_MOE_ROWS,
)
from .settings import notes, options, settings
from .tables import (
    BLOOM,
    FALCON,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GPT2,
    GPT_NEOX,
    GPT_OSS,
    GPTJ,
    LLAMA,
    LLAMA_BIAS,
    MEGATRON_BERT,
    MISTRAL,
    MIXTRAL,
    MPT,
    OPT,
    PHI,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
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
            "gpt_oss",
            "GptOssForCausalLM",
            GPT_OSS_ROWS,
            GPT_OSS,
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
        _family("phi3", "Phi3ForCausalLM", PHI3_ROWS, PHI3, prefix="model.", tied=HEAD),
        _family("phi", "PhiForCausalLM", PHI_ROWS, PHI, prefix="model.", tied=HEAD),
        _family(
            "gemma",
            "GemmaForCausalLM",
            LLAMA_ROWS,
            GEMMA,
            prefix="model.",
            tied=HEAD,
            ignored=INVERSE,
        ),
        _family(
            "gemma2",
            "Gemma2ForCausalLM",
            GEMMA_ROWS,
            GEMMA2,
            prefix="model.",
            tied=HEAD,
            ignored=INVERSE,
        ),
        _family(
            "gemma3_text",
            "Gemma3ForCausalLM",
            GEMMA_ROWS,
            GEMMA3,
            prefix="model.",
            tied=HEAD,
        ),
        _family(
            "gptj",
            "GPTJForCausalLM",
            GPTJ_ROWS,
            GPTJ,
            prefix="transformer.",
            ignored=("*.attn.bias", "*.attn.masked_bias"),
            tied=(("lm_head.weight", "transformer.wte.weight"),),
        ),
        _family(
            "falcon",
            "FalconForCausalLM",
            FALCON_ROWS,
            FALCON,
            prefix="transformer.",
            tied=(("lm_head.weight", "transformer.word_embeddings.weight"),),
        ),
        _family(
            "mpt",
            "MptForCausalLM",
            MPT_ROWS,
            MPT,
            prefix="transformer.",
            tied=(("lm_head.weight", "transformer.wte.weight"),),
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
    "gemma3": MULTIMODAL,
    "cohere": "its logits are scaled",
    "gpt_neo": "its attention has one bias, behind it, and none of queries, keys and values",
    "gpt_neox_japanese": NO_TABLE,
    "gpt_bigcode": NO_TABLE,
    "starcoder2": NO_TABLE,
    "stablelm": NO_TABLE,
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
