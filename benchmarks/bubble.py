"""The bubble that real ranks show, beside the one that the simulator foretells.

    python benchmarks/bubble.py          # 1F1B, interleaved, ZB-H1 and ZB-V on 2 and 4 processes, two minutes
    python benchmarks/bubble.py --schedules zb-h2 --ranks 4 --microbatches 12 --times 20 10 10 --trace FOLDER

Processes over gloo run the real stages, executor and channels. Only the layers are not real: they sleep for
as long as F, I and W of a micro-batch shall take, so that two cores can show many ranks. The bubble is one
minus the share of the ranks' time, from the first start to the last end on any rank, that lies inside
computations. A rank that waits for a message does not compute. Exit code 1 when a schedule is further from
the simulator than --tolerance.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.multiprocessing
from torch import nn

from megatron_ds.batch.batch import Batch
from megatron_ds.extensions.report.trace_files import as_simulation, write_trace
from megatron_ds.mpu.channels import Channels
from megatron_ds.mpu.context import new_parameter
from megatron_ds.mpu.group import Group
from megatron_ds.mpu.param_spec import Init, ParamSpec
from megatron_ds.mpu.process_groups import connect_torch
from megatron_ds.pipeline.executor import Executor
from megatron_ds.pipeline.instruction import Op, StageCosts
from megatron_ds.pipeline.passes import lower
from megatron_ds.pipeline.schedules import SCHEDULES, placement, stages_of
from megatron_ds.pipeline.simulate import Simulation, simulate
from megatron_ds.pipeline.stage import Stage
from megatron_ds.pipeline.timeline import Timeline
from megatron_ds.tensor_parallel.weight_grad import now_or_later

SHAPE = (8, 1, 16)  # of the hidden states: messages small enough to take no time


class Sleep(torch.autograd.Function):
    """x → x. Its forward, and the two halves of its backward, take as long as the given costs."""

    @staticmethod
    def forward(ctx, x, weight, times):
        ctx.weight = weight
        ctx.times = times
        time.sleep(times[0])
        return x * 1.0

    @staticmethod
    def backward(ctx, dy):
        time.sleep(ctx.times[1])
        return (
            dy * 1.0,
            now_or_later(ctx.weight, lambda: lambda: time.sleep(ctx.times[2]))(),
            None,
        )


class SleepingLayer(nn.Module):
    def __init__(self, times: tuple[float, float, float]):
        super().__init__()
        self.times = times
        self.weight = new_parameter(ParamSpec("weight", (1,), Init("zeros")))

    def forward(self, x, batch):
        return Sleep.apply(
            torch.zeros(SHAPE) if x is None else x, self.weight, self.times
        )


class Loss:
    def __init__(self, x: torch.Tensor, batch: Batch):
        self.objective = x.sum()


def run_rank(
    rank: int, args, name: str, ranks: int, chunks: int, store: str, answers
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    group = Group(
        "pp",
        tuple(range(ranks)),
        rank,
        connect_torch("pp", [tuple(range(ranks))], rank),
    )
    # The stages of this rank, whose layers sleep.
    home = placement(name, ranks, chunks)
    stages = ranks * chunks
    times = tuple(t / 1000 / chunks for t in args.times)
    mine = {
        s: Stage(
            s,
            [SleepingLayer(times)],
            is_first=s == 0,
            is_last=s == stages - 1,
            loss=Loss,
        )
        for s in stages_of(rank, home)
    }
    # The schedule.
    program = lower(SCHEDULES[name](ranks, args.microbatches, chunks), stages)[rank]
    executor = Executor(
        program,
        mine,
        Channels(group),
        home.__getitem__,
        lambda batch: SHAPE,
        torch.float32,
        torch.device("cpu"),
        {Op.REDUCE: lambda stage: None},
    )
    # The steps, of which the timeline has each instruction.
    tokens = torch.zeros(args.microbatches, SHAPE[0], dtype=torch.int64)
    batches = Batch(
        tokens, tokens, tokens.float(), tokens, tuple(range(args.microbatches))
    ).split(1)
    executor.run(batches)  # connections are made at the first message
    rounds = []
    for _ in range(args.rounds):
        torch.distributed.barrier()
        executor.timeline = Timeline(executor.device)
        executor.run(batches)
        rounds.append(executor.timeline.read())
    answers.put((rank, rounds))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def measure(args, name: str, ranks: int, chunks: int) -> list[Simulation]:
    """What the ranks did, round by round, in the form of a simulation."""
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = torch.multiprocessing.spawn(
            run_rank,
            (args, name, ranks, chunks, os.path.join(folder, "store"), answers),
            nprocs=ranks,
            join=False,
        )
        rounds = dict(answers.get() for _ in range(ranks))
        processes.join()
    timelines = [
        {rank: rounds[rank][n] for rank in range(ranks)} for n in range(args.rounds)
    ]
    if args.trace:
        Path(args.trace).mkdir(parents=True, exist_ok=True)
        write_trace(Path(args.trace, f"{name}-{ranks}.json"), timelines[-1])
    return [as_simulation(timeline) for timeline in timelines]


def foretell(args, name: str, ranks: int, chunks: int) -> Simulation:
    forward, input_grad, weight_grad = (t / chunks for t in args.times)
    return simulate(
        SCHEDULES[name](ranks, args.microbatches, chunks),
        StageCosts(forward, input_grad, weight_grad).of,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--schedules", nargs="+", default=["1f1b", "interleaved", "zb-h1", "zb-v"]
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--times",
        nargs=3,
        type=float,
        default=[100, 100, 100],
        metavar=("F", "I", "W"),
        help="milliseconds of a micro-batch on a rank",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument(
        "--trace", help="folder for a Chrome trace of the last round of each"
    )
    args = parser.parse_args()
    # The head of the table.
    print(
        f"F, I, W = {', '.join(f'{t:g}' for t in args.times)} ms, {args.microbatches} micro-batches, "
        f"median of {args.rounds} steps (least to most)\n"
    )
    print(
        "| schedule | ranks | chunks | bubble foretold | bubble measured | step foretold | step measured |"
    )
    print("|---" * 7 + "|")
    # The planned and the measured bubble of each schedule.
    strayed = False
    for name in args.schedules:
        for ranks in args.ranks:
            preferred = (2, 1) if name in ("interleaved", "zb-v") else (1, 2)
            chunks = next(filter(SCHEDULES[name].supports, preferred))
            plan = foretell(args, name, ranks, chunks)
            real = measure(args, name, ranks, chunks)
            bubbles = [s.bubble for s in real]
            spans = [s.span for s in real]
            strayed |= abs(statistics.median(bubbles) - plan.bubble) > args.tolerance
            print(
                f"| {name} | {ranks} | {chunks} | {plan.bubble:.4f} | {statistics.median(bubbles):.4f} "
                f"({min(bubbles):.4f}–{max(bubbles):.4f}) | {plan.span:.0f} ms | "
                f"{statistics.median(spans) * 1000:.0f} ms |",
                flush=True,
            )
    return int(strayed)


if __name__ == "__main__":
    sys.exit(main())
