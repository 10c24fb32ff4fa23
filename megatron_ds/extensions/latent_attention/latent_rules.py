"""What --multi-latent-attention sets in other options, and what it excludes."""

from collections.abc import Iterator, Mapping

from ...config.added_weights import FROZEN_BLOCK
from ...config.run import RunConfig

WHY = "--multi-latent-attention"
ORIGINAL = 4096  # Megatron's sequences before YaRN
TYPE = "model.position_embedding_type"
TARGETS = "adapters.lora_target_modules"
ALL_LINEAR = "all-linear"

# Options of self-attention that have no meaning here.
OTHERS = {
    "model.num_query_groups": "each head has a key and a value of its own",
    "model.group_query_attention": "each head has a key and a value of its own",
    "model.add_qkv_bias": "projections from the latents have no bias",
    "model.apply_wd_to_qk_layernorm": "the norms are those of latents, and do not decay",
    "model.window_rotary_base": "all blocks are rotated alike",
    "model.rotary_ntk_factor": "frequencies are scaled by --rope-type yarn alone",
    "model.sparse_attention": "sparse layouts are those of self-attention",
}


def implied(config: RunConfig) -> Mapping[str, tuple]:
    """Return what it sets where no source does: rotary positions, whose pairs are neighbours.

    --rope-type, where it is given, is the type of the positions in any case.
    """
    model = config.model
    found: dict[str, tuple] = {
        TYPE: (_rope_type(config), WHY),
        "model.kv_channels": (model.qk_head_dim + model.qk_pos_emb_head_dim, WHY),
    }
    if model.rope_type is not None:
        found[TYPE] = (model.rope_type, f"--rope-type {model.rope_type}", True)
    if TYPE not in config.sources or model.is_rotary or model.rope_type:
        found["model.rotary_interleaved"] = (True, WHY)
    if config.get("adapters.lora_rank") is not None:
        found[TARGETS] = (_adapted(config), WHY)
        if ALL_LINEAR in config.get(TARGETS):
            every = (*_adapted(config), *_to_latents(config))
            found[TARGETS] = (every, f"--lora-target-modules {ALL_LINEAR}", True)
    if "yarn" in (_rope_type(config), model.position_embedding_type):
        why = "Megatron's value of --rope-type yarn"
        found["model.original_max_position_embeddings"] = (ORIGINAL, why)
        found["model.yarn_rotary_scaling_factor"] = (1.0, why)
    return found


def _adapted(config: RunConfig) -> tuple[str, ...]:
    """Return the layers that have adapters by default: those that tensor-parallel ranks divide."""
    of_queries = "linear_q_up_proj"
    if config.model.q_lora_rank is None:
        of_queries = "linear_q_proj"
    return (
        of_queries,
        "linear_kv_up_proj",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
    )


def _to_latents(config: RunConfig) -> tuple[str, ...]:
    """Return the layers that are whole on each rank."""
    of_keys = "linear_kv_down_proj"
    if config.model.q_lora_rank is None:
        return (of_keys,)
    return ("linear_q_down_proj", of_keys)


def _rope_type(config: RunConfig) -> str:
    model = config.model
    is_scaled = (model.yarn_rotary_scaling_factor or 1.0) > 1
    return model.rope_type or ("yarn" if is_scaled else "rope")


def latent_problems(config: RunConfig) -> Iterator[str]:
    """Yield what contradicts latent attention."""
    yield from latent_positions(config)
    yield from latent_composition(config)
    if config.get("adapters.lora_base_bits"):
        yield from encoded_columns(config)


def scaled_heads(config: RunConfig) -> Iterator[str]:
    """YaRN of other attention has another option."""
    yield (
        "[rope_type] is of multi-latent attention, which is off. Use --position-embedding-type yarn, or "
        "--multi-latent-attention."
    )


def latent_positions(config: RunConfig) -> Iterator[str]:
    """Positions are rotary ones, of pairs of channels."""
    model = config.model
    if not model.is_rotary:
        yield (
            "[multi_latent_attention] rotates a part of each query and key, but [position_embedding_type]. Use "
            "--position-embedding-type rope or yarn."
        )
    if model.qk_pos_emb_head_dim % 2:
        yield (
            "[qk_pos_emb_head_dim] is odd, but rotary embeddings rotate pairs of channels. Use "
            f"--qk-pos-emb-head-dim {model.qk_pos_emb_head_dim + 1}."
        )
    if model.rotary_percent != 1:
        yield (
            "[rotary_percent] with [multi_latent_attention]: the channels of --qk-pos-emb-head-dim are rotated, all of "
            "them. Remove it."
        )


def encoded_columns(config: RunConfig) -> Iterator[str]:
    """Frozen weights in few bits have a scale for a run of columns, which ranks do not cut."""
    model = config.model
    ranks = config.parallel.tensor_model_parallel_size
    if ranks == 1:
        return
    of_values = model.num_attention_heads * model.v_head_dim
    for name, columns in (
        ("linear_q_up_proj", model.q_lora_rank or FROZEN_BLOCK),
        ("linear_kv_up_proj", model.kv_lora_rank),
        ("linear_proj", of_values // ranks),
    ):
        if columns % FROZEN_BLOCK:
            yield (
                f"[adapters.lora_base_bits] with [parallel.tensor_model_parallel_size]: a rank has {columns} columns "
                f"of {name}, and {FROZEN_BLOCK} numbers of a row have one scale. Use a size with which it has a "
                f"multiple of {FROZEN_BLOCK}."
            )


def latent_composition(config: RunConfig) -> Iterator[str]:
    """Options of self-attention alone are refused."""
    model = config.model
    for path, why in OTHERS.items():
        name = path.partition(".")[2]
        alike = model.num_attention_heads if name == "num_query_groups" else None
        if not config.is_default(path) and getattr(model, name) != alike:
            yield f"[{name}] with [multi_latent_attention]: {why}. Remove one of the two."
