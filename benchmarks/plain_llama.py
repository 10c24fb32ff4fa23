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
    """Tokens and labels [b, s] → the mean loss. The head is the embedding."""

    def __init__(self, w: Workload):
        super().__init__()
        self.wte = nn.Embedding(w.vocab, w.hidden)
        self.blocks = nn.ModuleList(PlainLlamaBlock(w) for _ in range(w.layers))
        self.lnf = nn.RMSNorm(w.hidden, eps=NORM_EPS)
        channels = w.hidden // w.heads
        angles = torch.arange(w.seq)[:, None] * BASE ** (
            -torch.arange(0, channels, 2) / channels
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens, labels):
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.lnf(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class PlainLlamaBlock(nn.Module):
    def __init__(self, w: Workload):
        super().__init__()
        self.heads = w.heads
        self.groups = w.groups
        h = w.hidden
        channels = h // w.heads
        self.ln1 = nn.RMSNorm(h, eps=NORM_EPS)
        self.ln2 = nn.RMSNorm(h, eps=NORM_EPS)
        self.qkv = nn.Linear(h, (w.heads + 2 * w.groups) * channels, bias=False)
        self.proj = nn.Linear(h, h, bias=False)
        if w.experts:
            self.router = nn.Linear(h, w.experts, bias=False)
            self.fc1 = Stacked(w.experts, 2 * w.ffn, h)
            self.fc2 = Stacked(w.experts, h, w.ffn)
            self.k = w.k
            self.feed_forward = self.mixture
        else:
            self.fc1 = nn.Linear(h, 2 * w.ffn, bias=False)
            self.fc2 = nn.Linear(w.ffn, h, bias=False)
            self.feed_forward = lambda x: self.fc2(gated(self.fc1(x)))

    def forward(self, x, cos, sin):
        x = x + self.proj(self.attend(self.qkv(self.ln1(x)), cos, sin))
        return x + self.feed_forward(self.ln2(x))

    def attend(self, qkv, cos, sin):
        b, s, _ = qkv.shape
        slots = self.heads + 2 * self.groups
        heads = qkv.view(b, s, slots, -1).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.groups, self.groups), dim=1)
        y = F.scaled_dot_product_attention(
            rotated(q, cos, sin),
            rotated(k, cos, sin),
            v,
            is_causal=True,
            enable_gqa=self.groups < self.heads,
        )
        return y.transpose(1, 2).reshape(b, s, -1)

    def mixture(self, x):
        """Each token's k experts, weighted by a softmax over the chosen ones."""
        tokens = x.flatten(0, 1)
        scores = F.linear(tokens.float(), self.router.weight.float())
        weights, experts = scores.softmax(-1).topk(self.k)
        weights = weights / weights.sum(-1, keepdim=True)
        # Rows sorted by expert.
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=len(self.fc1.weight))
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = tokens[order // self.k]
        # The experts, and the weighted sums of their results.
        y = self.fc2(gated(self.fc1(rows, ends)), ends)
        y = y * weights.flatten()[order, None].to(y.dtype)
        return (
            torch.zeros_like(tokens, dtype=y.dtype)
            .index_add(0, order // self.k, y)
            .view(x.shape)
        )


class Stacked(nn.Module):
    """Linear layers of all experts."""

    def __init__(self, experts: int, out: int, into: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out, into))

    def forward(self, rows, ends):
        # torch.autocast does not reach grouped products.
        is_autocast = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if is_autocast else rows.dtype
        matrices = self.weight.to(dtype).transpose(1, 2)
        return F.grouped_mm(rows.to(dtype), matrices, offs=ends)


def gated(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotated(x, cos, sin):
    """x [b, n, s, d] turned by the angles of its positions, in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)
