"""Options that neither Megatron-LM nor Megatron-DeepSpeed has, or whose tensors are not converted."""

from ...config.options.model import ModelConfig
from ...errors import CheckpointError

# Options → what a value beside the default means.
BEYOND = {
    "use_parallel_residual": "parallel residuals",
    "embed_layernorm": "a norm of the word embeddings (--embed-layernorm)",
    "norm_after_sublayer": "norms behind attention and feed-forward (--norm-after-sublayer)",
    "use_bias_in_attn_linear": "attention without biases beside a feed-forward with them "
    "(--disable-bias-in-attn-linear)",
    "use_bias_in_norms": "LayerNorm without biases (--disable-bias-in-norms)",
    "output_layer_bias": "a bias of the output layer (--output-layer-bias)",
    "embedding_multiplier": "a factor of the embeddings (--embedding-multiplier)",
    "residual_multiplier": "a factor of attention and feed-forward (--residual-multiplier)",
    "logit_multiplier": "a factor of the logits (--logit-multiplier)",
    "softmax_scale": "a scale of scores of its own (--softmax-scale)",
    "attention_logit_softcapping": "capped scores of attention (--attention-logit-softcapping)",
    "final_logit_softcapping": "capped logits (--final-logit-softcapping)",
    "moe_router_linear_bias": "a bias of the router (--moe-router-linear-bias)",
    "linear_attention_freq": "gated delta nets (--linear-attention-freq)",
    "mixer_pattern": "layers of different kinds (--mixer-pattern)",
    "attention_output_gate": "gates of attention in rows of their own (--attention-output-gate)",
    "norms_behind_attention": "norms behind attention alone (--norms-behind-attention)",
    "qk_layernorm_of_all_heads": "norms of all heads together (--qk-layernorm-of-all-heads)",
    "mixer_multipliers": "factors of activations (--mixer-multipliers)",
    "window_rotary_base": "rotary positions of layers with a window (--window-rotary-base)",
}
GATES = ("geglu", "clamped_swiglu")


def check_known_to_megatron(model: ModelConfig, program: str) -> None:
    """Raises CheckpointError naming the options of a model that `program` does not compute."""
    odd = [
        what
        for name, what in BEYOND.items()
        if getattr(model, name) != getattr(ModelConfig, name)
    ]
    if model.activation in GATES:
        odd.append(f"--activation {model.activation}")
    if odd:
        raise CheckpointError(
            f"{program} does not compute {', '.join(odd)}, or its tensors are not converted. Choose another format."
        )
