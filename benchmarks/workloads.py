"""The work every contestant does: model sizes, tokens, initial weights, optimizer. Same bits for all, so
losses must agree.

S is a small GPT (14 M parameters), SV the same with GPT-2's vocabulary, M a GPT-2-small-like one (111 M), T a
tiny one, to see whether a contestant runs. L8K, L16K and L32K are S with one long sequence, a vocabulary of
4,096 and rotary positions; of ours alone. Tokens follow Zipf's law. AdamW, betas .9/.95, weight decay .1 on
matrices, gradient clipping 1.0, tanh-GELU, tied head, no dropout.
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

    Linears are [out, in]; the rows of `qkv` are all queries, then keys, then values.
    """
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
