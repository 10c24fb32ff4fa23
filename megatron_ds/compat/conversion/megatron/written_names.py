"""Keys of a torch_dist checkpoint that is written: names of tensors, and of the states of modules.

A norm is joined with the linear layer behind it, or stands alone. Where megatron-core's own layers (local) and those
of TransformerEngine (te) differ, both keys are written, and a run reads that of its layers:

                          local                                 te
    self-attention        linear_qkv.layer_norm_weight          the same
    latents               input_layernorm.weight                the same
                          q_layernorm.weight                    linear_q_up_proj.layer_norm_weight; kv as q
    dense feed-forward    linear_fc1.layer_norm_weight          the same
      beside latents      pre_mlp_layernorm.weight              linear_fc1.layer_norm_weight
    experts               linear_fc1.layer_norm_weight          pre_mlp_layernorm.weight
      beside latents      pre_mlp_layernorm.weight              the same
"""

import re
from collections.abc import Iterator, Sequence
from itertools import product

from ....config.options.model import ModelConfig

OF_ATTENTION = ("linear_proj", "linear_qkv", "core_attention")
OF_LATENTS = (
    "linear_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "core_attention",
)
OF_QUERIES = ("linear_q_proj",)
OF_LATENT_QUERIES = ("linear_q_down_proj", "linear_q_up_proj")
OF_MLP = ("mlp.linear_fc1", "mlp.linear_fc2")
BLOCK = re.compile(
    r"(?P<layers>(?:encoder|decoder)\.layers)\.(?P<layer>\d+)\.(?P<leaf>.*)"
)
DEPTH = re.compile(
    r"(?P<block>mtp\.layers\.\d+\.transformer_layer)\.(?P<leaf>.*)",
)
# Norms of a block → the linear layer that they may be joined with.
JOINED = {
    "input_layernorm": "self_attention.linear_qkv",
    "pre_mlp_layernorm": "mlp.linear_fc1",
    "self_attention.q_layernorm": "self_attention.linear_q_up_proj",
    "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj",
}
ALONE_BESIDE_LATENTS = ("input_layernorm",)
BOTH_BESIDE_LATENTS = (
    "pre_mlp_layernorm",
    "self_attention.q_layernorm",
    "self_attention.kv_layernorm",
)
JOINED_ELSEWHERE = ("input_layernorm", "pre_mlp_layernorm")


def leaves_of(leaf: str, model: ModelConfig, has_experts: bool) -> Sequence[str]:
    """Return the names inside of a block under which a tensor is written. leaf: our name there."""
    if leaf.startswith("mlp.experts."):
        return (leaf.replace("mlp.experts.", "mlp.experts.experts.", 1),)
    module, _, kind = leaf.rpartition(".")
    joined = f"{JOINED.get(module)}.layer_norm_{kind}"
    is_before_experts = has_experts and module == "pre_mlp_layernorm"
    if not model.multi_latent_attention:
        if module not in JOINED_ELSEWHERE:
            return (leaf,)
        return (joined, leaf) if is_before_experts else (joined,)
    if module in BOTH_BESIDE_LATENTS and not is_before_experts:
        return (leaf, joined)
    return (leaf,)


def states_of(model: ModelConfig) -> dict[str, object]:
    """Return empty states of modules, which TransformerEngine's layers ask for: one for each layer and expert."""
    blocks = "encoder.layers" if model.model == "bert" else "decoder.layers"
    count = model.num_layers
    stacked = len(set(model.experts)) <= 1
    found: dict[str, object] = {}
    if model.model == "bert":
        found["output_layer._extra_state/shard_0_1"] = [None]
    for layer, experts in enumerate(model.experts):
        prefix = f"{blocks}." if stacked else f"{blocks}.{layer}."
        place = (layer, count) if stacked else None
        found |= dict.fromkeys(_states_of_block(prefix, model, experts, place), [None])
    for depth in range(model.mtp_num_layers):
        prefix = f"mtp.layers.{depth}."
        found[f"{prefix}eh_proj._extra_state/shard_0_1"] = [None]
        prefix += "transformer_layer."
        names = _states_of_block(prefix, model, model.experts[-1], None)
        found |= dict.fromkeys(names, [None])
    return found


def _states_of_block(
    prefix: str, model: ModelConfig, experts: int, place: tuple[int, int] | None
) -> Iterator[str]:
    """Yield the keys of one block. place: its number among all, where they are stored together"""
    at, of = place or (0, 1)
    modules = [f"self_attention.{name}" for name in _modules_of_attention(model)]
    for name in modules if experts else (*modules, *OF_MLP):
        yield f"{prefix}{name}._extra_state/shard_{at}_{of}"
    for name, expert in product(OF_MLP, range(experts)):
        inner = name.replace("mlp.", "mlp.experts.experts.")
        one = f"{expert}_{experts}"
        if place is not None:
            one = f"{at}.{expert}_{of}.{experts}"
        yield f"{prefix}{inner}._extra_state/shard_{one}"


def _modules_of_attention(model: ModelConfig) -> Sequence[str]:
    if not model.multi_latent_attention:
        return OF_ATTENTION
    of_queries = OF_QUERIES if model.q_lora_rank is None else OF_LATENT_QUERIES
    return (*OF_LATENTS, *of_queries)
