#!/usr/bin/env python
"""Measure the constants of the device of this machine, for `--plan-time` and `megatron-ds search`.

    python tools/measure_device.py --out this-machine.yaml
    megatron-ds plan --plan-time --cluster this-machine.yaml --dry-run cpu ... the flags of a run

The file describes a cluster of hosts like this one, with one device each. A CPU has no data sheet here: its peak is the
speed of large products, so `product` is 1. On a GPU the peak is that of megatron_ds.planning.flops. Links are not
measured: --inside and --outside give bytes/s.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_ds.cli import Arguments, main_guard  # noqa: E402
from megatron_ds.ops.core_attention import attention, attention_work  # noqa: E402
from megatron_ds.planning.flops import peak_flops  # noqa: E402

REPEATS = 7
PRODUCT = {"cpu": 1024, "cuda": 8192}  # rows and columns of square matrices
MOVED = {"cpu": 1 << 24, "cuda": 1 << 28}  # numbers of a tensor that fits no cache
ATTENTION = {"cpu": (512, 1, 4, 64), "cuda": (4096, 1, 16, 128)}  # s, b, n, d
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Return the least seconds of a call."""
    best = float("inf")
    for _ in range(REPEATS):
        _wait(device)
        start = time.perf_counter()
        function()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOP/s of a large product."""
    n = PRODUCT[device.type]
    a, b = (torch.randn(n, n).to(device, dtype) for _ in range(2))
    return 2 * n**3 / seconds(lambda: a @ b, device)


def bandwidth(device: torch.device) -> float:
    """Return bytes/s of a sum of two tensors."""
    n = MOVED[device.type]
    a, b = (torch.ones(n, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return 3 * n * a.element_size() / seconds(lambda: torch.add(a, b, out=out), device)


def launch_seconds(device: torch.device) -> float:
    """Return seconds from one small operation to the next."""
    x = torch.ones(16, device=device)
    calls = 1000

    def many() -> None:
        for _ in range(calls):
            x.add_(1.0)

    return seconds(many, device) / calls


def attention_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOP/s of causal attention, forward."""
    q, k, v = (torch.randn(ATTENTION[device.type]).to(device, dtype) for _ in range(3))
    flops = attention_work(q, k, v).flops
    return flops / seconds(lambda: attention(q, k, v), device)


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


def measured(device: torch.device) -> dict[str, Any]:
    """Return the values of the file of a device."""
    speeds = {dtype: product_speed(device, dtype) for dtype in DTYPES}
    peaks = {
        dtype: peak_flops(device, dtype) or speed for dtype, speed in speeds.items()
    }
    # Shares are those of the dtype in which models are trained there.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    peak = peaks[dtype]
    constants = {
        "product": speeds[dtype] / peak,
        "attention": attention_speed(device, dtype) / peak,
        "memory": 1.0,
        "launch": launch_seconds(device),
    }
    return {
        **described(device),
        "peak": {str(dtype).removeprefix("torch."): peaks[dtype] for dtype in DTYPES},
        "bandwidth": bandwidth(device),
        "constants": constants,
        "fitted": f"single operations of torch {torch.__version__} on this machine",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file."""
    parser = Arguments(description=__doc__)
    parser.add_argument("--out", required=True, help="file to write")
    parser.add_argument(
        "--inside", type=float, default=5e9, help="bytes/s within a host"
    )
    parser.add_argument(
        "--outside", type=float, default=1e9, help="bytes/s between hosts"
    )
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cluster = {
        "device": measured(device),
        "inside": args.inside,
        "outside": args.outside,
    }
    text = yaml.safe_dump(cluster, sort_keys=False)
    Path(args.out).write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main_guard(main))
