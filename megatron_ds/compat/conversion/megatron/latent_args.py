"""Arguments of multi-latent attention and of multi-token prediction in Megatron-LM's checkpoints ↔ our options.

Widths and depths have Megatron's names. Rotary positions of latents are others than those of self-attention:

    rope_type                          None is yarn, the default of megatron-core's configuration
    rotary_scaling_factor, mscale, …   of yarn
    rotary_interleaved                 False, although neighbouring channels are rotated as pairs

Scaled frequencies of self-attention (use_rope_scaling) are not read there.
"""

from collections.abc import Mapping
from typing import Any

from ....config.options.model import ModelConfig
from ....errors import CheckpointError

WIDTHS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
)
# Their arguments → our options.
OF_YARN = {
    "rotary_scaling_factor": "yarn_rotary_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
}
YARN_NEEDED = ("rotary_scaling_factor", "original_max_position_embeddings")
UNREAD = (
    "use_rope_scaling",
    "rope_scaling_factor",
    "rotary_seq_len_interpolation_factor",
    "num_query_groups",
)
# Values of arguments that latents have here.
PLAIN = {
    "rotary_percent": (1, None),
    "rotary_interleaved": (False, None),
    "position_embedding_type": ("rope", "yarn", "none"),
}
OF_DEPTHS = ("mtp_num_layers", "mtp_loss_scaling_factor")


def with_latents(
    found: Mapping[str, Any], args: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return our options `found` of self-attention as those of latents, if the arguments have them.

    Raises CheckpointError for positions that are not computed here.
    """
    if not args.get("multi_latent_attention"):
        return found
    odd = [name for name, plain in PLAIN.items() if args.get(name) not in plain]
    if odd:
        listed = ", ".join(f"{name} {args.get(name)!r}" for name in odd)
        raise CheckpointError(
            f"the model has multi-latent attention with {listed}, which this package does not compute."
        )
    kept = {name: value for name, value in found.items() if name not in UNREAD}
    widths = {name: args[name] for name in WIDTHS if args.get(name) is not None}
    if missing := [name for name in WIDTHS[1:] if type(widths.get(name)) is not int]:
        raise CheckpointError(
            f"the arguments lack {', '.join(missing)}, numbers without which multi-latent attention is not known."
        )
    return {
        **kept,
        **widths,
        **_positions(args),
        "multi_latent_attention": True,
        "rotary_interleaved": True,
        "kv_channels": widths["qk_head_dim"] + widths["qk_pos_emb_head_dim"],
    }


def _positions(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return our options of rotary positions."""
    kind = args.get("rope_type") or "yarn"
    if kind == "rope":
        return {"position_embedding_type": "rope"}
    if kind != "yarn":
        raise CheckpointError(
            f"the model has --rope-type {kind!r}, and this package computes rope and yarn."
        )
    if missing := [name for name in YARN_NEEDED if args.get(name) is None]:
        raise CheckpointError(
            f"the arguments lack {', '.join(missing)}, which YaRN's frequencies depend on."
        )
    values = {
        ours: args[theirs]
        for theirs, ours in OF_YARN.items()
        if args.get(theirs) is not None
    }
    return {"position_embedding_type": "yarn", **values}


def latent_arguments(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of latents, which are values beside others; {} for a model without.

    Raises CheckpointError for what Megatron-LM computes otherwise.
    """
    if not model.multi_latent_attention:
        return {}
    # What is computed otherwise there.
    own_epsilon = model.latent_norm_epsilon not in (None, model.norm_epsilon)
    odd = {
        "--latent-norm-epsilon": own_epsilon and model.qk_layernorm,
        "--no-rotary-interleaved": not model.rotary_interleaved,
        "--no-yarn-correction-range-round-to-int": model.position_embedding_type
        == "yarn"
        and not model.yarn_correction_range_round_to_int,
    }
    if named := [flag for flag, is_odd in odd.items() if is_odd]:
        raise CheckpointError(
            f"Megatron-LM's multi-latent attention does not compute {', '.join(named)}. Choose another format."
        )
    # Widths and positions by their names.
    is_scaled = model.position_embedding_type == "yarn"
    found = {name: getattr(model, name) for name in WIDTHS}
    if is_scaled:
        found |= {theirs: getattr(model, ours) for theirs, ours in OF_YARN.items()}
        found["rotary_scaling_factor"] = model.yarn_factor
    # Beside them the arguments of self-attention have their defaults.
    return found | {
        "multi_latent_attention": True,
        "rope_type": "yarn" if is_scaled else "rope",
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "rotary_interleaved": False,
        "group_query_attention": False,
        "num_query_groups": 1,
    }


def depths_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return our options of further predictions; {} for a model without. Raises CheckpointError for others."""
    if not args.get("mtp_num_layers"):
        return {}
    if args.get("mtp_use_repeated_layer"):
        raise CheckpointError(
            "the model has one block for all predicted tokens (--mtp-use-repeated-layer), which this package does "
            "not compute."
        )
    if args.get("position_embedding_type") == "learned_absolute":
        raise CheckpointError(
            "the model has --mtp-num-layers with learned positions, which this package does not compute."
        )
    return {name: args[name] for name in OF_DEPTHS if args.get(name) is not None}


def depth_arguments(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of further predictions; {} for a model without."""
    if not model.mtp_num_layers:
        return {}
    return {name: getattr(model, name) for name in OF_DEPTHS}
