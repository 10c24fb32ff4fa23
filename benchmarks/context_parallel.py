"""Attention of two context-parallel processes: ours beside a straightforward ring and DeepSpeed's Ulysses.

    python benchmarks/context_parallel.py --lengths 8192 16384 32768 --rounds 3
    python benchmarks/context_parallel.py --lengths 1024 2048 4096 --rounds 15
    python benchmarks/context_parallel.py --error

Causal attention of one layer, forward and backward, 6 heads of 64 channels, one sample: q, k and v of a
rank's tokens → the output of these tokens. All contestants have equal results. Two processes with a thread
each, gloo. Contestants live together and take turns, and the ratio of each call to that of the contestant
beside it is shown: medians with quartiles, and the ratio of the best calls. `--groups 2` shares keys and
values among query heads.

    p2p, all_gather   ours, zigzag
    a2a, a2a-zigzag   ours, each rank with half of the heads
    ring              a plain ring: contiguous tokens, keys and values passed on after each block, every block
                      computed and masked, partial results merged in fp32
    zigzag-ring       the same with zigzag tokens
    deepspeed         deepspeed.sequence.layer.DistributedAttention around torch's fused attention

Training steps and their memory: `train_step.py --workload L8K --turns --contestants ours ours:cp=2`.

`--error` compares results in bf16 with attention in fp64, of cp 2, 4 and 8 and of one process, without
communication.
"""

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from megatron_ds.context_parallel.block_exchange import Gather, Ring  # noqa: E402
from megatron_ds.context_parallel.head_exchange import ToTokens, spread_groups, to_heads  # noqa: E402
from megatron_ds.context_parallel.shared_keys import SharedKeys  # noqa: E402
from megatron_ds.host.allocator import set_allocator  # noqa: E402
from megatron_ds.mpu.gloo import GlooTransport  # noqa: E402
from megatron_ds.mpu.group import Group  # noqa: E402
from megatron_ds.mpu.sequence_slice import RankPart, SequenceSlice  # noqa: E402
from megatron_ds.ops.attention_tiles import Runs  # noqa: E402
from megatron_ds.ops.core_attention import exchanged_attention  # noqa: E402
from megatron_ds.ops.key_visibility import KeyVisibility  # noqa: E402
from megatron_ds.ops.partial_attention import PartialAttention, PartialGradients  # noqa: E402
from megatron_ds.ops.scoring import Scoring  # noqa: E402

HEADS = 6
CHANNELS = 64
OURS = ("p2p", "all_gather", "a2a", "a2a-zigzag")
CONTESTANTS = (*OURS, "ring", "zigzag-ring", "deepspeed")
RIVALS = {
    "p2p": ("ring", "zigzag-ring"),
    "a2a": ("deepspeed",),
    "a2a-zigzag": ("deepspeed",),
    "all_gather": ("ring",),
}

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def contestant(name: str, group: Group, length: int) -> tuple[Attend, bool]:
    """(attention of the rank's tokens [s/c, b, n, d] → [s/c, b, n * d], whether they are zigzag)"""
    # The tokens of each rank.
    zigzag = name in ("p2p", "all_gather", "a2a-zigzag", "zigzag-ring")
    parts = [
        SequenceSlice(RankPart(rank, group.size), zigzag=zigzag)
        for rank in range(group.size)
    ]
    positions = tuple(Runs(part.runs(length)) for part in parts)
    if name in ("p2p", "all_gather"):
        shared = SharedKeys(group, Ring() if name == "p2p" else Gather(), positions)
        return lambda q, k, v: shared(q, k, v, KeyVisibility()), zigzag
    if name.startswith("a2a"):
        return ulysses(group, parts[group.rank].order(length)), zigzag
    if name == "deepspeed":
        return deepspeed_layer(), zigzag
    where = [parts[rank].index(length) for rank in range(group.size)]
    return lambda q, k, v: PlainRing.apply(q, k, v, where, group.rank), zigzag


def ulysses(group: Group, order: torch.Tensor | None) -> Attend:
    """Attention by exchanged heads, with the messages of `models.context_attention.HeadsAttention`."""

    def attend(q, k, v):
        parts = to_heads(
            (q, spread_groups(k, group.size), spread_groups(v, group.size)),
            group,
            order,
        )
        exchange = ToTokens(group, order)
        return exchanged_attention(*parts, KeyVisibility(), exchange=exchange)

    return attend


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's, of [s, b, n, d] → the same shape."""
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.permute(2, 0, 1, 3)


def deepspeed_layer() -> Attend:
    """DeepSpeed's attention by exchanged heads."""
    from deepspeed import comm
    from deepspeed.sequence.layer import DistributedAttention

    if not comm.is_initialized():
        comm.init_distributed("gloo", verbose=False)
    layer = DistributedAttention(fused, dist.group.WORLD, scatter_idx=2, gather_idx=0)
    return lambda q, k, v: layer(q, k, v, 1).flatten(2)


class PlainRing(torch.autograd.Function):
    """A ring as one writes it first: torch's fused attention of each block under an explicit mask, blocks
    merged by their log-sum-exp in fp32, and every message awaited before the next block. In backward keys,
    values and their gradients travel together."""

    FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    @staticmethod
    def forward(ctx, q, k, v, where, rank):
        queries = PlainRing.heads(q)
        block = torch.stack((k, v))
        out = torch.zeros(queries.shape)
        sums = torch.full(queries.shape[:3], -math.inf)
        for step in range(len(where)):
            owner = (rank - step) % len(where)
            keys, values = map(PlainRing.heads, block)
            part, part_sums = PlainRing.FORWARD(
                queries,
                keys,
                values,
                0.0,
                False,
                attn_mask=PlainRing.mask(where, rank, owner, q.dtype),
            )
            # A query that sees no key of the block adds nothing.
            part_sums = part_sums.masked_fill(part_sums > 1e30, -math.inf)
            blind = (where[rank][:, None] < where[owner]).all(1)
            part_sums[:, :, blind] = -math.inf
            # Results are merged by their weights in the softmax of both.
            total = torch.logaddexp(sums, part_sums)
            weight = lambda x, total=total: torch.exp(x - total).nan_to_num(0.0)[
                ..., None
            ]
            out = out * weight(sums) + part.float().nan_to_num(0.0) * weight(part_sums)
            sums = total
            if step < len(where) - 1:
                block = PlainRing.passed_on(block, rank, len(where))
        # The softmax of all keys is kept for backward.
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.where = where
        ctx.rank = rank
        return out.permute(2, 0, 1, 3).flatten(2)

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, sums = ctx.saved_tensors
        where = ctx.where
        rank = ctx.rank
        size = len(where)
        queries = PlainRing.heads(q)
        dout = PlainRing.heads(dout.reshape(q.shape))
        block = torch.stack((k, v))
        dblock = torch.zeros(2, *k.shape)
        dq = torch.zeros(queries.shape)
        for step in range(size):
            owner = (rank - step) % size
            keys, values = map(PlainRing.heads, block)
            parts = PlainRing.BACKWARD(
                dout,
                queries,
                keys,
                values,
                out,
                sums,
                0.0,
                False,
                attn_mask=PlainRing.mask(where, rank, owner, q.dtype),
            )
            # The gradients of keys and values travel on with them.
            dq += parts[0]
            for total, part in zip(dblock, parts[1:], strict=True):
                total += part.permute(2, 0, 1, 3)
            if step < size - 1:
                block = PlainRing.passed_on(block, rank, size)
            dblock = PlainRing.passed_on(dblock, rank, size)
        dk, dv = dblock.to(k.dtype)
        return dq.permute(2, 0, 1, 3).to(q.dtype), dk, dv, None, None

    @staticmethod
    def heads(t: torch.Tensor) -> torch.Tensor:
        """[s, b, n, d] → [b, n, s, d]."""
        return t.permute(1, 2, 0, 3)

    @staticmethod
    def mask(where, rank: int, owner: int, dtype: torch.dtype) -> torch.Tensor:
        """-inf where a query of a rank must not see a key of the owner, 0 elsewhere."""
        later = where[owner] > where[rank][:, None]
        return torch.zeros(later.shape, dtype=dtype).masked_fill_(later, -math.inf)

    @staticmethod
    def passed_on(block: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """Send a block to the next rank; returns that of the rank before."""
        coming = torch.empty_like(block)
        works = (
            dist.isend(block, (rank + 1) % size),
            dist.irecv(coming, (rank - 1) % size),
        )
        for work in works:
            work.wait()
        return coming


def inputs(length: int, groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, dout of all tokens, [s, 1, heads, d]."""
    draw = torch.Generator().manual_seed(1)
    return [
        torch.randn(length, 1, heads, CHANNELS, generator=draw).to(dtype)
        for heads in (HEADS, groups, groups, HEADS)
    ]


def run_rank(args: argparse.Namespace) -> None:
    """One rank: take turns, print one JSON line for each length from rank 0."""
    rank = int(os.environ["RANK"])
    dtype = getattr(torch, args.dtype)
    set_allocator(keep_freed=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = Group("cp", (0, 1), rank, GlooTransport(dist.group.WORLD, "cp"))
    # Each length has its own contestants.
    for length in args.lengths:
        seconds = {name: [] for name in args.contestants}
        whole = inputs(length, args.groups, dtype)
        results = {}
        calls = {}
        for name in args.contestants:
            attend, zigzag = contestant(name, group, length)
            where = SequenceSlice(RankPart(rank, 2), zigzag=zigzag).index(length)
            calls[name] = attend, where, [t[where].clone() for t in whole]
        # They take turns; the first round is compared and not counted.
        for number in range(args.rounds + 1):
            for name, (attend, where, (*leaves, dout)) in calls.items():
                leaves = [leaf.requires_grad_() for leaf in leaves]
                dist.barrier()
                start = time.perf_counter()
                out = attend(*leaves)
                gradients = torch.autograd.grad(out, leaves, dout.flatten(2))
                dist.barrier()
                seconds[name].append(time.perf_counter() - start)
                if number == 0:
                    results[name] = sums_of(where, out, gradients)
        # Rank 0 reports.
        check(results, length, dtype)
        if rank == 0:
            print(
                json.dumps(
                    {
                        "length": length,
                        "seconds": {n: s[1:] for n, s in seconds.items()},
                    }
                ),
                flush=True,
            )
    dist.destroy_process_group()


def sums_of(
    where: torch.Tensor, out: torch.Tensor, gradients: list[torch.Tensor]
) -> torch.Tensor:
    """Numbers of all tokens that are equal for contestants with the same results."""
    weight = torch.sin(0.001 * where.double() + 1)
    sums = torch.stack(
        [
            (t.double().flatten(1).square().sum(1) * weight).sum()
            for t in (out, *gradients)
        ]
    )
    dist.all_reduce(sums)
    return sums


def check(results: dict[str, torch.Tensor], length: int, dtype: torch.dtype) -> None:
    """Ends the program if two contestants have different results."""
    first, right = next(iter(results.items()))
    for name, sums in results.items():
        if not torch.allclose(
            sums, right, rtol=1e-4 if dtype == torch.float32 else 2e-2
        ):
            raise SystemExit(
                f"{length} tokens: {name} and {first} differ: {sums.tolist()}, {right.tolist()}"
            )


def start(args: argparse.Namespace) -> None:
    """Run both ranks and show what they measured."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    # Two processes of this program, with a core each.
    env = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--rank", *sys.argv[1:]],
            env=env | {"RANK": str(r), "LOCAL_RANK": str(r)},
            text=True,
            stdout=subprocess.PIPE if r == 0 else subprocess.DEVNULL,
        )
        for r in range(2)
    ]
    for line in ranks[0].stdout:
        if line.startswith('{"length"'):
            show(json.loads(line), args)
    if any([rank.wait() for rank in ranks]):
        raise SystemExit("a rank failed; its error is above")


def show(record: dict, args: argparse.Namespace) -> None:
    """Prints the tables of one length: times, and ratios of adjacent calls."""
    seconds = record["seconds"]
    print(
        f"\n{record['length']} tokens, {args.dtype}, {args.groups} key-value heads, {args.rounds} rounds; "
        f"load {os.getloadavg()[0]:.1f}\n\n| | ms, median (quartiles) | best |\n|---|---|---|"
    )
    for name, times in seconds.items():
        print(
            f"| {name} | {spread([1e3 * t for t in times], '.1f')} | {1e3 * min(times):.1f} |"
        )
    print(
        "\n| ours, times as fast as | in adjacent calls, median (quartiles) | best calls |\n|---|---|---|"
    )
    for name, rivals in RIVALS.items():
        for rival in rivals:
            if name in seconds and rival in seconds:
                ratios = [
                    b / a for a, b in zip(seconds[name], seconds[rival], strict=True)
                ]
                print(
                    f"| {name} / {rival} | {spread(ratios, '.2f')} "
                    f"| {min(seconds[rival]) / min(seconds[name]):.2f} |",
                    flush=True,
                )


def spread(values: list[float], form: str) -> str:
    """The median and the quartiles."""
    first, _, third = (
        statistics.quantiles(values, n=4, method="inclusive")
        if values[1:]
        else values * 3
    )
    return f"{statistics.median(values):{form}} ({first:{form}}–{third:{form}})"


def show_errors(args: argparse.Namespace) -> None:
    """Relative errors of bf16 results against attention in fp64."""
    print("| tokens | ranks | out | dq | dk | dv |\n|---|---|---|---|---|---|")
    for length in args.lengths:
        low = inputs(length, args.groups, torch.bfloat16)
        right = in_one_process(*(t.double() for t in low))
        for ranks in (1, 2, 4, 8):
            found = in_one_process(*low) if ranks == 1 else of_ranks(*low, ranks)
            errors = [
                (a.double() - b).norm() / b.norm()
                for a, b in zip(found, right, strict=True)
            ]
            print(
                f"| {length} | {ranks} |",
                " | ".join(f"{float(e):.2e}" for e in errors),
                "|",
                flush=True,
            )


def in_one_process(q, k, v, dout) -> list[torch.Tensor]:
    """The result of attention and its gradients, by torch."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = fused(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def of_ranks(q, k, v, dout, ranks: int) -> list[torch.Tensor]:
    """What a ring of so many zigzag ranks computes, one rank after the other."""
    length = q.shape[0]
    settings = KeyVisibility(), Scoring()
    parts = [SequenceSlice(RankPart(rank, ranks)) for rank in range(ranks)]
    runs = [Runs(p.runs(length)) for p in parts]
    where = [p.index(length) for p in parts]
    out = torch.empty_like(q)
    dq = torch.empty_like(q)
    totals = [torch.zeros(2, len(i), *k.shape[1:]) for i in where]
    # Keys arrive at a rank in the order of the ring.
    for rank in range(ranks):
        order = [(rank - step) % ranks for step in range(ranks)]
        partial = PartialAttention(q[where[rank]], runs[rank], *settings)
        for owner in order:
            partial.add(k[where[owner]], v[where[owner]], runs[owner])
        result = partial.result()
        gradients = PartialGradients(
            q[where[rank]],
            runs[rank],
            *settings,
            result,
            dout[where[rank]].flatten(2),
        )
        for owner in order:
            gradients.add(k[where[owner]], v[where[owner]], runs[owner], totals[owner])
        out[where[rank]] = result[0].view_as(q[where[rank]])
        dq[where[rank]] = gradients.dq.to(q.dtype)
    dk = torch.empty_like(k)
    dv = torch.empty_like(v)
    for index, total in zip(where, totals, strict=True):
        dk[index], dv[index] = total.to(k.dtype)
    return [out, dq, dk, dv]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192])
    parser.add_argument(
        "--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS
    )
    parser.add_argument(
        "--groups", type=int, default=HEADS, help="key-value heads; must divide 6"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--error", action="store_true", help="errors in bf16 in place of times"
    )
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        return run_rank(args)
    show_errors(args) if args.error else start(args)


if __name__ == "__main__":
    main()
