"""Blocks whose tensors are so small that the host is what takes time: ours, and a plain one of torch.

    run = own_blocks("gpt", 8)             a function: forward and backward of 8 blocks
    calls_of(run) / 8                      Python calls of a block

`gpu_path` lets CPU tensors take the path of a GPU: its implementations, launched by the stand-in driver as
kernels that compute nothing.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

from megatron_ds.config import parse
from megatron_ds.models.block import Block
from megatron_ds.mpu.fake_group import fake_mesh
from megatron_ds.ops import kernel_table, widened_products
from megatron_ds.ops.product import FP32_SUMS
from megatron_ds.pipeline.stage import Stage
from megatron_ds.progress.ramps import Progress
from megatron_ds.training.build import build_replica

from .layout_comparison import open_loader, random_samples
from .stand_in_gpu import StandInGpu, stand_in_gpu

HIDDEN = 16
HEADS = 2
SEQ = 4
JOB = (
    f"--hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {SEQ} --vocab-size 131 "
    "--micro-batch-size 1 --global-batch-size 1 --attention-dropout 0 --mock-data --lr 1e-4 "
    "--train-iters 1000 --num-workers 0 --eval-iters 0"
)
STYLES = {
    "gpt": f"--max-position-embeddings {SEQ} --hidden-dropout 0",
    "gpt, dropout": f"--max-position-embeddings {SEQ} --hidden-dropout 0.1",
    "llama": "--position-embedding-type rope --normalization RMSNorm --swiglu --hidden-dropout 0 "
    "--disable-bias-linear --ffn-hidden-size 48 --untie-embeddings-and-output-weights",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def own_blocks(
    style: str, count: int, dtype: str = "bf16", more: str = ""
) -> Callable[[], None]:
    """Forward and backward of `count` blocks of this package, which a ZeRO optimizer manages."""
    precision = "" if dtype == "fp32" else "--bf16"
    words = f"{JOB} {STYLES[style]} {precision} --num-layers {count} {more}".split()
    config = parse(words, world_size=1)
    mesh = fake_mesh(config.grid(), 0, "cpu")
    replica = build_replica(config, mesh)
    blocks = [m for m in replica.modules if isinstance(m, Block)]
    samples = random_samples(4, SEQ, config.model.vocab_size, seed=1)
    loader = open_loader(config, samples, mesh)
    [batch] = replica.batches.training(loader, Progress(), 1).split(1)
    stage = Stage(0, blocks, is_first=False, is_last=False)
    x = torch.randn(SEQ, 1, HIDDEN, dtype=DTYPES[dtype])

    def run() -> None:
        y = stage.forward(0, batch, x, 1.0)
        stage.backward(0, y)

    run.replica = replica  # which its parameters belong to
    run.stage = stage
    run.batch = batch
    run.x = x
    return run


class PlainBlock(nn.Module):
    """The block of GPT in torch's modules."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(HIDDEN)
        self.norm2 = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.proj = nn.Linear(HIDDEN, HIDDEN)
        self.fc1 = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.fc2 = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [b, s, h] → the same shape."""
        b, s, h = x.shape
        heads = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, h // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(b, s, h))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


def plain_blocks(count: int, dtype: str = "bf16") -> Callable[[], None]:
    """Forward and backward of `count` plain blocks of GPT, whose gradients accumulate."""
    blocks = nn.Sequential(*[PlainBlock() for _ in range(count)]).to(DTYPES[dtype])
    x = torch.randn(1, SEQ, HIDDEN, dtype=DTYPES[dtype], requires_grad=True)
    dy = torch.randn_like(x)

    def run() -> None:
        x.grad = None
        torch.autograd.backward(blocks(x), dy)

    return run


def calls_of(run: Callable[[], None]) -> Counter:
    """Python calls of a run, but those of the stand-in: (file, function) → how many."""
    calls: Counter = Counter()

    def note(frame, event, argument) -> None:
        code = frame.f_code
        if event == "call" and "/harness/" not in code.co_filename:
            calls["/".join(code.co_filename.split("/")[-2:]), code.co_qualname] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


@contextmanager
def torch_path() -> Iterator[None]:
    """Inside, torch's operations compute on CPUs what they compute on GPUs, which all have 16-bit products."""
    with (
        kernel_table.selected("torch"),
        patch.object(widened_products, "has_products", lambda dtype: True),
    ):
        yield


@contextmanager
def gpu_path(cache: Path | None = None) -> Iterator[StandInGpu]:
    """Inside, operations choose what they choose for a GPU, and kernels compute nothing."""
    candidates = kernel_table._candidates

    def of_gpu(operation, device, dtype, mode):
        of_device = "meta" if device == "cpu" else device
        found = candidates(operation, of_device, dtype, mode)
        # torch has these sums on GPUs alone
        return [entry for entry in found if entry.name != FP32_SUMS]

    with (
        stand_in_gpu(cache, hollow=True) as gpu,
        gpu.backend._driver.context(gpu.backend._context),
        patch.object(kernel_table, "_candidates", of_gpu),
        patch.object(widened_products, "has_products", lambda dtype: True),
    ):
        kernel_table.CHOICES.change()
        yield gpu
    kernel_table.CHOICES.change()
