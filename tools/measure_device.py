#!/usr/bin/env python
"""Measure the constants of the device of this machine, for `--plan-time` and `megatron-ds search`.

    python tools/measure_device.py --ranks 2 --out this-machine.yaml
    megatron-ds plan --plan-time --cluster this-machine.yaml --dry-run cpu ... the flags of a run

The file describes a cluster of hosts like this one. --ranks processes measure at the same time, as ranks of a training
on one host would run; each has a device, or on CPUs the threads of OMP_NUM_THREADS. A CPU has no data sheet here: its
peak is the speed of products, so `product` is 1. On a GPU the peak is that of megatron_ds.planning.flops. Links are
those among the ranks, as this package passes messages; with one rank, and between hosts, --inside and --outside give
bytes/s. No other program should run at the same time.
"""

import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_ds.cli import Arguments, main_guard  # noqa: E402
from megatron_ds.errors import ConfigError  # noqa: E402
from megatron_ds.host.allocator import set_allocator  # noqa: E402
from megatron_ds.mpu.group import RING_FACTOR, Transport  # noqa: E402
from megatron_ds.mpu.process_groups import connect_torch  # noqa: E402
from megatron_ds.ops.activation import gelu  # noqa: E402
from megatron_ds.ops.core_attention import attention, attention_work  # noqa: E402
from megatron_ds.ops.norms import layer_norm  # noqa: E402
from megatron_ds.planning.flops import peak_flops  # noqa: E402

REPEATS = 9
ROWS = {"cpu": 1024, "cuda": 8192}  # tokens of a micro-batch
WIDTH = {"cpu": 640, "cuda": 4096}  # of a model
MOVED = {"cpu": 1 << 20, "cuda": 1 << 28}  # numbers of a tensor
ATTENTION = {"cpu": (512, 2, 8, 64), "cuda": (4096, 1, 16, 128)}  # s, b, n, d
SMALL = 16  # numbers of the smallest message
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WAIT = timedelta(minutes=5)


@dataclass(frozen=True)
class Clock:
    """Takes the seconds of a call on all ranks at once.

    transport: among the ranks; None for one
    """

    device: torch.device
    transport: Transport | None = None

    def seconds(self, function: Callable[[], object]) -> float:
        """Return the median of some calls, as a mean of the ranks. Collective.

        All ranks begin a call together.
        """
        found = []
        # The first call loads what later ones have.
        for _ in range(REPEATS + 1):
            self._wait()
            start = time.perf_counter()
            function()
            self._wait_for_device()
            found.append(time.perf_counter() - start)
        middle = statistics.median(found[1:])
        return statistics.fmean(self._of_all(middle))

    def _wait(self) -> None:
        self._wait_for_device()
        if self.transport is not None:
            self.transport.barrier()

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _of_all(self, seconds: float) -> list[float]:
        if self.transport is None:
            return [seconds]
        return self.transport.all_gather_object(seconds)


# ---- The device.


def product_speed(clock: Clock, dtype: torch.dtype) -> float:
    """Return FLOP/s of the products of a linear layer: forward, gradients of its input and of its weight.

    Its sizes are no powers of two on CPUs, at which rows compete for the same lines of a cache.
    """
    kind = clock.device.type
    rows = ROWS[kind]
    width = WIDTH[kind]
    inner = 4 * width
    x = torch.randn(rows, width).to(clock.device, dtype)
    weight = torch.randn(inner, width).to(clock.device, dtype)
    gradient = torch.randn(rows, inner).to(clock.device, dtype)

    def all_three() -> None:
        x @ weight.t()
        gradient @ weight
        gradient.t() @ x

    return 3 * 2 * rows * width * inner / clock.seconds(all_three)


def bandwidth(clock: Clock) -> float:
    """Return bytes/s of a sum of two tensors."""
    numbers = MOVED[clock.device.type]
    a, b = (torch.ones(numbers, device=clock.device) for _ in range(2))
    out = torch.empty_like(a)
    moved = 3 * numbers * a.element_size()
    return moved / clock.seconds(lambda: torch.add(a, b, out=out))


def kernel_speed(clock: Clock) -> float:
    """Return bytes/s of what a block computes beside products: sums, norms and activation, forward and backward.

    The bytes are those that a plan counts: a forward reads and writes once, a backward moves twice as much.
    """
    kind = clock.device.type
    rows = ROWS[kind]
    width = WIDTH[kind]
    x, y = (
        torch.randn(rows, width, device=clock.device, requires_grad=True)
        for _ in range(2)
    )
    inner = torch.randn(rows, 4 * width, device=clock.device, requires_grad=True)
    weight, bias = (
        torch.ones(width, device=clock.device, requires_grad=True) for _ in range(2)
    )
    gradients = torch.ones_like(x), torch.ones_like(x), torch.ones_like(inner)

    def block() -> None:
        results = [layer_norm(x + y, weight, bias, 1e-5) for _ in range(2)]
        results.append(gelu(inner))
        torch.autograd.grad(results, (x, y, weight, bias, inner), gradients)

    norms_and_activation = 3 * 2 * (2 * x.nbytes + inner.nbytes)
    # Two sums before the norms, and those of the gradients of x and of y.
    sums = 4 * 3 * x.nbytes
    return (norms_and_activation + sums) / clock.seconds(block)


def page_seconds(clock: Clock) -> float:
    """Return seconds of a byte of new memory, where freed memory is returned."""
    numbers = MOVED["cpu"]
    held = torch.empty(numbers)
    with_pages = clock.seconds(lambda: torch.empty(numbers).fill_(1.0))
    without = clock.seconds(lambda: held.fill_(1.0))
    return max(0.0, with_pages - without) / held.nbytes


def launch_seconds(clock: Clock) -> float:
    """Return seconds from one small operation to the next."""
    x = torch.ones(SMALL, device=clock.device)
    calls = 1000

    def many() -> None:
        for _ in range(calls):
            x.add_(1.0)

    return clock.seconds(many) / calls


def attention_speed(clock: Clock, dtype: torch.dtype) -> float:
    """Return FLOP/s of causal attention, forward and backward; a backward has twice the products of a forward."""
    shape = ATTENTION[clock.device.type]
    q, k, v = (
        torch.randn(shape).to(clock.device, dtype).requires_grad_() for _ in range(3)
    )
    gradient = torch.randn(shape).to(clock.device, dtype)
    flops = 3 * attention_work(q, k, v).flops
    return flops / clock.seconds(lambda: _differentiated(q, k, v, gradient))


def _differentiated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor
) -> None:
    result = attention(q, k, v)
    torch.autograd.grad(result, (q, k, v), gradient.reshape(result.shape))


def described(device: torch.device) -> dict[str, Any]:
    """Return the values of a device that the system reports."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return {
            "name": found.name,
            "memory": found.total_memory,
            "processors": found.multi_processor_count,
        }
    pages = os.sysconf("SC_PHYS_PAGES")
    return {
        "name": f"cpu, {torch.get_num_threads()} threads",
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "processors": 0,
    }


def measured_device(clock: Clock) -> dict[str, Any]:
    """Return the values of the file of a device."""
    device = clock.device
    speeds = {dtype: product_speed(clock, dtype) for dtype in DTYPES}
    peaks = {
        dtype: peak_flops(device, dtype) or speed for dtype, speed in speeds.items()
    }
    # Shares are those of the dtype in which models are trained there.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    peak = peaks[dtype]
    moved = bandwidth(clock)
    constants = {
        "product": speeds[dtype] / peak,
        "attention": attention_speed(clock, dtype) / peak,
        "memory": kernel_speed(clock) / moved,
        "launch": launch_seconds(clock),
    }
    return {
        **described(device),
        "peak": {str(dtype).removeprefix("torch."): peaks[dtype] for dtype in DTYPES},
        "bandwidth": moved,
        "constants": constants,
        "fitted": f"single operations of torch {torch.__version__} on this machine",
    }


# ---- The links.


def link_speed(clock: Clock, transport: Transport, ranks: int) -> tuple[float, float]:
    """Return (bytes/s, seconds of a message beside its bytes) of all-reduces. Collective."""
    numbers = MOVED[clock.device.type]
    large = torch.ones(numbers, device=clock.device)
    small = torch.ones(SMALL, device=clock.device)
    beside = clock.seconds(lambda: transport.all_reduce(small, "sum").wait())
    whole = clock.seconds(lambda: transport.all_reduce(large, "sum").wait())
    moved = large.nbytes * RING_FACTOR["all_reduce"](ranks)
    return moved / (whole - beside), beside


def measured_links(device: torch.device, rank: int, ranks: int) -> dict[str, float]:
    """Return the values of the file of a cluster that concern the links among the ranks. Collective."""
    everyone = [tuple(range(ranks))]
    found = {}
    # Ranks of one host without GPUs pass activations through its memory, and gradients as messages.
    for axes in ("dp", "tp"):
        transport = connect_torch(axes, everyone, rank)
        assert transport is not None, "two ranks or more have a transport"
        found[axes] = link_speed(Clock(device, transport), transport, ranks)
    inside, beside = found["dp"]
    activations, _ = found["tp"]
    # An all-reduce is two rounds, each of as many steps as doublings.
    steps = 2 * math.ceil(math.log2(ranks))
    links = {"inside": inside, "latency": beside / steps}
    if device.type == "cpu":
        # The processors that compute also move the bytes.
        links |= {"activations": activations, "overlap": 0.0}
    return links


# ---- The ranks.


def run_rank(rank: int, ranks: int, store: str, keeps: bool, answers: Any) -> None:
    """Measure as one of several ranks; the first puts the values. keeps: freed memory, as most runs do"""
    device, transport = _started(rank, ranks, store, keeps)
    clock = Clock(device, transport)
    if keeps:
        values = {"device": measured_device(clock)}
        if transport is not None:
            values |= measured_links(device, rank, ranks)
    else:
        values = {"page": page_seconds(clock)}
    if rank == 0:
        answers.put(values)
    if transport is not None:
        transport.barrier()
        dist.destroy_process_group()


def _started(
    rank: int, ranks: int, store: str, keeps: bool
) -> tuple[torch.device, Transport | None]:
    """Start a rank as runs start theirs; return its device, and the transport to the others."""
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(rank)
    else:
        set_allocator(keep_freed=keeps)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = torch.device("cuda", rank) if has_gpus else torch.device("cpu")
    if ranks == 1:
        return device, None
    dist.init_process_group(
        "nccl" if has_gpus else "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=WAIT,
    )
    return device, connect_torch("dp", [tuple(range(ranks))], rank)


def spawned(ranks: int, keeps: bool) -> dict[str, Any]:
    """Return the values that new processes measure at the same time.

    keeps: whether their allocators keep freed memory, which is decided once in a process
    """
    answers = torch.multiprocessing.get_context("spawn").SimpleQueue()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, str(Path(folder, "store")), keeps, answers)
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=ranks)
        return answers.get()


def measured(ranks: int) -> dict[str, Any]:
    """Return the values of the file of a cluster of hosts with that many ranks."""
    values = spawned(ranks, keeps=True)
    # Only processors return memory between operations: torch keeps that of GPUs.
    if not torch.cuda.is_available():
        values["device"]["constants"] |= spawned(ranks, keeps=False)
    return {**values, "devices_per_host": ranks, "link": 1.0}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file."""
    parser = Arguments(description=__doc__)
    parser.add_argument("--out", required=True, help="file to write")
    parser.add_argument(
        "--ranks", type=int, default=1, help="ranks that measure at the same time"
    )
    parser.add_argument(
        "--inside",
        type=float,
        default=5e9,
        help="bytes/s within a host, of a file of one rank",
    )
    parser.add_argument(
        "--outside", type=float, default=1e9, help="bytes/s between hosts"
    )
    args = parser.parse_args(argv)
    if args.ranks < 1:
        raise ConfigError(f"--ranks {args.ranks} must be 1 or more.")
    cluster = {"inside": args.inside, "outside": args.outside, **measured(args.ranks)}
    text = yaml.safe_dump(cluster, sort_keys=False)
    Path(args.out).write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main_guard(main))
