"""A GPT-1.3B in plain torch under torch.compile on one GPU: what `gpu_train.py` is compared with.

    python benchmarks/gpu_peer.py                 # compiled: milliseconds a step, MFU, peak memory
    python benchmarks/gpu_peer.py --rehearse      # a tiny model on any machine

The shapes, the micro-batch and the optimizer are those of gpu_train.py's gpt-1.3b: bf16 weights and gradients
with fp32 masters (torch's fused AdamW), torch's attention, a tied head, clipping at 1.0. Tokens are random. It has a
row of one micro-batch a step, and one of eight. Their gradients are summed in bf16, as plain torch does, which moves
fewer bytes than the fp32 sums of this package.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_train import AS_TRAINED, GPT, SMALL
from megatron_ds.config import ModelConfig, parse
from megatron_ds.planning.flops import layers_of, model_flops, peak_flops, utilization

RATE = 1e-4
BETAS = (0.9, 0.999)
CLIP = 1.0


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of a step."""

    layers: int
    hidden: int
    heads: int
    positions: int
    vocabulary: int
    samples: int


class Block(nn.Module):
    """A block of GPT-2: attention and a feed-forward of four widths, each behind a LayerNorm."""

    def __init__(self, shape: Shape):
        super().__init__()
        width = shape.hidden
        self.heads = shape.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] to [b, s, h]."""
        b, s, h = x.shape

        # Attention.
        packed = self.qkv(self.norms[0](x))
        packed = packed.view(b, s, 3, self.heads, -1)
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = attended.transpose(1, 2)
        attended = attended.reshape(b, s, h)
        x = x + self.projection(attended)

        # The feed-forward.
        hidden = self.up(self.norms[1](x))
        hidden = F.gelu(hidden, approximate="tanh")
        return x + self.down(hidden)


class Model(nn.Module):
    """A GPT with learned positions and a tied head; returns the mean loss."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.hidden)
        self.places = nn.Embedding(shape.positions, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = mean_loss
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """int64 [b, s] twice."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x), self.words.weight, labels)

    def compile_parts(self) -> None:
        """Compile a block, whose code all share, and the head: all blocks as one graph would take minutes."""
        self.blocks = nn.ModuleList(map(torch.compile, self.blocks))
        self.head = torch.compile(self.head)


def mean_loss(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """The mean cross entropy of logits x weightᵀ."""
    logits = F.linear(x, weight)
    logits = logits.flatten(0, 1).float()
    return F.cross_entropy(logits, labels.flatten())


class Masters:
    """fp32 copies of bf16 weights, which AdamW updates."""

    def __init__(self, model: nn.Module):
        self.low = list(model.parameters())
        self.masters = [p.detach().float() for p in self.low]
        on_gpu = self.low[0].is_cuda
        self.adamw = torch.optim.AdamW(
            self.masters,
            lr=RATE,
            betas=BETAS,
            fused=on_gpu or None,
        )

    def step(self) -> None:
        """Clip, update, and copy the result to the weights."""
        for low, master in zip(self.low, self.masters):
            master.grad = low.grad.float()
            low.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.adamw.step()
        with torch.no_grad():
            torch._foreach_copy_(self.low, self.masters)


def measure(
    flags: str,
    layers: int,
    steps: int,
    device: torch.device,
    micro_batches: tuple[int, ...] = (1,),
) -> list[dict]:
    """Seconds of a step, and what follows from them, of the model that the flags of gpu_train.py describe: a row for
    each number of micro-batches."""
    words = [*flags.split(), "--num-layers", str(layers), "--mock-data"]
    config = parse([*words, "--lr", "1e-4", "--train-iters", "1"], world_size=1)
    shape = Shape(
        layers,
        config.model.hidden_size,
        config.model.num_attention_heads,
        config.model.seq_length,
        config.padded_vocab_size,
        config.train.global_batch_size,
    )
    torch.manual_seed(1)
    model = Model(shape).to(device, torch.bfloat16)
    size = (shape.samples, shape.positions + 1)
    tokens = torch.randint(config.model.vocab_size, size, device=device)

    # The first third of the steps warms up, and compiles.
    masters = Masters(model)
    model.compile_parts()
    rows = []
    for number in micro_batches:
        count = steps if number == 1 else max(2, steps // 2)
        seconds, loss = train(model, masters, tokens, count, number)
        row = {"model": "plain torch, torch.compile", "layers": layers, "loss": loss}
        row |= {"micro_batches": number, "first_step_s": seconds[0], "steps_s": seconds}
        rows.append(row | speed_of(seconds, config.model, shape, number, device))
    return rows


def speed_of(
    seconds: list[float],
    model: ModelConfig,
    shape: Shape,
    micro_batches: int,
    device: torch.device,
) -> dict:
    """What follows from the times of steps."""
    step = statistics.median(seconds[len(seconds) // 3 :])
    samples = shape.samples * micro_batches
    flops = model_flops(layers_of(model), samples, shape.positions, shape.vocabulary)
    speed = flops / step
    peak = peak_flops(device, torch.bfloat16)
    allocated = None
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated() / 2**30
    return {
        "step_s": step,
        "tokens_per_s": samples * shape.positions / step,
        "tflops": speed / 1e12,
        "mfu": utilization(speed, peak),
        "allocated_gib": allocated,
    }


def train(
    model: Model,
    masters: Masters,
    tokens: torch.Tensor,
    steps: int,
    micro_batches: int,
) -> tuple[list[float], float]:
    """(seconds of each step, the last loss) of the compiled model. Micro-batches have the same tokens."""
    inputs = tokens[:, :-1]
    labels = tokens[:, 1:]
    seconds = []
    for _ in range(steps):
        synchronize(tokens.device)
        start = time.perf_counter()
        for _ in range(micro_batches):
            loss = model(inputs, labels)
            (loss / micro_batches).backward()
        masters.step()
        synchronize(tokens.device)
        seconds.append(time.perf_counter() - start)
    return seconds, loss.item()


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU has ended already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure, print the result as JSON, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rehearse", action="store_true", help="a tiny model")
    parser.add_argument("--json", type=Path, help="write the result to a file")
    options = parser.parse_args()
    chosen = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if options.rehearse:
        result = measure(SMALL, 2, 3, chosen, (1, 3))
    else:
        result = measure(GPT, 24, options.steps, chosen, AS_TRAINED)
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
