"""Train the same tiny model under several layouts, each on gloo ranks, and print the differences from one
process.

    python tools/compare_layouts.py --layouts "tp=2,pp=2,dp=1,sp=1,schedule=1f1b" "tp=1,pp=1,dp=2,zero=1"
    --steps 20

A layout is a list of key=value: tp, pp, dp (sizes), sp (0 or 1), schedule, chunks (stages on each pipeline
rank), cut (the costs that it balances), layout (an explicit cut), recompute (none, selective, full), logits
(parts of the head and the loss), mbs (micro-batch size), zero; for ZeRO bucket, accumulate, grads, comm,
persist, prefetch, pin, hpz. The reference is always one process with the same micro-batch size, because every
micro-batch has the same weight, whatever the number of tokens in its loss. The exit code is 1 if a difference
exceeds the tolerance.
"""

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ds.cli import Arguments, main_guard
from megatron_ds.config import parse
from megatron_ds.errors import CommunicationError
from tests.harness.layout_comparison import (
    Difference,
    LayoutRequest,
    difference,
    merge,
    mock_samples,
    parse_layout,
    train_layout,
)
from tests.harness.tiny_jobs import (
    DOCUMENTS,
    DTYPES,
    SAMPLES,
    STYLES,
    TOLERANCE,
    tiny_job,
)
from tools.free_port import free_port


def run_rank(flags: list[str], rank: int, world_size: int, port: int, steps: int):
    """One rank of one layout, in a worker process."""
    import torch

    from megatron_ds.mpu import launch as launching
    from megatron_ds.training.distributed import joined

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    launch = launching.read_launch(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": "0" if not torch.cuda.is_available() else str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    )
    config = parse(flags, world_size=world_size)
    samples = mock_samples(config, 4 * config.train.global_batch_size, seed=1)
    with joined(config, launch) as mesh:
        return train_layout(config, mesh, steps, samples)


def run_layout(
    pool: ProcessPoolExecutor, layout: LayoutRequest, job: list[str], steps: int
):
    """Every rank of a layout in the pool; the merged run."""
    flags = [*job, *layout.flags]
    port = free_port()
    ranks = [
        pool.submit(run_rank, flags, rank, layout.world_size, port, steps)
        for rank in range(layout.world_size)
    ]
    try:
        return merge([rank.result() for rank in ranks])
    except BrokenProcessPool:
        raise CommunicationError(
            f"layout {layout.text}: a rank exited without an error message, because of "
            "a lack of memory or a crash in native code. Run this layout alone to find "
            "out."
        ) from None


def parse_arguments(argv=None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument(
        "--layouts",
        nargs="+",
        required=True,
        metavar="KEY=VALUE,…",
        help="layouts to compare with one process",
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="optimizer steps (default 20)"
    )
    parser.add_argument(
        "--style", choices=STYLES, default="gpt2", help="architecture (default gpt2)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="fp32", help="precision (default fp32)"
    )
    parser.add_argument(
        "--untie", action="store_true", help="separate input and output embeddings"
    )
    parser.add_argument(
        "--dropout",
        type=float,
        default=0.0,
        help="hidden and attention dropout (default 0)",
    )
    parser.add_argument(
        "--documents",
        choices=DOCUMENTS,
        default="joined",
        help="documents of a sample attend to each other, or are separate: "
        "--reset-position-ids --reset-attention-mask (default joined)",
    )
    parser.add_argument(
        "--samples",
        choices=SAMPLES,
        default="cut",
        help="cut from the stream of documents, packed from whole ones, or with "
        "fill-in-the-middle (default cut)",
    )
    parser.add_argument(
        "--readers",
        choices=("all", "first"),
        default="all",
        help="ranks of a tensor-parallel group that read samples: all, or the first, which "
        "sends them (default all)",
    )
    parser.add_argument(
        "--num-layers", type=int, default=4, help="blocks of the model (default 4)"
    )
    parser.add_argument(
        "--global-batch-size", type=int, default=8, help="samples per step (default 8)"
    )
    return parser.parse_args(argv)


def main(argv=None) -> int:
    return main_guard(lambda: run(parse_arguments(argv)))


def run(args: argparse.Namespace) -> int:
    job = tiny_job(
        args.style,
        args.dtype,
        args.untie,
        args.dropout,
        args.num_layers,
        args.global_batch_size,
        args.steps,
        args.documents,
        args.samples,
        args.readers,
    )
    layouts = [parse_layout(text, mbs="1") for text in args.layouts]
    references: dict[str, tuple] = {}
    rows: list[tuple[str, Difference]] = []
    # Ranks are copies of this process, which has imported torch and started no thread.
    context = multiprocessing.get_context("fork")
    model = parse([*job, *parse_layout("", mbs="1").flags], world_size=1).model
    with ProcessPoolExecutor(
        max(layout.world_size for layout in layouts), mp_context=context
    ) as pool:
        pool.submit(int).result()  # starts all of them
        for layout in tqdm(
            layouts, desc="layouts", leave=False, disable=not sys.stderr.isatty()
        ):
            if layout.reference not in references:
                references[layout.reference] = run_layout(
                    pool, parse_layout(layout.reference), job, args.steps
                )
            ran = run_layout(pool, layout, job, args.steps)
            rows.append(
                (layout.text, difference(ran, references[layout.reference], model))
            )
    return show(rows, args)


def show(rows: list[tuple[str, Difference]], args: argparse.Namespace) -> int:
    limit = TOLERANCE[args.dtype]
    width = max(len(text) for text, _ in rows)
    print(
        f"{args.style}, {args.dtype}, {'un' if args.untie else ''}tied, {args.steps} steps; "
        f"largest relative difference from one process (tolerance: {limit})\n"
    )
    print(f"{'layout':{width}}  {'loss':>9}  {'grad norm':>9}  {'weights':>9}")
    failures = 0
    for text, d in rows:
        ok = d.is_within(limit)
        failures += not ok
        print(
            f"{text:{width}}  {d.loss:9.2e}  {d.grad_norm:9.2e}  {d.weights:9.2e}  "
            f"{'ok' if ok else 'TOO LARGE'}"
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
