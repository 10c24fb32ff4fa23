"""The arguments in Megatron-LM's checkpoints ↔ options of our models.

Most options have Megatron's names, so `SAME_NAME` is a list. What decides numbers and is not computed here is
refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ....config.options.model import ModelConfig
from ....errors import CheckpointError
from ....models.attention import scaled_rotary_base
from ....ops.rotary_scaling import Llama3Scaling
from ..beyond_megatron import check_known_to_megatron
from .latent_args import (
    WIDTHS,
    depth_arguments,
    depths_of,
    latent_arguments,
    with_latents,
)
from .names import EMBEDDING

SAME_NAME = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "seq_length",
    "max_position_embeddings",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "normalization",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "apply_layernorm_1p",
    "untie_embeddings_and_output_weights",
    "make_vocab_size_divisible_by",
    "init_method_std",
    "hidden_dropout",
    "attention_dropout",
    "softmax_type",
)
OF_YARN = (
    "yarn_rotary_scaling_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_mscale",
    "yarn_mscale_all_dim",
    "yarn_correction_range_round_to_int",
)
YARN_LENGTH = "yarn_original_max_position_embeddings"
OF_EXPERTS = (
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
)
OF_CAPACITY = (
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
    "moe_pad_expert_input_to_capacity",
)
# Values of arguments that models of this package do not compute: name → (admitted values, what it is).
REFUSED = {
    "apply_residual_connection_post_layernorm": (
        (False, None),
        "residuals after the norm",
    ),
    "apply_query_key_layer_scaling": (
        (False, None),
        "scaled scores of queries and keys",
    ),
    "is_hybrid_model": ((False, None), "Mamba layers"),
    "hybrid_override_pattern": ((None,), "Mamba layers"),
    "heterogeneous_layers_config_path": ((None,), "layers of different kinds"),
    "experimental_attention_variant": ((None,), "another attention"),
    "num_memory_units": ((None,), "memory"),
    "softmax_type": (("vanilla", "off-by-one", None), "weights of its softmax"),
    "qk_clip": ((False, None), "clipped scores"),
    "qk_l2_norm": ((False, None), "queries and keys of unit length"),
    "softmax_scale": ((None,), "its own scale of scores"),
    "activation_func_clamp_value": ((None,), "a clamped activation"),
    "glu_linear_offset": ((None, 0), "an offset in its gated activation"),
    "moe_apply_probs_on_input": (
        (False, None),
        "inputs of experts scaled by the router",
    ),
    "use_mup": ((False, None), "maximal update parametrization"),
    "moe_latent_size": ((None,), "latent experts"),
}
# Counts in the arguments. The largest admitted bounds what is built before it is compared with the tensors.
NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
COUNTS = (
    *NEEDED,
    "ffn_hidden_size",
    "kv_channels",
    "num_query_groups",
    "seq_length",
    "max_position_embeddings",
    "vocab_size",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
    "num_experts",
    "moe_router_topk",
    "mtp_num_layers",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "model_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "ddp_bucket_size",
    "ddp_num_buckets",
    "global_batch_size",
    "consumed_train_samples",
    "skipped_train_samples",
)
MOST = {
    "num_layers": 10_000,
    "num_experts": 100_000,
    "mtp_num_layers": 1000,
    **dict.fromkeys(WIDTHS, 10**6),
}


def check_arguments(args: Mapping[str, Any], place: object) -> None:
    """Raises CheckpointError for arguments that describe no model, and for counts that are out of range."""
    if missing := [name for name in NEEDED if not args.get(name)]:
        raise CheckpointError(
            f"{place}: the arguments in the files lack {', '.join(missing)}: they do not "
            "describe a model. Files before Megatron-LM 1.1 have none; convert them there "
            "first."
        )
    for name in COUNTS:
        value = args.get(name)
        most = MOST.get(name, 2**48)
        if value is not None and (type(value) is not int or not 0 <= value <= most):
            raise CheckpointError(
                f"{place}: the argument {name} is {value!r}, and it must be a count from 0 "
                f"to {most}. The file is damaged."
            )


def local_experts(args: Mapping[str, Any]) -> int:
    """Return the experts of one expert-parallel rank. Raises CheckpointError for sizes that do not divide."""
    experts = args.get("num_experts") or 1
    ranks = args.get("expert_model_parallel_size") or 1
    if args.get("num_experts") and experts % ranks:
        raise CheckpointError(
            f"{experts} experts do not divide over {ranks} expert-parallel ranks. The "
            "arguments in the files are damaged."
        )
    return max(1, experts // ranks)


def model_options(
    args: Mapping[str, Any],
    tensors: Mapping[str, Any],
    bert: bool,
    vocab_size: int | None,
) -> dict[str, Any]:
    """Return our model options, without those at their defaults. tensors: of kind "weight", by our names.

    Raises CheckpointError naming arguments that are not computed here, or that the tensors contradict.
    """
    _refuse(args)
    # Names that both programs share are copied.
    known = {field.name: field for field in fields(ModelConfig)}
    found = {name: args[name] for name in SAME_NAME if args.get(name) is not None}
    if groups := query_groups(args):
        found["num_query_groups"] = groups
    if args.get("use_rotary_position_embeddings"):
        found["position_embedding_type"] = "rope"
    if found.get("position_embedding_type") == "yarn":
        # The rest is derived from several arguments or from the tensors.
        found |= {name: args[name] for name in OF_YARN if args.get(name) is not None}
        found["original_max_position_embeddings"] = args.get(YARN_LENGTH)
    found |= {
        "norm_epsilon": args.get("norm_epsilon")
        or args.get("layernorm_epsilon")
        or 1e-5,
        "activation": activation_of(args),
        "vocab_size": true_vocabulary(args, tensors, vocab_size),
    }
    if args.get("window_size"):
        found["window_size"] = tuple(args["window_size"])
        if freq := args.get("window_attn_skip_freq"):
            found["window_attn_skip_freq"] = str(freq)
    if freq := args.get("no_rope_freq"):
        found["no_rope_freq"] = str(freq)
    if bert:
        found |= {
            "model": "bert",
            "bert_binary_head": bool(args.get("bert_binary_head", True)),
        }
    # Options of experts, latents and depths apply only to models that have them.
    if args.get("num_experts"):
        found |= experts_of(args)
    found = {**with_latents(found, args), **depths_of(args)}
    # Values take the types of our options, and defaults are left out.
    found = {
        name: _plain(value, known[name].default)
        for name, value in found.items()
        if name in known
    }
    return {
        name: value for name, value in found.items() if value != known[name].default
    }


def _refuse(args: Mapping[str, Any]) -> None:
    """Raises CheckpointError for an argument that changes the model and is not computed here."""
    for name, (admitted, noun) in REFUSED.items():
        if args.get(name) not in admitted:
            raise CheckpointError(
                f"the model has {noun} (--{name.replace('_', '-')} {args[name]!r}), which "
                "this package does not compute."
            )
    kind = args.get("rope_type")
    if not args.get("multi_latent_attention") and kind not in ("rope", None):
        raise CheckpointError(
            f"the model has another rotary embedding (--rope-type {kind!r} without multi-latent attention), which "
            "this package does not compute."
        )


def experts_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return our options of experts, for a model that has them."""
    found = {name: args[name] for name in OF_EXPERTS if args.get(name) is not None}
    balancing = args.get("moe_router_load_balancing_type") or "aux_loss"
    names = (balancing,) if isinstance(balancing, str) else tuple(balancing)
    return found | {
        "num_experts": (int(args["num_experts"]),),
        "moe_layer_freq": str(args.get("moe_layer_freq", 1)),
        "moe_router_load_balancing_type": names,
        **capacity_of(args),
    }


def capacity_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return our options of the experts' capacity. In Megatron-LM all tokens of a micro-batch compete for it, in
    evaluation as well; a negative factor is no limit.
    """
    factor = args.get("moe_expert_capacity_factor")
    if factor is not None and not (
        isinstance(factor, int | float) and math.isfinite(factor) and factor
    ):
        raise CheckpointError(
            f"the argument moe_expert_capacity_factor is {factor!r}, and it must be a "
            "number other than 0. The file is damaged."
        )
    if factor is None or factor < 0:
        return {}
    return {
        "moe_expert_capacity_factor": factor,
        "moe_eval_capacity_factor": factor,
        "moe_capacity_scope": "micro-batch",
        "moe_token_drop_policy": args.get("moe_token_drop_policy") or "probs",
        "moe_pad_expert_input_to_capacity": bool(
            args.get("moe_pad_expert_input_to_capacity")
        ),
    }


def _plain(value: Any, default: Any) -> Any:
    """Return a value as it is, or as a float if the default is a float."""
    return (
        float(value)
        if isinstance(default, float) and isinstance(value, int | float)
        else value
    )


def query_groups(args: Mapping[str, Any]) -> int | None:
    """Return the number of key/value heads; None where each query head has its own."""
    groups = args.get("num_query_groups")
    is_grouped = args.get("group_query_attention", groups is not None)
    return (
        int(groups)
        if is_grouped and groups and groups != args["num_attention_heads"]
        else None
    )


def activation_of(args: Mapping[str, Any]) -> str:
    """Return our name of the activation. GELU is the tanh approximation where Megatron fuses it with the bias."""
    if args.get("swiglu"):
        return "swiglu"
    if args.get("squared_relu"):
        return "squared_relu"
    for name in ("geglu", "quick_geglu", "reglu", "gated_linear_unit"):
        if args.get(name):
            raise CheckpointError(
                f"the model has --{name.replace('_', '-')}, and this package computes "
                "swiglu as the only gated activation."
            )
    approximated = args.get("openai_gelu") or args.get("bias_gelu_fusion", True)
    return "gelu" if approximated and not args.get("onnx_safe") else "gelu_exact"


def true_vocabulary(
    args: Mapping[str, Any], tensors: Mapping[str, Any], wanted: int | None
) -> int:
    """Return the rows of the vocabulary without padding. Raises CheckpointError where nothing records it."""
    rows = (
        tensors[EMBEDDING].shape[0]
        if EMBEDDING in tensors
        else args.get("padded_vocab_size")
    )
    size = wanted or args.get("vocab_size")
    if size and not wanted and args.get("tokenizer_type") == "NullTokenizer":
        size += 1  # its end of a document
    if rows is None:
        raise CheckpointError(
            f"the files hold no {EMBEDDING}: a pipeline stage is missing."
        )
    if not size:
        raise CheckpointError(
            f"the vocabulary has {rows} rows with padding, and nothing in the files marks "
            "those that are real. Give the size of the tokenizer: --vocab-size N "
            f"({rows} to keep all of them)."
        )
    if not 0 < size <= rows:
        raise CheckpointError(
            f"the vocabulary has {rows} rows in the files, fewer than the {size} wanted."
        )
    return int(size)


def arguments_of(model: ModelConfig, tensor_parallel: int) -> dict[str, Any]:
    """Return the values of the Namespace that --use-checkpoint-args reads. The inverse of `model_options`."""
    # What Megatron-LM does not compute cannot be written for it.
    _check_computed_by_megatron(model)
    # Names that both programs share are copied; the rest is derived.
    values = {name: getattr(model, name) for name in SAME_NAME if hasattr(model, name)}
    grouped = model.query_groups != model.num_attention_heads
    multiple = model.make_vocab_size_divisible_by * tensor_parallel
    values |= {
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.head_dim,
        "max_position_embeddings": model.positions,
        "group_query_attention": grouped,
        "num_query_groups": model.query_groups if grouped else 1,
        "use_rotary_position_embeddings": model.position_embedding_type == "rope",
        "add_position_embedding": model.position_embedding_type == "learned_absolute",
        "norm_epsilon": model.norm_epsilon,
        "swiglu": model.activation == "swiglu",
        "squared_relu": model.activation == "squared_relu",
        "bias_gelu_fusion": model.activation == "gelu",
        "bert_binary_head": model.bert_binary_head,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": math.ceil(model.vocab_size / multiple) * multiple,
    }
    # Positions, windows and experts have several arguments each.
    values |= _positions_of(model)
    if model.window_size is not None:
        values |= {
            "window_size": model.window_size,
            "window_attn_skip_freq": [int(windowed) for windowed in model.windowed],
        }
    if any(model.unrotated):
        values["no_rope_freq"] = [int(unrotated) for unrotated in model.unrotated]
    if any(model.experts):
        values |= {name: getattr(model, name) for name in OF_EXPERTS}
        values |= {
            name: getattr(model, name)
            for name in OF_CAPACITY
            if model.moe_token_dropping
        }
        values |= {
            "num_experts": max(model.experts),
            "moe_layer_freq": [int(bool(n)) for n in model.experts],
            "moe_router_load_balancing_type": model.moe_router_load_balancing_type[0],
        }
    return values | latent_arguments(model) | depth_arguments(model)


def _check_computed_by_megatron(model: ModelConfig) -> None:
    """Raises CheckpointError for a model that Megatron-LM does not have, or would compute with other results."""
    if model.model not in ("gpt", "bert"):
        raise CheckpointError(f"Megatron-LM has no model {model.model!r}.")
    is_gelu = model.activation == "gelu"
    if model.activation == "relu" or is_gelu and not model.add_bias_linear:
        how = " as its tanh approximation, without biases" if is_gelu else ""
        raise CheckpointError(
            f"Megatron-LM does not compute {model.activation}{how}, so its numbers would "
            "be others. Choose another format."
        )
    check_known_to_megatron(model, "Megatron-LM")
    if model.softmax_type == "learnable":
        raise CheckpointError(
            "weights of the softmax (--softmax-type learnable) are not written in this "
            "format. Choose another format."
        )


def _positions_of(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of scaled rotary positions. Dynamic NTK is another base (`scaled_rotary_base`)."""
    if model.position_embedding_type == "alibi":
        raise CheckpointError(
            "Megatron-LM does not compute ALiBi (--position-embedding-type alibi). Choose "
            "another format."
        )
    length = model.original_max_position_embeddings
    if model.use_rope_scaling and length not in (None, Llama3Scaling.original):
        raise CheckpointError(
            f"Megatron-LM scales rotary frequencies (--use-rope-scaling) from "
            f"{Llama3Scaling.original} tokens, and this model from {length}. Choose "
            "another format."
        )
    if model.position_embedding_type == "yarn" and not model.multi_latent_attention:
        return {name: getattr(model, name) for name in OF_YARN} | {
            "yarn_rotary_scaling_factor": model.yarn_factor,
            YARN_LENGTH: length,
        }
    return {"rotary_base": scaled_rotary_base(model)} if model.is_rotary else {}
