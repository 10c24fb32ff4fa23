"""Bytes that ZeRO sends between nodes with and without blocks of integers (ZeRO++), and what they do to the
loss: the tiny GPT of tools/compare_layouts.py in bf16 on four gloo ranks, as two nodes of two.

    python benchmarks/quantized_zero.py                    100 steps each, about three minutes on two cores
    python benchmarks/quantized_zero.py --steps 10

Counted are the payloads of the collectives, as rings: a flat collective of n ranks sends (n - 1) / n of its
payload out of each node, by one of its ranks; one over the ranks with the same place in every node sends
(nodes - 1) / nodes of it out of each rank. One micro-batch a step. Prints a Markdown table.
"""

import argparse
import multiprocessing
import os
import socket
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
RANKS = 4
OF_NODE = 2
BATCH = 4
QUANTIZED = "hpz=2,qw=1,qg=1"
LAYOUTS = {
    "ZeRO 3": ("", ()),
    "in groups (hpZ)": ("hpz=2", ()),
    "hpZ, weights (qwZ)": ("hpz=2,qw=1", ()),
    "hpZ, gradients (qgZ)": ("hpz=2,qg=1", ()),
    "hpZ, qwZ, qgZ": (QUANTIZED, ()),
    "the same, blocks of 64": (QUANTIZED, ("--zero-quantization-block", "64")),
}


def measure(
    layout: str, more: tuple[str, ...], steps: int, rank: int, port: int
) -> tuple[list[float], float, int]:
    """(losses, bytes that this rank's node sends in a step, elements of the weights) on one rank."""
    import torch

    from megatron_ds.config import parse
    from megatron_ds.mpu import launch as launching
    from megatron_ds.training.distributed import joined
    from tests.harness.layout_comparison import (
        parse_layout,
        random_samples,
        train_layout,
    )
    from tests.harness.tiny_jobs import SEQ_LENGTH, VOCAB, tiny_job

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    request = parse_layout(f"dp={RANKS},zero=3,persist=0,grads=bf16,{layout}", mbs="1")
    config = parse(
        [*tiny_job("gpt2", "bf16", False, 0.0, 2, BATCH, steps), *request.flags, *more],
        world_size=RANKS,
    )
    launch = launching.read_launch(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    )
    with joined(config, launch) as mesh:
        elements = []

        def watch(engine):
            elements.append(sum(p.numel() for p in engine.parameters))
            mesh.traffic.clear()

        losses = train_layout(
            config,
            mesh,
            steps,
            random_samples(16, SEQ_LENGTH, VOCAB, seed=1),
            watch=watch,
        ).losses
        sent = sum(
            count * (OF_NODE if axes == "dp-cp-outer" else 1)
            for (op, axes, _), count in mesh.traffic.wire_bytes().items()
            if axes in ("dp-cp", "dp-cp-outer") and op != "all_reduce"
        )
    return losses, sent / steps, elements[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    first = None
    print(
        "| layout | bytes between nodes, a step and parameter | less | last loss | mean distance of the "
        "loss |"
    )
    print("|---|---|---|---|---|")
    with ProcessPoolExecutor(
        RANKS, mp_context=multiprocessing.get_context("forkserver")
    ) as pool:
        for name, (layout, more) in LAYOUTS.items():
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = s.getsockname()[1]
            ranks = [
                pool.submit(measure, layout, more, steps, rank, port)
                for rank in range(RANKS)
            ]
            losses, sent, elements = ranks[0].result()
            first = first or (losses, sent)
            distance = sum(abs(a - b) for a, b in zip(losses, first[0])) / steps
            print(
                f"| {name} | {sent / elements:.3f} | {first[1] / sent:.2f} × | {losses[-1]:.4f} | "
                f"{distance:.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
