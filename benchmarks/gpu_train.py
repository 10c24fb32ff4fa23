"""Training steps on one GPU, of GPT-1.3B and of models with the layers of Llama 7B and Mixtral: MFU, and peak
memory beside the plan.

    python benchmarks/gpu_train.py                         # all models, bf16, 12 steps each
    python benchmarks/gpu_train.py --only gpt-1.3b --steps 20 -- --kernels torch
    python benchmarks/gpu_train.py --rehearse              # tiny models on any machine

Mock data, one process. The number of layers of the shapes is the largest of a few whose plan fits into the free
memory: a step of fewer layers has the same work per layer. The long models train one sequence of 32k tokens,
with causal attention and with a window. Flags after `--` are added to all runs. MFU
counts model FLOPs, without recomputation. `launched_s` is when the host had launched the update, after it had
waited for the norm; what is left of the step is the update and what it gathers.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from contextlib import closing
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ds.config import RunConfig, parse
from megatron_ds.extensions.kernels.prepared_kernels import prepare_kernels
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.ops import kernel_table
from megatron_ds.planning.flops import model_flops, peak_flops, utilization
from megatron_ds.planning.keep_gathered import free_memory
from megatron_ds.planning.world_plan import plan_world
from megatron_ds.progress.ramps import Progress
from megatron_ds.training.build import build_engine
from megatron_ds.training.step import train_step
from tests.harness.layout_comparison import open_loader, random_samples

GPT = (
    "--hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--vocab-size 50304 --micro-batch-size 8 --global-batch-size 8 --bf16 --hidden-dropout 0 "
    "--attention-dropout 0"
)
LLAMA = (
    "--hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 4096 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --vocab-size 32000 --micro-batch-size 2 "
    "--global-batch-size 2 --bf16 --hidden-dropout 0 --attention-dropout 0"
)
# A layer of Mixtral 8x7B with all of its experts: what a rank computes without expert parallelism.
MIXTRAL = (
    LLAMA.replace("11008", "14336") + " --num-query-groups 8 "
    "--num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
)
# One sequence of 32k tokens.
LONG = LLAMA.replace("4096 --position", "32768 --position").replace("size 2", "size 1")
SMALL = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 131 --micro-batch-size 2 "
    "--global-batch-size 2 --max-position-embeddings 32 --bf16 --hidden-dropout 0 --attention-dropout 0"
)
# Name → flags, numbers of layers to try.
MODELS = {
    "gpt-1.3b": (GPT, (24,)),
    "gpt-1.3b-dropout": (
        GPT.replace("dropout 0", "dropout 0.1").replace("size 8", "size 4"),
        (24,),
    ),
    "llama-7b-shape": (LLAMA, (32, 24, 16, 8, 4)),
    "mixtral-shape": (MIXTRAL, (4, 2, 1)),
    "long-sequence": (LONG, (8, 4, 2)),
    "long-window": (f"{LONG} --window-size 4095,0", (8, 4, 2)),
}
ROPE = "--position-embedding-type rope --normalization RMSNorm --swiglu"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
REHEARSED = {
    "gpt-tiny": (SMALL, (2,)),
    "llama-tiny": (f"{SMALL} {ROPE}", (2,)),
    "mixtral-tiny": (f"{SMALL} {ROPE} {EXPERTS}", (2,)),
    "window-tiny": (f"{SMALL} {ROPE} --window-size 7,0", (2,)),
}
COMMON = "--mock-data --lr 1e-4 --train-iters 1000 --lr-warmup-iters 10 --num-workers 1 --eval-iters 0"
FILLED = 0.94  # of the free memory that a plan may need


def fitting(
    name: str,
    flags: str,
    layers: tuple[int, ...],
    device: torch.device,
    more: list[str],
) -> tuple[RunConfig, int, int]:
    """(the configuration with most layers whose plan fits, the planned bytes, the layers)."""
    free = free_memory(device)
    for count in layers:
        words = [*flags.split(), *COMMON.split(), "--num-layers", str(count), *more]
        config = parse(words, world_size=1)
        planned = plan_world(config, device=device.type).worst.peak
        if planned <= free * FILLED:
            return config, planned, count
    raise MemoryError(
        f"{name}: {layers[-1]} layers need {planned / 2**30:.1f} GiB by plan, and "
        f"{free / 2**30:.1f} are free"
    )


def measure(
    name: str, flags: str, layers: tuple[int, ...], args: argparse.Namespace
) -> dict:
    """Train and measure one model."""
    device = torch.device(args.device)
    config, planned, count = fitting(name, flags, layers, device, args.more)
    kernel_table.select(config.train.kernels)
    mesh = Mesh(Grid.fit(1), 0, lambda *_: None, device)
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    # The model, its kernels and its data.
    engine = build_engine(config, mesh)
    seconds = []
    launched = []
    losses = []
    prepared = prepare_kernels(engine)
    size = config.train.global_batch_size
    length = config.model.seq_length
    samples = random_samples(4 * size, length, config.model.vocab_size, seed=1)
    # The steps. What the host launches is timed without the wait for it.
    progress = Progress()
    with closing(open_loader(config, samples, mesh)) as loader:
        for _ in range(args.steps):
            batch = engine.batches.training(loader, progress, size)
            if gpu:
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            outcome = train_step(
                engine, batch, progress, learning_rate=1e-4, weight_decay=0.1
            )
            launched.append(time.perf_counter() - start)
            if gpu:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
            progress = progress.after(size, size * length, skipped=outcome.skipped)
            losses.append(outcome.loss)
    # The first third of the steps warms up.
    measured = statistics.median(seconds[len(seconds) // 3 :])
    flops = model_flops(config.model, size, length, config.padded_vocab_size) / measured
    parameters = sum(p.numel() for p in engine.parameters)
    return {
        "model": name,
        "layers": count,
        "kernels": prepared,
        "parameters": parameters,
        "step_s": measured,
        "first_step_s": seconds[0],
        "launched_s": statistics.median(launched[len(launched) // 3 :]),
        "tokens_per_s": size * length / measured,
        "tflops": flops / 1e12,
        "mfu": utilization(flops, peak_flops(device, torch.bfloat16)),
        "losses": [losses[0], losses[-1]],
        "planned_gib": planned / 2**30,
        "allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30
        if gpu
        else None,
        "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30 if gpu else None,
    }


def text_of(result: dict) -> str:
    """A line for the terminal."""
    mfu = "" if result["mfu"] is None else f", MFU {result['mfu']:.1%}"
    memory = (
        ""
        if result["allocated_gib"] is None
        else (
            f" against {result['allocated_gib']:.1f} allocated, {result['reserved_gib']:.1f} reserved"
        )
    )
    return (
        f"{result['model']} of {result['layers']} layers, {result['parameters'] / 1e9:.2f} B parameters: "
        f"{result['step_s'] * 1e3:.1f} ms a step, {result['tokens_per_s']:,.0f} tokens/s, "
        f"{result['tflops']:.1f} TFLOP/s{mfu}; plan {result['planned_gib']:.2f} GiB{memory}"
    )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--device", default="cuda:0" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", nargs="*", default=[], help="names of models")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny models: does everything run?"
    )
    parser.add_argument("--json", type=Path, help="write the results to a file")
    args = parser.parse_args(argv[:cut])
    args.more = argv[cut + 1 :]
    return args


def main(options: argparse.Namespace) -> int:
    """Measure all models; the exit code. One that fails costs its own figures only; what a lack of memory leaves
    out is no failure."""
    found = []
    code = 0
    models = REHEARSED if options.rehearse else MODELS
    for name, (flags, layers) in models.items():
        if options.only and name not in options.only:
            continue
        try:
            found.append(measure(name, flags, layers, options))
            print(text_of(found[-1]), flush=True)
        except Exception as error:  # noqa: BLE001  the other models are still measured
            is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
            code = code if is_memory else 1
            why = f"{type(error).__name__}: {error}"
            found.append({"model": name, "error": why})
            print(f"{name}: {why}" if is_memory else traceback.format_exc(), flush=True)
        # Figures are kept, and the memory is given to the next model.
        write(found, options.json)
        gc.collect()  # engines hold tensors in cycles
        if options.device != "cpu":
            torch.cuda.empty_cache()
    return code


def write(found: list[dict], file: Path | None) -> None:
    """The file is always whole: the program may be stopped at any time."""
    if file:
        part = file.with_suffix(".part")
        part.write_text(json.dumps(found, indent=1))
        os.replace(part, file)


if __name__ == "__main__":
    sys.exit(main(parse_arguments()))
