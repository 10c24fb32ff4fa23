"""The work every contestant does: model sizes, tokens, initial weights, optimizer. Same bits for all, so
losses must agree.

S is a small GPT (14 M parameters), SV the same with GPT-2's vocabulary, M a GPT-2-small-like one (111 M), T a
tiny one, to see whether a contestant runs. L8K, L16K and L32K are S with one long sequence, a vocabulary of
4,096 and rotary positions; of ours alone. Llama (13 M) and Mixtral (15 M) have RMSNorm, rotary positions,
SwiGLU and grouped keys; peers of these two are eager, compile, ddp and ddp-compile. Tokens follow Zipf's law.
AdamW, betas .9/.95, weight decay .1 on matrices, gradient clipping 1.0, tanh-GELU, tied head, no dropout.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Workload:
    name: str
    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    global_batch: int
    micro_batch: int
    warmup: int  # steps before the clock starts
    steps: int  # measured steps
    rotary: bool = False  # rotary positions in place of learned ones
    # Llama's layers in place of GPT's: groups of heads that share a key, and the width of SwiGLU; of Mixtral
    # also the number of experts, and of those of a token
    groups: int = 0
    ffn: int = 0
    experts: int = 0
    k: int = 2


WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            "T",
            layers=2,
            hidden=64,
            heads=2,
            seq=32,
            vocab=512,
            global_batch=8,
            micro_batch=2,
            warmup=1,
            steps=3,
        ),
        Workload(
            "S",
            layers=6,
            hidden=384,
            heads=6,
            seq=256,
            vocab=8192,
            global_batch=16,
            micro_batch=4,
            warmup=2,
            steps=8,
        ),
        Workload(
            "SV",
            layers=6,
            hidden=384,
            heads=6,
            seq=256,
            vocab=50304,
            global_batch=16,
            micro_batch=4,
            warmup=1,
            steps=4,
        ),
        Workload(
            "M",
            layers=12,
            hidden=768,
            heads=12,
            seq=512,
            vocab=32768,
            global_batch=8,
            micro_batch=2,
            warmup=1,
            steps=3,
        ),
        Workload(
            "Llama",
            layers=6,
            hidden=384,
            heads=6,
            groups=2,
            ffn=1024,
            seq=256,
            vocab=8192,
            global_batch=16,
            micro_batch=4,
            warmup=2,
            steps=8,
        ),
        Workload(
            "Mixtral",
            layers=4,
            hidden=256,
            heads=8,
            groups=4,
            ffn=512,
            experts=8,
            seq=256,
            vocab=8192,
            global_batch=16,
            micro_batch=4,
            warmup=2,
            steps=8,
        ),
        *(
            Workload(
                f"L{thousands}K",
                layers=6,
                hidden=384,
                heads=6,
                seq=1024 * thousands,
                vocab=4096,
                global_batch=1,
                micro_batch=1,
                warmup=1,
                steps=steps,
                rotary=True,
            )
            for thousands, steps in ((8, 4), (16, 2), (32, 1))
        ),
    )
}
LEARNING_RATE = 1e-3
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
CLIP = 1.0
SEED = 1234
NUM_BATCHES = 4


def token_batches(w: Workload) -> np.ndarray:
    """int64 [NUM_BATCHES, global batch, seq + 1]; step i trains on batch i mod NUM_BATCHES."""
    rng = np.random.Generator(np.random.PCG64(SEED))
    frequency = 1.0 / np.arange(1, w.vocab + 1)
    frequency /= frequency.sum()
    identity = rng.permutation(w.vocab)  # which token has which rank in Zipf's law
    ranks = rng.choice(
        w.vocab, size=(NUM_BATCHES, w.global_batch, w.seq + 1), p=frequency
    )
    return identity[ranks].astype(np.int64)


def initial_weights(w: Workload) -> dict[str, np.ndarray]:
    """fp32 arrays by short name.

    Linears are [out, in]; the rows of `qkv` are all queries, then keys, then values, those of a gated `fc1` all gates,
    then what they multiply. Of experts they are [experts, out, in].
    """
    if w.ffn:
        return llama_weights(w)
    rng = np.random.Generator(np.random.PCG64(SEED + 1))
    h = w.hidden
    draw = lambda *shape, std=0.02: (
        rng.standard_normal(shape, dtype=np.float32) * np.float32(std)
    )
    small = 0.02 / math.sqrt(2 * w.layers)
    ones = lambda n: np.ones(n, np.float32)
    zeros = lambda n: np.zeros(n, np.float32)
    weights = {"wte": draw(w.vocab, h), "wpe": draw(w.seq, h)}
    for i in range(w.layers):
        layer = {
            "ln1.w": ones(h),
            "ln1.b": zeros(h),
            "qkv.w": draw(3 * h, h),
            "qkv.b": zeros(3 * h),
            "proj.w": draw(h, h, std=small),
            "proj.b": zeros(h),
            "ln2.w": ones(h),
            "ln2.b": zeros(h),
            "fc1.w": draw(4 * h, h),
            "fc1.b": zeros(4 * h),
            "fc2.w": draw(h, 4 * h, std=small),
            "fc2.b": zeros(h),
        }
        weights |= {f"{i}.{k}": v for k, v in layer.items()}
    return weights | {"lnf.w": ones(h), "lnf.b": zeros(h)}


def llama_weights(w: Workload) -> dict[str, np.ndarray]:
    """`initial_weights` of a workload with Llama's layers."""
    rng = np.random.Generator(np.random.PCG64(SEED + 1))
    h = w.hidden
    draw = lambda *shape, std=0.02: (
        rng.standard_normal(shape, dtype=np.float32) * np.float32(std)
    )
    small = 0.02 / math.sqrt(2 * w.layers)
    rows = (w.heads + 2 * w.groups) * (h // w.heads)
    stacked = (w.experts,) if w.experts else ()
    weights = {"wte": draw(w.vocab, h)}
    for i in range(w.layers):
        layer = {
            "ln1.w": np.ones(h, np.float32),
            "qkv.w": draw(rows, h),
            "proj.w": draw(h, h, std=small),
            "ln2.w": np.ones(h, np.float32),
            "fc1.w": draw(*stacked, 2 * w.ffn, h),
            "fc2.w": draw(*stacked, h, w.ffn, std=small),
        }
        if w.experts:
            layer["router.w"] = draw(w.experts, h)
        weights |= {f"{i}.{k}": v for k, v in layer.items()}
    return weights | {"lnf.w": np.ones(h, np.float32)}
