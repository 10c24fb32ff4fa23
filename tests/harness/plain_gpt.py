"""A GPT as the papers write it: whole tensors, one sample, one head at a time, no parallelism. What ours is
compared with.

Works on a dictionary of logical tensors {name: tensor} in any precision; hidden states are [b, s, h] here.
`load_logical` and `gather_logical` move tensors between that dictionary and the shards of the ranks by their
`ParamSpec` boxes.
"""

import math
from dataclasses import dataclass, replace

import torch

from megatron_ds.config.options.attention import AttentionOptions
from megatron_ds.config.options.block import BlockOptions
from megatron_ds.config.options.model import GATED, ModelConfig
from megatron_ds.config.options.moe import MoEOptions
from megatron_ds.config.options.option import added_options

from .plain_rotation import rotated

PADDING = (
    5.0  # what `load_logical` leaves in padded vocabulary rows: any use of them shows
)


@dataclass(frozen=True)
class TinyConfig(AttentionOptions, *added_options("model"), BlockOptions, MoEOptions):
    """The fields and derived sizes of the model section of the configuration, with odd sizes. GPT-2 style by
    default."""

    num_layers: int = 3
    hidden_size: int = 24
    num_attention_heads: int = 4
    query_groups: int = 4
    head_dim: int = 6
    ffn_size: int = 22
    positions: int = 17
    vocab_size: int = 37
    position_embedding_type: str = "learned_absolute"
    rotary_base: float = 100.0
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    rotary_seq_len_interpolation_factor: float | None = None
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    rotary_ntk_factor: float | None = None
    original_max_position_embeddings: int | None = None
    yarn_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float = 1.0
    yarn_mscale_all_dim: float = 0.0
    yarn_correction_range_round_to_int: bool = True
    normalization: str = "LayerNorm"
    norm_epsilon: float = 1e-5
    activation: str = "gelu"
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    apply_wd_to_qk_layernorm: bool = False
    apply_layernorm_1p: bool = False
    embed_layernorm: bool = False
    untie_embeddings_and_output_weights: bool = False
    init_method_std: float = 0.02
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0

    experts = ModelConfig.experts
    expert_ffn_size = ModelConfig.expert_ffn_size
    dense_width = ModelConfig.dense_width
    windowed = ModelConfig.windowed
    unrotated = ModelConfig.unrotated

    @property
    def is_rotary(self) -> bool:
        return self.position_embedding_type in ("rope", "yarn")

    @property
    def is_gated(self) -> bool:
        return self.activation in GATED

    def padded_vocab_size(self, tp: int) -> int:
        return -(-self.vocab_size // (4 * tp)) * 4 * tp


LLAMA = dict(
    query_groups=2,
    head_dim=8,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
ALIBI = TinyConfig(
    **LLAMA | dict(position_embedding_type="alibi"), num_attention_heads=6
)
GPTJ = TinyConfig(
    head_dim=8,
    position_embedding_type="rope",
    rotary_percent=0.5,
    rotary_interleaved=True,
    use_parallel_residual=True,
    shared_block_norm=True,
    use_bias_in_attn_linear=False,
    output_layer_bias=True,
    untie_embeddings_and_output_weights=True,
)
GEMMA = TinyConfig(
    **LLAMA
    | dict(
        activation="geglu",
        untie_embeddings_and_output_weights=False,
        rotary_seq_len_interpolation_factor=2.0,
    ),
    norm_after_sublayer=True,
    apply_layernorm_1p=True,
    qk_layernorm=True,
    embedding_multiplier=4.5,
    softmax_scale=0.3,
    window_size=(3, 0),
    window_attn_skip_freq="2",
    window_rotary_base=20.0,
)
GEMMA2 = TinyConfig(
    **LLAMA | dict(activation="geglu", untie_embeddings_and_output_weights=False),
    norm_after_sublayer=True,
    apply_layernorm_1p=True,
    softmax_scale=0.3,
    window_size=(3, 0),
    window_attn_skip_freq="2",
    attention_logit_softcapping=0.8,
    final_logit_softcapping=1.5,
)
MPT = TinyConfig(
    position_embedding_type="alibi",
    add_bias_linear=False,
    use_bias_in_norms=False,
)
GRANITE = TinyConfig(
    **LLAMA,
    embedding_multiplier=4.5,
    residual_multiplier=0.4,
    logit_multiplier=0.6,
    no_rope_freq="2",
)
# Styles of published models that differ in several options.
FAMILIES = {
    "gpt-j": GPTJ,
    "gemma 2": GEMMA2,
    "gemma 3": GEMMA,
    "mpt": MPT,
    "granite, a layer without positions": GRANITE,
}
STYLES = {"gpt2": TinyConfig(), "llama": TinyConfig(**LLAMA)}


def logical_shapes(config: TinyConfig) -> dict[str, tuple[int, ...]]:
    """Names and true shapes of every parameter, written out by hand from the naming rules."""
    h, d, n, g, f = (
        config.hidden_size,
        config.head_dim,
        config.num_attention_heads,
        config.query_groups,
        config.ffn_size,
    )
    gated = 2 if config.is_gated else 1
    linear = {
        "self_attention.linear_qkv": ((n + 2 * g) * d, h),
        "self_attention.linear_proj": (h, n * d),
        "mlp.linear_fc1": (gated * f, h),
        "mlp.linear_fc2": (h, f),
    }
    shapes = {"embedding.word_embeddings.weight": (config.vocab_size, h)}
    if config.position_embedding_type == "learned_absolute":
        shapes["embedding.position_embeddings.weight"] = (config.positions, h)
    norms = {"decoder.final_layernorm": h}
    for i in range(config.num_layers):
        layer = f"decoder.layers.{i}"
        norms |= {f"{layer}.{name}_layernorm": h for name in _norms_of_block(config)}
        if config.softmax_type == "learnable":
            shapes[f"{layer}.self_attention.core_attention.softmax_offset"] = (n,)
        if config.qk_layernorm:
            norms |= {f"{layer}.self_attention.{part}_layernorm": d for part in "qk"}
        for name, (rows, columns) in linear.items():
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            has_bias = config.add_bias_linear and (
                "mlp" in name or config.use_bias_in_attn_linear
            )
            if has_bias or config.add_qkv_bias and name.endswith("qkv"):
                shapes[f"{layer}.{name}.bias"] = (rows,)
    for name, width in norms.items():
        shapes[f"{name}.weight"] = (width,)
        if config.normalization == "LayerNorm" and config.use_bias_in_norms:
            shapes[f"{name}.bias"] = (width,)
    if config.untie_embeddings_and_output_weights:
        shapes["output_layer.weight"] = (config.vocab_size, h)
    if config.output_layer_bias:
        shapes["output_layer.bias"] = (config.vocab_size,)
    return shapes


def _norms_of_block(config: TinyConfig) -> list[str]:
    after = ["post_self_attn", "post_mlp"] if config.norm_after_sublayer else []
    before = ["input"] if config.shared_block_norm else ["input", "pre_mlp"]
    return before + after


def logical_weights(config: TinyConfig, seed: int) -> dict[str, torch.Tensor]:
    """Weights large enough that every term matters: nothing is near 0, the scales of norms are not near 1.
    float64."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda shape: (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        / math.sqrt(shape[-1])
    )
    scale = 0.7 - config.apply_layernorm_1p
    return {
        name: draw(shape) * 1.5 + (scale if "norm.weight" in name else 0.0)
        for name, shape in logical_shapes(config).items()
    }


def plain_gpt(
    w: dict[str, torch.Tensor],
    config: TinyConfig,
    tokens,
    position_ids,
    *,
    attention_mask=None,
    drop=lambda site, x: x,
    drop_scores=lambda site, p: p,
    kept_by=lambda layer: None,
    feed_forward=None,
) -> torch.Tensor:
    """Logits [b, s, v]. `drop(site, x [b, s, h])` and `drop_scores(site, p [b, n, s, s])` are where dropout
    goes.

    kept_by  layer number → which tokens of each sample the layer sees, [b, k]; the others pass by it.
             None: all
    feed_forward  (w, name, x [b, s, h], config) → [b, s, h]; None: `plain_mlp`
    """
    x = w["embedding.word_embeddings.weight"][tokens] * config.embedding_multiplier
    if "embedding.position_embeddings.weight" in w:
        x = x + w["embedding.position_embeddings.weight"][position_ids]
    x = drop("embedding", x)
    hidden = (
        torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()
        if attention_mask is None
        else attention_mask[:, 0]
    )
    hidden = hidden.expand(len(tokens), -1, -1)
    x = plain_blocks(
        w,
        "decoder",
        x,
        position_ids,
        hidden,
        config,
        drop,
        drop_scores,
        kept_by,
        feed_forward or plain_mlp,
    )
    x = _norm(w, "decoder.final_layernorm", x, config)
    logits = x @ w.get("output_layer.weight", w["embedding.word_embeddings.weight"]).T
    logits = logits * config.logit_multiplier + w.get("output_layer.bias", 0)
    return _capped(logits, config.final_logit_softcapping)


def _capped(x, cap):
    """Gemma Team 2024 (arXiv:2408.00118), section 2."""
    return x if cap is None else cap * torch.tanh(x / cap)


def plain_mlp(w, name, x, config):
    """The feed-forward of every token."""
    return _linear(
        w,
        f"{name}.linear_fc2",
        _activation(_linear(w, f"{name}.linear_fc1", x), config),
    )


def plain_blocks(
    w,
    name,
    x,
    position_ids,
    hidden,
    config,
    drop,
    drop_scores,
    kept_by,
    feed_forward=plain_mlp,
):
    """x [b, s, h] through all blocks. hidden: bool [b, query, key], True where a query may not look; others
    as `plain_gpt`."""
    everywhere = hidden
    for i in range(config.num_layers):
        layer, kept = f"{name}.layers.{i}", kept_by(i)
        hidden = everywhere | _outside_window(config, i, x.shape[1])
        if kept is None:
            x = _block(
                w,
                layer,
                x,
                position_ids,
                hidden,
                _of_layer(config, i),
                drop,
                drop_scores,
                feed_forward,
            )
            continue
        samples = []
        for n, places in enumerate(kept):  # one sample at a time
            one = slice(n, n + 1)
            part = _block(
                w,
                layer,
                x[one, places],
                position_ids[one, places],
                hidden[one, places][..., places],
                _of_layer(config, i),
                _among_all(drop, n, places, x.shape),
                _scores_among_all(drop_scores, n, places, x.shape),
                feed_forward,
            )
            samples.append(x[n].index_put((places,), part[0]))
        x = torch.stack(samples)
    return x


def _block(w, layer, x, position_ids, hidden, config, drop, drop_scores, feed_forward):
    norm = lambda name, x: _norm(w, f"{layer}.{name}_layernorm", x, config)
    normed = norm("input", x)
    y = _attention(
        w, f"{layer}.self_attention", normed, position_ids, hidden, config, drop_scores
    )
    if config.norm_after_sublayer:
        y = norm("post_self_attn", y)
    y = y * config.residual_multiplier
    first, x = x, x + drop(f"{layer}.self_attention", y)
    if not config.shared_block_norm:
        normed = norm("pre_mlp", first if config.use_parallel_residual else x)
    y = feed_forward(w, f"{layer}.mlp", normed, config)
    if config.norm_after_sublayer:
        y = norm("post_mlp", y)
    y = y * config.residual_multiplier
    return x + drop(f"{layer}.mlp", y)


def _of_layer(config: TinyConfig, layer: int) -> TinyConfig:
    """The configuration with the positions of this layer."""
    if config.unrotated[layer]:
        return replace(config, position_embedding_type="none")
    if config.window_rotary_base is None or not config.windowed[layer]:
        return config
    return replace(
        config,
        rotary_base=config.window_rotary_base,
        use_rope_scaling=False,
        rotary_ntk_factor=None,
        rotary_seq_len_interpolation_factor=None,
        position_embedding_type="rope",
    )


def _among_all(drop, n, places, shape):
    """Dropout of the tokens of sample n at these places: what would befall them among all tokens of all
    samples."""

    def dropped(site, x):
        whole = x.new_zeros(*shape[:2], x.shape[-1])
        whole[n, places] = x[0]
        return drop(site, whole)[n : n + 1, places]

    return dropped


def _scores_among_all(drop_scores, n, places, shape):
    def dropped(site, p):
        whole = p.new_zeros(shape[0], p.shape[1], shape[1], shape[1])
        whole[n, :, places[:, None], places] = p[0]
        return drop_scores(site, whole)[n : n + 1, :, places[:, None], places]

    return dropped


def plain_loss(logits, labels, loss_mask):
    """Masked mean of -log softmax at the label."""
    losses = torch.logsumexp(logits, -1) - logits.gather(-1, labels[..., None])[..., 0]
    return (losses * loss_mask).sum() / loss_mask.sum()


def _linear(w, name, x):
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _norm(w, name, x, config):
    if config.normalization == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    factor = w[f"{name}.weight"] + config.apply_layernorm_1p
    x = x / (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt() * factor
    return x + w.get(f"{name}.bias", 0)


def _activation(x, config):
    if config.activation == "swiglu":
        gate, up = x.chunk(2, dim=-1)
        return gate / (1 + (-gate).exp()) * up
    if config.activation == "clamped_swiglu":
        gate, up = x.chunk(2, dim=-1)
        gate = gate.minimum(torch.full_like(gate, 7))
        up = up.minimum(torch.full_like(up, 7)).maximum(torch.full_like(up, -7))
        return gate / (1 + (-1.702 * gate).exp()) * (up + 1)
    if config.activation == "geglu":
        gate, up = x.chunk(2, dim=-1)
        return _activation(gate, replace(config, activation="gelu")) * up
    assert config.activation == "gelu"
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _attention(w, name, x, position_ids, hidden, config, drop_scores):
    n, g, d = config.num_attention_heads, config.query_groups, config.head_dim
    rows = _linear(w, f"{name}.linear_qkv", x).split(
        d, dim=-1
    )  # (n + 2g) slabs of [b, s, d]
    per_group, scores, values = n // g + 2, [], []
    for head in range(n):
        group, place = divmod(head, n // g)
        q, k, v = (
            rows[group * per_group + place],
            rows[(group + 1) * per_group - 2],
            rows[(group + 1) * per_group - 1],
        )
        if config.qk_layernorm:
            q, k = (
                _norm(w, f"{name}.q_layernorm", q, config),
                _norm(w, f"{name}.k_layernorm", k, config),
            )
        if config.is_rotary:
            q, k = rotated(q, position_ids, config), rotated(k, position_ids, config)
        score = q @ k.transpose(1, 2) * (config.softmax_scale or 1 / math.sqrt(d))
        score = _capped(score, config.attention_logit_softcapping)
        if config.position_embedding_type == "alibi":
            score = (
                score
                - plain_slopes(n)[head]
                * (position_ids[:, :, None] - position_ids[:, None]).abs()
            )
        scores.append(
            _softmax(score.masked_fill(hidden, -math.inf), _sink(w, name, head, config))
        )
        values.append(v)
    p = drop_scores(
        f"{name}.core_attention", torch.stack(scores, dim=1)
    )  # [b, n, s, s]
    return _linear(
        w,
        f"{name}.linear_proj",
        torch.cat([p[:, i] @ values[i] for i in range(n)], dim=-1),
    )


def plain_slopes(n):
    """Press et al. 2021 (arXiv:2108.12409): a geometric sequence that starts at its own ratio; for other
    numbers of heads than powers of two, every second slope of a longer sequence follows."""
    ratio = 2 ** (-8 / n)
    if math.log2(n).is_integer():
        return [ratio ** (i + 1) for i in range(n)]
    lower = 2 ** math.floor(math.log2(n))
    return plain_slopes(lower) + plain_slopes(2 * lower)[::2][: n - lower]


def _outside_window(config, layer, s):
    """bool [s, s]: the keys that Megatron's window, or DeepSpeed's of blocks, hides from each query of this
    layer."""
    if config.sparse_attention == "local":
        block = torch.arange(s) // config.sparse_block
        return (
            block - block[:, None]
        ).abs() > config.sparse_num_sliding_window_blocks // 2
    freq = config.window_attn_skip_freq
    if (
        config.window_size is None
        or freq
        and freq.isdigit()
        and (layer + 1) % int(freq) == 0
    ):
        return torch.zeros(s, s, dtype=torch.bool)
    left, right = (s if side == -1 else side for side in config.window_size)
    return torch.tensor(
        [[not -left <= key - query <= right for key in range(s)] for query in range(s)]
    )


def _sink(w, name, head, config):
    """What the exponents of the scores are added to."""
    if config.softmax_type == "learnable":
        return w[f"{name}.core_attention.softmax_offset"][head].exp()
    return float(config.softmax_type == "off-by-one")


def _softmax(scores, sink):
    exponents = scores.exp()
    return exponents / (exponents.sum(-1, keepdim=True) + sink)


def load_logical(parameters, weights: dict[str, torch.Tensor], tp) -> None:
    """Fill each parameter's shard from the logical tensors; padding becomes `PADDING`."""
    with torch.no_grad():
        for p in parameters:
            p.fill_(PADDING)
            for box in p.spec.boxes(_place(tp.rank, tp.size)):
                p[_slices(box.local, box.sizes)] = weights[p.spec.name][
                    _slices(box.logical, box.sizes)
                ].to(p.dtype)


def gather_logical(per_rank: list[list[tuple]]) -> dict[str, torch.Tensor]:
    """Logical tensors of what each rank holds as (spec, gradient); partial ones are summed, replicas must be
    equal."""
    result, size = {}, len(per_rank)
    for rank, held in enumerate(per_rank):
        for spec, tensor in held:
            whole = result.setdefault(
                spec.name, torch.zeros(spec.shape, dtype=tensor.dtype)
            )
            if spec.tensor_split is None and not spec.partial_over and rank > 0:
                torch.testing.assert_close(
                    whole,
                    tensor,
                    rtol=1e-5,
                    atol=1e-6,
                    msg=lambda m, n=spec.name: f"{n}: {m}",
                )
                continue
            rest = tensor.clone()
            for box in spec.boxes(_place(rank, size)):
                whole[_slices(box.logical, box.sizes)] += tensor[
                    _slices(box.local, box.sizes)
                ]
                rest[_slices(box.local, box.sizes)] = 0
            assert not rest.any(), f"{spec.name}: padding received a gradient"
    return result


def _place(rank, size):
    """Coordinates of a tensor-parallel rank, which divides experts as well."""
    return dict.fromkeys(("tp", "etp"), (rank, size))


def _slices(start, sizes):
    return tuple(slice(a, a + n) for a, n in zip(start, sizes))
