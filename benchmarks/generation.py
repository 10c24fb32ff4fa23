"""Tokens per second of generated text, one process, by dtype and number of texts at once.

    OMP_NUM_THREADS=2 python benchmarks/generation.py                   # workloads S and M, in turns

The models have random weights; each turn continues prompts greedily, as megatron-ds generate does. The median of the
turns with its spread, and the ratios of adjacent turns to the first of them.
"""

import argparse
import itertools
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workloads import WORKLOADS, Workload
from megatron_ds.config import parse
from megatron_ds.extensions.generation.generator import Generator
from megatron_ds.extensions.generation.requests import GenerationRequest, Sampling
from megatron_ds.host.allocator import set_allocator
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.training.build import Replica, build_replica

DTYPES = {"fp32": [], "bf16": ["--bf16"]}
# Options that every run needs, and that do not change what is measured.
REQUIRED = (
    "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data"
)

Speeds = dict[tuple[str, int], list[float]]
"""(dtype, number of texts) → tokens per second of each turn."""


@dataclass(frozen=True)
class Turn:
    """What is generated in each turn: `tokens` tokens behind a prompt of `prompt` tokens."""

    prompt: int
    tokens: int


def main() -> None:
    """Print a table."""
    args = parse_arguments()
    set_allocator(keep_freed=True)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in args.workloads:
        speeds = measure(WORKLOADS[name], args)
        report(name, speeds)


def parse_arguments() -> argparse.Namespace:
    """The flags of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["S", "M"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--texts", nargs="+", type=int, default=[1, 8], help="at once")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of the prompt")
    parser.add_argument(
        "--tokens", type=int, default=200, help="tokens to generate in a turn"
    )
    parser.add_argument("--turns", type=int, default=7)
    return parser.parse_args()


def measure(workload: Workload, args: argparse.Namespace) -> Speeds:
    """The speeds of a workload in all turns."""
    turn = Turn(args.prompt, args.tokens)
    models = {name: model_of(workload, DTYPES[name]) for name in args.dtypes}
    speeds = {case: [] for case in itertools.product(models, args.texts)}
    # One turn of each case after the other, so that all see the same load of the machine.
    for _ in range(args.turns + 1):
        for case, found in speeds.items():
            name, texts = case
            speed = tokens_per_second(models[name], texts, turn)
            found.append(speed)
    return speeds


def report(workload: str, speeds: Speeds) -> None:
    """Print a line for each case, compared with the first of them.

    The first turn is left out: memory is allocated in it, and kernels are made.
    """
    first, *_ = speeds.values()
    for (name, texts), found in speeds.items():
        ratios = [here / there for here, there in zip(found, first, strict=True)]
        speed = with_spread(found[1:], ".0f")
        ratio = with_spread(ratios[1:], ".2f")
        print(f"{workload} {name} {texts:3d} texts: {speed} tokens/s, × {ratio}")


def with_spread(values: list[float], form: str) -> str:
    """The median, and the smallest and the largest value in parentheses."""
    least = format(min(values), form)
    most = format(max(values), form)
    median = format(statistics.median(values), form)
    return f"{median} ({least}–{most})"


def model_of(workload: Workload, flags: list[str]) -> Replica:
    """A whole GPT of that size, without an optimizer."""
    sizes = {
        "--num-layers": workload.layers,
        "--hidden-size": workload.hidden,
        "--num-attention-heads": workload.heads,
        "--seq-length": workload.seq,
        "--max-position-embeddings": workload.seq,
        "--vocab-size": workload.vocab,
    }
    words = []
    for flag, size in sizes.items():
        words += [flag, str(size)]
    config = parse([*words, *REQUIRED.split(), *flags])
    mesh = Mesh(config.grid(1), 0, lambda *_: None, torch.device("cpu"))
    return build_replica(config, mesh, trains=False)


def tokens_per_second(model: Replica, texts: int, turn: Turn) -> float:
    """Generated tokens per second of one turn; its time includes the prompts."""
    prompt = tuple(range(1, turn.prompt + 1))
    request = GenerationRequest(prompt, Sampling(0.0), turn.tokens)
    start = time.perf_counter()
    generator = Generator(model, requests=texts, length=turn.prompt + turn.tokens)
    made = generator.run([request] * texts)
    seconds = time.perf_counter() - start
    tokens = sum(map(len, made))
    return tokens / seconds


if __name__ == "__main__":
    main()
