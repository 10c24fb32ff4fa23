"""Llama and Mixtral in plain PyTorch, the peers of workloads of these shapes; parameters have the short names of
`workloads.initial_weights`.

Norms are nn.RMSNorm, attention is SDPA with grouped keys, positions are rotary ("rotate half"). Experts are
torch's grouped products of tokens sorted by expert, as in transformers' grouped_mm; no balancing loss.
"""

import torch
import torch.nn.functional as F
from torch import nn
from workloads import Workload

NORM_EPS = 1e-5
BASE = 10000.0


class PlainLlama(nn.Module):
    """Tokens and labels [b, s] → the mean loss.

    wte      [vocabulary, h], the embedding, which is also the head
    lnf      the norm before the head
    cos, sin [s, channels / 2], of the angles of each position
    """

    def __init__(self, w: Workload):
        super().__init__()
        self.wte = nn.Embedding(w.vocab, w.hidden)
        blocks = [PlainLlamaBlock(w) for _ in range(w.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.lnf = nn.RMSNorm(w.hidden, eps=NORM_EPS)

        # Each pair of channels turns by an angle of its own for each position.
        channels = w.hidden // w.heads
        numbers = torch.arange(0, channels, 2)
        exponents = numbers / channels
        positions = torch.arange(w.seq)
        angles = torch.outer(positions, BASE**-exponents)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens, labels):
        """The mean cross entropy in fp32."""
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        x = self.lnf(x)
        logits = F.linear(x, self.wte.weight)
        logits = logits.flatten(0, 1)
        labels = labels.flatten()
        return F.cross_entropy(logits.float(), labels)


class PlainLlamaBlock(nn.Module):
    """Attention with grouped keys, and a gated feed-forward or a mixture of experts, each behind a norm.

    ln1, ln2   norms before attention and before the feed-forward
    qkv        [(heads + 2 groups) channels, h]: all queries, then all keys, then all values
    proj       [h, h]
    fc1, fc2   [2 f, h], the gate first, and [h, f]; of experts with another dimension before these
    router     [experts, h], in a block with experts
    """

    def __init__(self, w: Workload):
        super().__init__()
        self.heads = w.heads
        self.groups = w.groups
        h = w.hidden

        # Attention.
        channels = h // w.heads
        slots = w.heads + 2 * w.groups
        rows = slots * channels
        self.ln1 = nn.RMSNorm(h, eps=NORM_EPS)
        self.qkv = nn.Linear(h, rows, bias=False)
        self.proj = nn.Linear(h, h, bias=False)

        # The feed-forward.
        self.ln2 = nn.RMSNorm(h, eps=NORM_EPS)
        if w.experts:
            self.router = nn.Linear(h, w.experts, bias=False)
            self.fc1 = Stacked(w.experts, 2 * w.ffn, h)
            self.fc2 = Stacked(w.experts, h, w.ffn)
            self.k = w.k
            self.feed_forward = self.mixture
        else:
            self.fc1 = nn.Linear(h, 2 * w.ffn, bias=False)
            self.fc2 = nn.Linear(w.ffn, h, bias=False)
            self.feed_forward = self.dense

    def forward(self, x, cos, sin):
        """Hidden states [b, s, h] to [b, s, h]. cos, sin: [s, channels / 2]."""
        y = self.ln1(x)
        y = self.qkv(y)
        y = self.attend(y, cos, sin)
        x = x + self.proj(y)
        y = self.ln2(x)
        return x + self.feed_forward(y)

    def attend(self, qkv, cos, sin):
        """Attention of packed heads [b, s, (heads + 2 groups) channels] to [b, s, h]."""
        b, s, _ = qkv.shape
        counts = (self.heads, self.groups, self.groups)
        heads = qkv.view(b, s, sum(counts), -1)
        heads = heads.transpose(1, 2)
        q, k, v = heads.split(counts, dim=1)
        y = F.scaled_dot_product_attention(
            rotated(q, cos, sin),
            rotated(k, cos, sin),
            v,
            is_causal=True,
            enable_gqa=self.groups < self.heads,
        )
        y = y.transpose(1, 2)
        return y.reshape(b, s, -1)

    def dense(self, x):
        """The gated feed-forward."""
        x = self.fc1(x)
        return self.fc2(gated(x))

    def mixture(self, x):
        """Each token's k experts, weighted by a softmax over the chosen ones."""
        tokens = x.flatten(0, 1)
        matrix = self.router.weight.float()
        wide = tokens.float()
        scores = F.linear(wide, matrix)
        weights, experts = scores.softmax(-1).topk(self.k)
        total = weights.sum(-1, keepdim=True)
        weights = weights / total

        # Rows sorted by expert.
        experts = experts.flatten()
        order = experts.argsort(stable=True)
        num_experts = len(self.fc1.weight)
        counts = experts.bincount(minlength=num_experts)
        ends = counts.cumsum(0, dtype=torch.int32)
        places = order // self.k
        rows = tokens[places]

        # The experts, and the weighted sums of their results.
        y = self.fc1(rows, ends)
        y = gated(y)
        y = self.fc2(y, ends)
        weights = weights.flatten()
        weights = weights[order, None]
        y = y * weights.to(y.dtype)
        sums = torch.zeros_like(tokens, dtype=y.dtype)
        sums = sums.index_add(0, places, y)
        return sums.view(x.shape)


class Stacked(nn.Module):
    """The linear layers of all experts, as one tensor [experts, out, into]."""

    def __init__(self, experts: int, out: int, into: int):
        super().__init__()
        weight = torch.empty(experts, out, into)
        self.weight = nn.Parameter(weight)

    def forward(self, rows, ends):
        """Rows [n, into], sorted by expert, to [n, out]. ends: the row behind the last one of each expert."""
        # torch.autocast does not reach grouped products.
        dtype = rows.dtype
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
        matrices = self.weight.to(dtype)
        matrices = matrices.transpose(1, 2)
        return F.grouped_mm(rows.to(dtype), matrices, offs=ends)


def gated(x):
    """SwiGLU of [..., 2 f], the gate first, to [..., f]."""
    gate, up = x.chunk(2, dim=-1)
    gate = F.silu(gate)
    return gate * up


def rotated(x, cos, sin):
    """x [b, n, s, d] turned by the angles of its positions, in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    # The halves of the channels are the two coordinates.
    halves = (
        first * cos - second * sin,
        second * cos + first * sin,
    )
    turned = torch.cat(halves, dim=-1)
    return turned.to(x.dtype)
