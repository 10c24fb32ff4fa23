"""Tokens per second of generated text in fp32 and bf16, one process.

    OMP_NUM_THREADS=2 python benchmarks/generation.py                   # workloads S and M, in turns

The models have random weights; each turn continues a prompt greedily through the key-value cache, as
tools/generate_text.py does. The median of the turns with its spread, and the ratio of adjacent turns.
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
from megatron_ds.host.allocator import set_allocator
from megatron_ds.models import MODELS, build_stage
from megatron_ds.models.generation import Ending, Sampling, generate
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.group import solo
from megatron_ds.mpu.mesh import Mesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["S", "M"])
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
    models = {name: model_of(workload, dtype) for name, dtype in DTYPES.items()}
    speeds = {name: [] for name in DTYPES}
    for _ in range(args.turns + 1):
        for name, model in models.items():
            speeds[name].append(tokens_per_second(model, workload, args))
    for name in DTYPES:
        speeds[name].pop(0)  # memory is allocated, kernels are made
        median = statistics.median(speeds[name])
        low = min(speeds[name])
        high = max(speeds[name])
        print(f"{workload.name} {name}: {median:.0f} tokens/s ({low:.0f}–{high:.0f})")
    ratios = [bf16 / fp32 for fp32, bf16 in zip(*speeds.values(), strict=True)]
    print(
        f"{workload.name} bf16 / fp32: {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f}–{max(ratios):.2f})"
    )


def model_of(workload: Workload, dtype: torch.dtype) -> torch.nn.ModuleList:
    """A whole GPT of that size."""
    w = workload
    flags = (
        f"--num-layers {w.layers} --hidden-size {w.hidden} --num-attention-heads {w.heads} "
        f"--seq-length {w.seq} --max-position-embeddings {w.seq} --vocab-size {w.vocab} "
        "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data"
    )
    config = parse(flags.split())
    mesh = Mesh(Grid(), 0, lambda *_: None, torch.device("cpu"))
    ctx = ParallelContext(mesh, dtype=dtype, device=mesh.device, seed=config.train.seed)
    return build_stage(MODELS[config.model.model](config.model, ctx))


def tokens_per_second(
    model: torch.nn.ModuleList, workload: Workload, args: argparse.Namespace
) -> float:
    """Generated tokens per second of one turn; its time includes the prompt."""
    prompt = [*range(1, args.prompt + 1)]
    ending = Ending(args.tokens)
    start = time.perf_counter()
    # The most probable token each time.
    made = generate(
        model,
        prompt,
        ending=ending,
        sampling=Sampling(0.0),
        tp=solo(),
        vocab_size=workload.vocab,
    )
    count = len([*made])
    return count / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
