"""Multi-latent attention: the declaration of the feature, and its options, by Megatron's names."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from ...config.options.need import need
from ...config.options.option import option
from ...features import Feature, Later, NoEffect, rules_if

ON = need("model.multi_latent_attention")


@dataclass(frozen=True)
class LatentOptions:
    """Ranks of the latents, and widths of the heads. With --qk-layernorm the latents are normalized."""

    multi_latent_attention: bool = option(
        False,
        help="Multi-latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads are projections "
        "of one short vector, which generation keeps in their place. --qk-layernorm normalizes the vectors.",
        avoid="More products for a token than attention with few key/value heads.",
    )
    q_lora_rank: int | None = option(
        None,
        at_least=1,
        needs=ON,
        help="Width of the vector that queries are projected from. Default: from the hidden state itself.",
    )
    kv_lora_rank: int = option(
        32,
        at_least=1,
        needs=ON,
        help="Width of the vector that keys and values are projected from.",
    )
    qk_head_dim: int = option(
        128,
        at_least=1,
        needs=ON,
        help="Channels of a query and a key of each head that are not rotated.",
    )
    qk_pos_emb_head_dim: int = option(
        64,
        at_least=2,
        needs=ON,
        help="Rotated channels of a query and a key; those of the key are shared by all heads.",
    )
    v_head_dim: int = option(
        128,
        at_least=1,
        needs=ON,
        help="Channels of a value of each head.",
    )
    rope_type: str | None = option(
        None,
        choices=("rope", "yarn"),
        help="Rotary positions of multi-latent attention, in place of --position-embedding-type. Default: yarn with a "
        "--rotary-scaling-factor, else rope.",
    )
    latent_norm_epsilon: float | None = option(
        None,
        above=0,
        needs=need("model.qk_layernorm"),
        help="--norm-epsilon of the norms of the latents, if it is another one.",
    )


own = partial(Later, __package__)
mixer = own(".latent_mixer:LATENT_MIXER")
implied = own(".latent_rules:implied")


def _is_on(config: Any) -> bool:
    return config.model.multi_latent_attention


def _is_off(config: Any) -> bool:
    return not _is_on(config)


def _is_rope_without(config: Any) -> bool:
    return _is_off(config) and config.model.rope_type == "rope"


def _is_yarn_without(config: Any) -> bool:
    return _is_off(config) and config.model.rope_type == "yarn"


def _mixer(model: Any, block: int) -> Any | None:
    return mixer.load() if model.multi_latent_attention else None


def _if_on(part: Later) -> Any:
    return lambda config: part(config) if _is_on(config) else {}


FEATURES = [
    Feature(
        "latent_attention",
        extends={"model": LatentOptions},
        is_on=_is_on,
        implies=_if_on(implied),
        rules=rules_if(
            _is_on,
            own(".latent_rules:latent_problems"),
        )
        + rules_if(_is_yarn_without, own(".latent_rules:scaled_heads")),
        useless=[
            (
                ("model.rope_type",),
                NoEffect("it describes multi-latent attention", _is_rope_without),
            )
        ],
        mixer=_mixer,
        layers=own(".latent_flops:with_projections"),
    )
]
