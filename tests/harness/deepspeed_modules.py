"""Modules that DeepSpeed trains in the tests of conversion, under the names of three kinds of programs.

They are independent of the package: nothing here imports its models, its tables or deepspeed.
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from tests.harness.plain_gpt import TinyConfig, logical_weights, plain_blocks

VOCAB, LAYERS = 37, 2
GPT = TinyConfig(
    num_layers=LAYERS,
    hidden_size=16,
    num_attention_heads=2,
    query_groups=2,
    head_dim=8,
    ffn_size=24,
    positions=12,
    vocab_size=VOCAB,
)
LLAMA = TinyConfig(
    num_layers=LAYERS,
    hidden_size=16,
    num_attention_heads=4,
    query_groups=2,
    head_dim=4,
    ffn_size=24,
    positions=12,
    vocab_size=VOCAB,
    position_embedding_type="rope",
    rotary_base=10000.0,
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)

# What Megatron-DeepSpeed stores of `GPT`, among much else.
MDS_ARGUMENTS = dict(
    num_layers=LAYERS,
    hidden_size=16,
    num_attention_heads=2,
    num_key_value_heads=2,
    kv_channels=8,
    ffn_hidden_size=24,
    max_position_embeddings=12,
    seq_length=8,
    layernorm_epsilon=1e-5,
    normalization="layernorm",
    bias_gelu_fusion=True,
    padded_vocab_size=VOCAB,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


class Small(nn.Module):
    """Odd sizes, a frozen layer, a shared weight, a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.up, self.norm, self.down = (
            nn.Linear(6, 7),
            nn.LayerNorm(7),
            nn.Linear(7, 6, bias=False),
        )
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.linspace(-1, 1, 6))

    def forward(self, tokens):
        x = self.frozen(self.embed(tokens))
        return self.head(
            x + self.down(self.norm(F.gelu(self.up(x)))) + self.offset.to(x.dtype)
        )


EXPERTS, PARTS = 4, 2  # of a layer; ranks that divide them


class Routed(nn.Module):
    """Layers with experts. moe: class of the layers. No tokens are dropped, and all experts have some."""

    def __init__(self, moe: type, parts: int = PARTS):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            moe(
                6,
                Expert(),
                num_experts=EXPERTS,
                ep_size=parts,
                k=2,
                top2_2nd_expert_sampling=False,
                capacity_factor=float(EXPERTS),
            )
            for _ in range(2)
        )
        self.between, self.head = nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        with torch.no_grad():
            for block in self.blocks:
                block.deepspeed_moe.gate.wg.weight.mul_(4)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.between(x) + block(x)[0]
        return self.head(x)


class Expert(nn.Module):
    """x [.., 6] → the same shape."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 6)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x):
        return self.down(F.gelu(self.up(x))) * self.scale.to(x.dtype)


def global_name(name: str, rank: int) -> str:
    """The name of a parameter of `Routed` on a rank, among all experts."""
    head, is_expert, rest = name.partition(".deepspeed_experts.")
    if not is_expert:
        return name
    number, _, leaf = rest.partition(".")
    return f"{head}{is_expert}{rank % PARTS * EXPERTS // PARTS + int(number)}.{leaf}"


class Named(nn.Module):
    """Parameters under dotted names, in the order of `weights`."""

    def __init__(self, weights: dict[str, torch.Tensor]):
        super().__init__()
        for name, tensor in weights.items():
            *path, leaf = name.split(".")
            module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]
            module.register_parameter(leaf, nn.Parameter(tensor))

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.named_parameters())


# ---- Names and packing of other programs, written out once more, independently of the package's tables.

MDS_BLOCK = {
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}


def in_thirds(qkv: torch.Tensor, config: TinyConfig) -> torch.Tensor:
    """Rows [q, k, v] of each head → all q, all k, all v."""
    return (
        qkv.unflatten(0, (config.num_attention_heads, 3, config.head_dim))
        .transpose(0, 1)
        .flatten(0, 2)
    )


def by_head(qkv: torch.Tensor, config: TinyConfig) -> torch.Tensor:
    """The inverse of `in_thirds`."""
    return (
        qkv.unflatten(0, (3, config.num_attention_heads, config.head_dim))
        .transpose(0, 1)
        .flatten(0, 2)
    )


def mds_leaf(name: str) -> str:
    """decoder.layers.0.mlp.linear_fc1.weight → 0, mlp.dense_h_to_4h.weight"""
    for ours, theirs in MDS_BLOCK.items():
        name = name.replace(ours, theirs)
    return name


class MdsBlock(Named):
    """A block of Megatron-DeepSpeed, which holds [Q; K; V]. x: [b, s, h]"""

    def __init__(self, layer: int):
        prefix = f"decoder.layers.{layer}."
        super().__init__(
            {
                mds_leaf(name.removeprefix(prefix)): in_thirds(w, GPT).float()
                if "qkv" in name
                else w.float()
                for name, w in logical_weights(GPT, 1).items()
                if name.startswith(prefix)
            }
        )

    def forward(self, x):
        ours = {
            name: next(
                (name.replace(b, a) for a, b in MDS_BLOCK.items() if b in name), name
            )
            for name in self.weights
        }
        w = {
            f"d.layers.0.{ours[name]}": by_head(t, GPT)
            if "query_key_value" in name
            else t
            for name, t in self.weights.items()
        }
        one = TinyConfig(**{**vars(GPT), "num_layers": 1})
        hidden = (
            torch.ones(x.shape[1], x.shape[1]).triu(1).bool().expand(len(x), -1, -1)
        )
        places = torch.arange(x.shape[1]).expand(len(x), -1)
        keep = lambda site, value: value
        return plain_blocks(
            w, "d", x, places, hidden, one, keep, keep, lambda layer: None
        )


class MdsEmbedding(Named):
    """Tokens [b, s] → hidden states [b, s, h]."""

    def __init__(self):
        w = logical_weights(GPT, 1)
        super().__init__(
            {
                f"{kind}_embeddings.weight": w[
                    f"embedding.{kind}_embeddings.weight"
                ].float()
                for kind in ("word", "position")
            }
        )

    @property
    def word_embeddings_weight(self):
        """As PipelineModule finds the tied weight."""
        return self.word_embeddings.weight

    def forward(self, tokens):
        return (
            self.word_embeddings.weight[tokens]
            + self.position_embeddings.weight[: tokens.shape[1]]
        )


class MdsNorm(Named):
    """The final norm."""

    def __init__(self):
        w = logical_weights(GPT, 1)
        super().__init__(
            {
                leaf: w[f"decoder.final_layernorm.{leaf}"].float()
                for leaf in ("weight", "bias")
            }
        )

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class HfBlock(nn.Module):
    """A block of Llama: RMSNorm, grouped queries, rotation of halves, SwiGLU. x: [b, s, h]"""

    def __init__(self):
        super().__init__()
        h, d, f, linear = (
            LLAMA.hidden_size,
            LLAMA.head_dim,
            LLAMA.ffn_size,
            partial(nn.Linear, bias=False),
        )
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        for name, heads in zip(
            "qkv", (LLAMA.num_attention_heads, LLAMA.query_groups, LLAMA.query_groups)
        ):
            self.self_attn.add_module(f"{name}_proj", linear(h, heads * d))
        self.self_attn.o_proj = linear(LLAMA.num_attention_heads * d, h)
        self.mlp.gate_proj, self.mlp.up_proj, self.mlp.down_proj = (
            linear(h, f),
            linear(h, f),
            linear(f, h),
        )
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(h, LLAMA.norm_epsilon) for _ in range(2)
        )

    def forward(self, x):
        attention, mlp, y = self.self_attn, self.mlp, self.input_layernorm(x)
        heads = lambda z: z.unflatten(-1, (-1, LLAMA.head_dim)).transpose(
            1, 2
        )  # [b, n, s, d]
        q, k, v = (
            heads(project(y))
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        y = F.scaled_dot_product_attention(
            rotated(q), rotated(k), v, is_causal=True, enable_gqa=True
        )
        x = x + attention.o_proj(y.transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(x)
        return x + mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [b, n, s, d], of the pairs (i, i + d/2)."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * LLAMA.rotary_base ** (
        -torch.arange(half) / half
    )
    a, b = x.chunk(2, -1)
    return torch.cat(
        [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1
    )


class HfLlama(nn.Module):
    """A Llama with the names of Hugging Face. Tokens [b, s] → logits [b, s, v]"""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, LLAMA.hidden_size)
        self.model.layers = nn.ModuleList(HfBlock() for _ in range(LAYERS))
        self.model.norm = nn.RMSNorm(LLAMA.hidden_size, LLAMA.norm_epsilon)
        self.lm_head = nn.Linear(LLAMA.hidden_size, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token. Logits [b, s, v] of tokens[:, :-1]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def tokens_of(
    step: int, rank: int | None = None, ranks: int = 2, vocab: int = VOCAB
) -> torch.Tensor:
    """int64 [2, 9] of a rank, [2 · ranks, 9] of all. No multiples of 11: those end documents in our runs."""
    draw = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(1, vocab, (2 * ranks, 9), generator=draw)
    tokens = tokens.where(tokens % 11 > 0, tokens - 1)
    return tokens if rank is None else tokens[2 * rank : 2 * rank + 2]
