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
    """(attention of the rank's tokens, whether they are zigzag).

    The attention takes q, k and v [s/c, b, n, d] and returns [s/c, b, n * d].
    """
    # The tokens of each rank.
    zigzag = name in ("p2p", "all_gather", "a2a-zigzag", "zigzag-ring")
    parts = [
        SequenceSlice(RankPart(rank, group.size), zigzag=zigzag)
        for rank in range(group.size)
    ]
    if name in ("p2p", "all_gather"):
        return shared_keys(name, group, parts, length), zigzag
    if name.startswith("a2a"):
        order = parts[group.rank].order(length)
        return ulysses(group, order), zigzag
    if name == "deepspeed":
        return deepspeed_layer(), zigzag
    where = [part.index(length) for part in parts]
    return plain_ring(where, group.rank), zigzag


def shared_keys(
    name: str,
    group: Group,
    parts: list[SequenceSlice],
    length: int,
) -> Attend:
    """Attention by keys that travel around a ring or are gathered."""
    exchange = Ring() if name == "p2p" else Gather()
    positions = tuple(Runs(part.runs(length)) for part in parts)
    shared = SharedKeys(group, exchange, positions)
    return lambda q, k, v: shared(q, k, v, KeyVisibility())


def plain_ring(where: list[torch.Tensor], rank: int) -> Attend:
    """Attention by `PlainRing`. where: the positions of each rank's tokens."""
    return lambda q, k, v: PlainRing.apply(q, k, v, where, rank)


def ulysses(group: Group, order: torch.Tensor | None) -> Attend:
    """Attention by exchanged heads, with the messages of `models.context_attention.HeadsAttention`."""

    def attend(q, k, v):
        k = spread_groups(k, group.size)
        v = spread_groups(v, group.size)
        parts = to_heads((q, k, v), group, order)
        exchange = ToTokens(group, order)
        return exchanged_attention(*parts, KeyVisibility(), exchange=exchange)

    return attend


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's, of [s, b, n, d] → the same shape."""
    q = PlainRing.heads(q)
    k = PlainRing.heads(k)
    v = PlainRing.heads(v)
    is_grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        enable_gqa=is_grouped,
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
            own = where[rank][:, None]
            blind = (own < where[owner]).all(1)
            part_sums[:, :, blind] = -math.inf
            # Results are merged by their weights in the softmax of both.
            total = torch.logaddexp(sums, part_sums)
            part = part.float().nan_to_num(0.0)
            out = out * PlainRing.share(sums, total)
            out += part * PlainRing.share(part_sums, total)
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
    def share(sums: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """The weight of a part in the softmax of all keys, [b, n, s, 1], from their log-sum-exps [b, n, s]."""
        share = torch.exp(sums - total)
        return share.nan_to_num(0.0)[..., None]

    @staticmethod
    def heads(t: torch.Tensor) -> torch.Tensor:
        """[s, b, n, d] → [b, n, s, d]."""
        return t.permute(1, 2, 0, 3)

    @staticmethod
    def mask(where, rank: int, owner: int, dtype: torch.dtype) -> torch.Tensor:
        """-inf where a query of a rank must not see a key of the owner, 0 elsewhere."""
        queries = where[rank][:, None]
        later = where[owner] > queries
        mask = torch.zeros(later.shape, dtype=dtype)
        return mask.masked_fill_(later, -math.inf)

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
            part = SequenceSlice(RankPart(rank, 2), zigzag=zigzag)
            where = part.index(length)
            own = [t[where].clone() for t in whole]
            calls[name] = (attend, where, own)
        # They take turns; the first round is compared and not counted.
        for number in range(args.rounds + 1):
            for name, (attend, where, (*leaves, dout)) in calls.items():
                leaves = [leaf.requires_grad_() for leaf in leaves]
                dist.barrier()
                start = time.perf_counter()
                out = attend(*leaves)
                gradients = torch.autograd.grad(out, leaves, dout.flatten(2))
                dist.barrier()
                taken = time.perf_counter() - start
                seconds[name].append(taken)
                if number == 0:
                    results[name] = sums_of(where, out, gradients)
        # Rank 0 reports.
        check(results, length, dtype)
        if rank == 0:
            counted = {name: times[1:] for name, times in seconds.items()}
            record = {"length": length, "seconds": counted}
            print(json.dumps(record), flush=True)
    dist.destroy_process_group()


def sums_of(
    where: torch.Tensor, out: torch.Tensor, gradients: list[torch.Tensor]
) -> torch.Tensor:
    """Numbers of all tokens that are equal for contestants with the same results."""
    weight = torch.sin(0.001 * where.double() + 1)
    sums = []
    for t in (out, *gradients):
        squares = t.double().flatten(1).square()
        of_tokens = squares.sum(1)
        sums.append(of_tokens @ weight)
    sums = torch.stack(sums)
    dist.all_reduce(sums)
    return sums


def check(results: dict[str, torch.Tensor], length: int, dtype: torch.dtype) -> None:
    """Ends the program if two contestants have different results."""
    first, right = next(iter(results.items()))
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for name, sums in results.items():
        if not torch.allclose(sums, right, rtol=tolerance):
            raise SystemExit(
                f"{length} tokens: {name} and {first} differ: "
                f"{sums.tolist()}, {right.tolist()}"
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
    load, *_ = os.getloadavg()
    print(
        f"\n{record['length']} tokens, {args.dtype}, "
        f"{args.groups} key-value heads, {args.rounds} rounds; load {load:.1f}"
    )
    print("\n| | ms, median (quartiles) | best |\n|---|---|---|")
    for name, times in seconds.items():
        milliseconds = [1e3 * time for time in times]
        best = min(milliseconds)
        print(f"| {name} | {spread(milliseconds, '.1f')} | {best:.1f} |")
    print(
        "\n| ours, times as fast as "
        "| in adjacent calls, median (quartiles) | best calls |"
    )
    print("|---|---|---|")
    for name, rivals in RIVALS.items():
        for rival in rivals:
            if name in seconds and rival in seconds:
                show_ratios(f"{name} / {rival}", seconds[name], seconds[rival])


def show_ratios(title: str, ours: list[float], theirs: list[float]) -> None:
    """Print how many times as fast ours is."""
    pairs = zip(ours, theirs, strict=True)
    ratios = [other / own for own, other in pairs]
    middle = spread(ratios, ".2f")
    best = min(theirs) / min(ours)
    print(f"| {title} | {middle} | {best:.2f} |", flush=True)


def spread(values: list[float], form: str) -> str:
    """The median and the quartiles."""
    quartiles = values * 3
    if len(values) > 1:
        quartiles = statistics.quantiles(values, n=4, method="inclusive")
    first = quartiles[0]
    third = quartiles[2]
    median = statistics.median(values)
    return f"{median:{form}} ({first:{form}}–{third:{form}})"


def show_errors(args: argparse.Namespace) -> None:
    """Relative errors of bf16 results against attention in fp64."""
    print("| tokens | ranks | out | dq | dk | dv |\n|---|---|---|---|---|---|")
    for length in args.lengths:
        low = inputs(length, args.groups, torch.bfloat16)
        exact = in_one_process(*(t.double() for t in low))
        for ranks in (1, 2, 4, 8):
            if ranks == 1:
                found = in_one_process(*low)
            else:
                found = of_ranks(*low, ranks)
            errors = map(relative_error, found, exact)
            cells = " | ".join(f"{error:.2e}" for error in errors)
            print(f"| {length} | {ranks} | {cells} |", flush=True)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The 2-norm of the difference, relative to that of the exact values."""
    difference = found.double() - exact
    return float(difference.norm() / exact.norm())


def in_one_process(q, k, v, dout) -> list[torch.Tensor]:
    """The result of attention and its gradients, by torch."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = fused(*leaves)
    gradients = torch.autograd.grad(out, leaves, dout)
    return [out.detach(), *gradients]


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
        own = where[rank]
        queries = q[own]
        partial = PartialAttention(queries, runs[rank], *settings)
        for owner in order:
            theirs = where[owner]
            partial.add(k[theirs], v[theirs], runs[owner])
        result = partial.result()
        gradients = PartialGradients(
            queries,
            runs[rank],
            *settings,
            result,
            dout[own].flatten(2),
        )
        for owner in order:
            theirs = where[owner]
            gradients.add(k[theirs], v[theirs], runs[owner], totals[owner])
        out[own] = result[0].view_as(queries)
        dq[own] = gradients.dq.to(q.dtype)
    # Gradients of keys and values are those of all queries.
    dk = torch.empty_like(k)
    dv = torch.empty_like(v)
    for index, total in zip(where, totals, strict=True):
        dk[index], dv[index] = total.to(k.dtype)
    return [out, dq, dk, dv]


def main() -> None:
    """Run as the flags say."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192])
    parser.add_argument(
        "--contestants",
        nargs="+",
        choices=CONTESTANTS,
        default=CONTESTANTS,
    )
    parser.add_argument(
        "--groups",
        type=int,
        default=HEADS,
        help="key-value heads; must divide 6",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--error",
        action="store_true",
        help="errors in bf16 in place of times",
    )
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(args)
    elif args.error:
        show_errors(args)
    else:
        start(args)


if __name__ == "__main__":
    main()
