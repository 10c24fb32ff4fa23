"""Training steps on one GPU, of GPT-1.3B and of models with the layers of Llama 7B and Mixtral: MFU, and peak
memory beside the plan.

    python benchmarks/gpu_train.py                         # all models, bf16, 12 steps each
    python benchmarks/gpu_train.py --only gpt-1.3b --steps 20 -- --kernels torch
    python benchmarks/gpu_train.py --group beyond          # long sequences, and the model with dropout
    python benchmarks/gpu_train.py --rehearse              # tiny models on any machine

Mock data, one process. Each model of the headline has two rows: steps of one micro-batch, and of eight whose gradients
are summed, as users train. The number of layers of the shapes is the largest of a few whose plan fits into the free
memory: a step of fewer layers has the same work per layer. The largest and the smallest are planned, others lie
between them. Initial weights are drawn on the device, because one thread of the host takes minutes for them: they
have the usual spread, and are not those of a run with the same seed. On a GPU the kernels of one more step are
recorded, which shows which attention torch has chosen. The long models train one sequence of 32k tokens,
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
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from torch.profiler import profile, supported_activities

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ds.config import RunConfig, parse
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.extensions.kernels.prepared_kernels import prepare_kernels
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.mpu.param_spec import ParamSpec
from megatron_ds.ops import kernel_table
from megatron_ds.planning.flops import layers_of, model_flops, peak_flops, utilization
from megatron_ds.planning.keep_gathered import free_memory
from megatron_ds.progress.ramps import Progress
from megatron_ds.tensor_parallel.init import CONSTANTS
from megatron_ds.training import build
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
DROPOUT = GPT.replace("dropout 0", "dropout 0.1").replace("size 8", "size 4")


@dataclass(frozen=True)
class Shape:
    """A model. layers: numbers to try, the largest first; micro_batches: of a step, a row for each number"""

    flags: str
    layers: tuple[int, ...]
    micro_batches: tuple[int, ...] = (1,)


AS_TRAINED = (1, 8)
HEADLINE = {
    "gpt-1.3b": Shape(GPT, (24,), AS_TRAINED),
    "llama-7b-shape": Shape(LLAMA, (32, 24, 16, 8, 4), AS_TRAINED),
    "mixtral-shape": Shape(MIXTRAL, (4, 2, 1), AS_TRAINED),
}
# Dropout of attention last: it runs by rows, several times slower.
BEYOND = {
    "long-sequence": Shape(LONG, (8, 4, 2)),
    "long-window": Shape(f"{LONG} --window-size 4095,0", (8, 4, 2)),
    "gpt-1.3b-dropout": Shape(DROPOUT, (24,)),
}
GROUPS = {"headline": HEADLINE, "beyond": BEYOND, "all": HEADLINE | BEYOND}
ROPE = "--position-embedding-type rope --normalization RMSNorm --swiglu"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
REHEARSED = {
    "headline": {
        "gpt-tiny": Shape(SMALL, (2,), (1, 3)),
        "llama-tiny": Shape(f"{SMALL} {ROPE}", (2,), (1, 3)),
        "mixtral-tiny": Shape(f"{SMALL} {ROPE} {EXPERTS}", (2,), (1, 3)),
    },
    "beyond": {
        "window-tiny": Shape(f"{SMALL} {ROPE} --window-size 7,0", (2,)),
        "dropout-tiny": Shape(SMALL.replace("dropout 0", "dropout 0.1"), (2,)),
    },
}
REHEARSED["all"] = REHEARSED["headline"] | REHEARSED["beyond"]
COMMON = "--mock-data --lr 1e-4 --train-iters 1000 --lr-warmup-iters 10 --num-workers 1 --eval-iters 0"
FILLED = 0.94  # of the free memory that a plan may need


def fitting(
    name: str, shape: Shape, device: torch.device, more: list[str]
) -> tuple[RunConfig, int, int]:
    """(the configuration with most layers whose plan fits, the planned bytes, the layers)."""
    room = free_memory(device) * FILLED
    most = shape.layers[0]
    least = shape.layers[-1]
    peak = peak_of(shape, most, device, more)
    if peak <= room:
        return configured(shape, most, more), peak, most
    # Memory grows evenly with the layers, so two plans give that of each number.
    smallest = peak_of(shape, least, device, more)
    of_layer = (peak - smallest) / max(1, most - least)
    for count in shape.layers[1:]:
        planned = smallest + of_layer * (count - least)
        if planned <= room:
            return configured(shape, count, more), int(planned), count
    raise MemoryError(
        f"{name}: {least} layers need {smallest / 2**30:.1f} GiB by plan, and "
        f"{room / FILLED / 2**30:.1f} are free"
    )


def configured(shape: Shape, layers: int, more: list[str]) -> RunConfig:
    """The configuration of a model, for steps of the most micro-batches."""
    words = [*shape.flags.split(), *COMMON.split(), "--num-layers", str(layers)]
    size = int(words[words.index("--micro-batch-size") + 1])
    words += ["--global-batch-size", str(size * max(shape.micro_batches))]
    return parse([*words, *more], world_size=1)


def peak_of(shape: Shape, layers: int, device: torch.device, more: list[str]) -> int:
    """The planned bytes at the peak of a step."""
    config = configured(shape, layers, more)
    return plan_world(config, device=device.type).worst.peak


@contextmanager
def weights_of_the_device() -> Iterator[None]:
    """Inside, initial weights are drawn where they are. Those of masters are others than those of the weights that
    the first update replaces by them."""

    def draw(out: torch.Tensor, spec: ParamSpec, *_: object) -> None:
        constant = CONSTANTS.get(spec.init.kind)
        with torch.no_grad():
            if constant is None:
                out.normal_(0.0, spec.init.std)
            else:
                out.fill_(constant)

    def draw_all(parameters: Iterable[torch.nn.Parameter], *_: object) -> None:
        for parameter in parameters:
            draw(parameter.detach(), parameter.spec)

    with (
        patch.object(build, "initialize", draw_all),
        patch.object(build, "initialize_interval", draw),
    ):
        yield


def measure(name: str, shape: Shape, args: argparse.Namespace) -> list[dict]:
    """Train and measure one model: a row for each number of micro-batches."""
    device = torch.device(args.device)
    config, planned, count = fitting(name, shape, device, args.more)
    kernel_table.select(config.train.kernels)
    mesh = Mesh(Grid.fit(1), 0, lambda *_: None, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    # The model, its kernels and its data.
    start = time.perf_counter()
    with weights_of_the_device():
        replica = build.build_replica(config, mesh)
    prepared = prepare_kernels(replica)
    common = {
        "model": name,
        "layers": count,
        "kernels": prepared,
        "parameters": sum(p.numel() for p in replica.parameters),
        "start_s": time.perf_counter() - start,
        "planned_gib": planned / 2**30,
    }
    # The steps, of all numbers of micro-batches on the same weights.
    length = config.model.seq_length
    largest = config.train.global_batch_size
    samples = random_samples(4 * largest, length, config.model.vocab_size, seed=1)
    rows = []
    with closing(open_loader(config, samples, mesh)) as loader:
        trainer = Steps(replica, loader, device)
        for number in shape.micro_batches:
            size = config.train.micro_batch_size * number
            steps = args.steps if number == 1 else max(2, args.steps // 2)
            row = common | {"micro_batches": number} | trainer.run(size, steps)
            rows.append(row)
        rows[-1]["step_kernels"] = trainer.kernels(size)
    return rows


class Steps:
    """Training steps of one replica, one after another."""

    def __init__(self, replica: build.Replica, loader: object, device: torch.device):
        self._engine = replica
        self._loader = loader
        self._device = device
        self._progress = Progress()

    def run(self, size: int, steps: int) -> dict:
        """Times of steps of `size` samples, and what follows from them."""
        seconds, launched, losses = zip(*(self._step(size) for _ in range(steps)))
        # The first third of the steps warms up.
        measured = statistics.median(seconds[steps // 3 :])
        config = self._engine.config
        length = config.model.seq_length
        flops = model_flops(
            layers_of(config.model), size, length, config.padded_vocab_size
        )
        speed = flops / measured
        device = self._device
        gpu = device.type == "cuda"
        allocated = torch.cuda.max_memory_allocated(device) / 2**30 if gpu else None
        reserved = torch.cuda.max_memory_reserved(device) / 2**30 if gpu else None
        return {
            "step_s": measured,
            "steps_s": seconds,
            "first_step_s": seconds[0],
            "launched_s": statistics.median(launched[steps // 3 :]),
            "tokens_per_s": size * length / measured,
            "tflops": speed / 1e12,
            "mfu": utilization(speed, peak_flops(device, torch.bfloat16)),
            "losses": [losses[0], losses[-1]],
            "allocated_gib": allocated,
            "reserved_gib": reserved,
        }

    def kernels(self, size: int, most: int = 12) -> dict[str, float]:
        """The operations of one more step that take longest: name → milliseconds on the device, or on the host
        where there is none."""
        gpu = self._device.type == "cuda"
        with profile(activities=supported_activities()) as recorded:
            self._step(size)
        times = {
            event.key[:120]: (
                event.self_device_time_total if gpu else event.self_cpu_time_total
            )
            for event in recorded.key_averages()
        }
        longest = sorted(times, key=times.get, reverse=True)[:most]
        return {name: round(times[name] / 1e3, 3) for name in longest}

    def _step(self, size: int) -> tuple[float, float, float]:
        """(seconds, those until the host had launched the update, loss). What the host launches is timed without
        the wait for it."""
        replica = self._engine
        batch = replica.batches.training(self._loader, self._progress, size)
        self._synchronize()
        start = time.perf_counter()
        outcome = train_step(
            replica, batch, self._progress, learning_rate=1e-4, weight_decay=0.1
        )
        launched = time.perf_counter() - start
        self._synchronize()
        seconds = time.perf_counter() - start
        tokens = size * replica.config.model.seq_length
        self._progress = self._progress.after(size, tokens, skipped=outcome.skipped)
        return seconds, launched, outcome.loss

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


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
        f"{result['model']} of {result['layers']} layers, {result['parameters'] / 1e9:.2f} B parameters, "
        f"{result['micro_batches']} micro-batch(es): "
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
    parser.add_argument("--group", choices=GROUPS, default="all")
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
    groups = REHEARSED if options.rehearse else GROUPS
    for name, shape in groups[options.group].items():
        if options.only and name not in options.only:
            continue
        try:
            rows = measure(name, shape, options)
            found += rows
            print(*map(text_of, rows), sep="\n", flush=True)
        except Exception as error:  # noqa: BLE001  the other models are still measured
            is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
            code = code if is_memory else 1
            why = f"{type(error).__name__}: {error}"
            found.append({"model": name, "error": why})
            print(f"{name}: {why}" if is_memory else traceback.format_exc(), flush=True)
        # Figures are kept, and the memory is given to the next model.
        write(found, options.json)
        gc.collect()  # replicas hold tensors in cycles
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
