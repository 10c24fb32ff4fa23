"""Tokens per second of generated text, one process, by dtype and number of texts at once.

    OMP_NUM_THREADS=2 python benchmarks/generation.py                   # workloads S and M, in turns

The models have random weights; each turn continues prompts greedily, as megatron-ds generate does. The median of the
turns with its spread, and the ratios of adjacent turns to the first of them.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workloads import WORKLOADS, Workload
from megatron_ds.config import parse
from megatron_ds.extensions.generation.generator import Generator
from megatron_ds.extensions.generation.requests import GenerationRequest, Sampling
from megatron_ds.host.allocator import set_allocator
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.training.build import Replica, build_engine

DTYPES = {"fp32": [], "bf16": ["--bf16"]}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["S", "M"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--texts", nargs="+", type=int, default=[1, 8], help="at once")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of the prompt")
    parser.add_argument(
        "--tokens", type=int, default=200, help="tokens to generate in a turn"
    )
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    set_allocator(keep_freed=True)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in args.workloads:
        measure(WORKLOADS[name], args)


def measure(workload: Workload, args: argparse.Namespace) -> None:
    """The lines of a workload."""
    models = {name: model_of(workload, DTYPES[name]) for name in args.dtypes}
    speeds = {(name, texts): [] for name in models for texts in args.texts}
    for _ in range(args.turns + 1):
        for name, texts in speeds:
            speeds[name, texts].append(
                tokens_per_second(models[name], workload, texts, args)
            )
    first = [*speeds.values()][0]
    for (name, texts), found in speeds.items():
        ratios = [here / there for here, there in zip(found, first, strict=True)]
        # In the first turn memory is allocated, and kernels are made.
        speed = with_spread(found[1:], ".0f")
        ratio = with_spread(ratios[1:], ".2f")
        print(f"{workload.name} {name} {texts:3d} texts: {speed} tokens/s, × {ratio}")


def with_spread(values: list[float], form: str) -> str:
    """The median, and the smallest and the largest value in parentheses."""
    least = format(min(values), form)
    most = format(max(values), form)
    median = format(statistics.median(values), form)
    return f"{median} ({least}–{most})"


def model_of(workload: Workload, flags: list[str]) -> Replica:
    """A whole GPT of that size, without an optimizer."""
    w = workload
    given = (
        f"--num-layers {w.layers} --hidden-size {w.hidden} --num-attention-heads {w.heads} "
        f"--seq-length {w.seq} --max-position-embeddings {w.seq} --vocab-size {w.vocab} "
        "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data"
    )
    config = parse([*given.split(), *flags])
    mesh = Mesh(config.grid(1), 0, lambda *_: None, torch.device("cpu"))
    return build_engine(config, mesh, trains=False)


def tokens_per_second(
    model: Replica, workload: Workload, texts: int, args: argparse.Namespace
) -> float:
    """Generated tokens per second of one turn; its time includes the prompts."""
    prompt = tuple(range(1, args.prompt + 1))
    request = GenerationRequest(prompt, Sampling(0.0), args.tokens)
    start = time.perf_counter()
    generator = Generator(model, requests=texts, length=args.prompt + args.tokens)
    made = generator.run([request] * texts)
    return sum(map(len, made)) / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
