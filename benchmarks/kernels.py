"""Time of every operation that has a kernel table entry: ours, torch's operations, torch.compile, Liger.

    python benchmarks/kernels.py                                   # on a GPU: bf16 and fp32, real sizes
    python benchmarks/kernels.py --only norm softmax --dtypes bf16
    python benchmarks/kernels.py --rehearse                        # tiny sizes on any machine

The operations, and arguments for them, come from ops/kernel_table.py: a new operation with an example needs
no edit here. Each row is one operation, dtype and shape. Bytes are the least that the operation must move:
each tensor that it is given read once, each result and each tensor that it changes written once; in
gradients of the results and the arguments read once, gradients of the arguments written once. The percentage
is that of these bytes to
what a copy of 1 GiB moves in the same time on the same device, so a backward that must read less than all
arguments can exceed 100 %. Times are medians; before each the caches are overwritten.
"""

import argparse
import contextlib
import importlib
import json
import pkgutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron_ds
from megatron_ds.ops.kernel_table import OPERATIONS, Operation, selected

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES, WIDE = ((8192, 4096), (8192, 8192)), ((8192, 50304), (8192, 131072))     # rows, width
WIDE_ONES = ("cross_entropy", "vocab")                   # names of operations over a vocabulary contain one
LIGER = {"rms_norm": ("liger_kernel.ops.rms_norm", "LigerRMSNormFunction"),
         "layer_norm": ("liger_kernel.ops.layer_norm", "LigerLayerNormFunction")}
WARM_UP, REPEATS, COPY_BYTES, CACHE_BYTES = 5, 30, 1 << 30, 1 << 28


@dataclass
class Row:
    """One measurement. us: microseconds; percent: of the copy bandwidth; "" in `why` if it ran."""

    operation: str
    dtype: str
    rows: int
    width: int
    contestant: str
    forward_us: float | None = None
    forward_percent: float | None = None
    backward_us: float | None = None
    backward_percent: float | None = None
    why: str = ""


class Clock:
    """Microseconds of calls on a device."""

    def __init__(self, device: torch.device, repeats: int):
        self.device, self.repeats = device, repeats
        nbytes = CACHE_BYTES if device.type == "cuda" else 1
        self._cache = torch.empty(nbytes, dtype=torch.int8, device=device)

    def microseconds(self, *calls: Callable[[], object], warm_up: int = WARM_UP) -> list[float]:
        """The median time of each of the calls, which run one after the other."""
        taken: list[list[float]] = [[] for _ in calls]
        for i in range(warm_up + self.repeats):
            self._cache.zero_()
            stamps = [self._now()]
            for call in calls:
                call()
                stamps.append(self._now())
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            if i >= warm_up:
                for of_call, start, end in zip(taken, stamps, stamps[1:]):
                    of_call.append(start.elapsed_time(end) * 1e3 if self.device.type == "cuda"
                                   else (end - start) * 1e6)
        return [statistics.median(of_call) for of_call in taken]

    def _now(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def copy_bandwidth(clock: Clock, nbytes: int) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.zeros(nbytes // 4, device=clock.device)
    target = torch.empty_like(source)
    [us] = clock.microseconds(lambda: target.copy_(source))
    return 2 * nbytes / us * 1e6


def load_operations() -> dict[str, Operation]:
    """The table after all modules with operations have been imported."""
    for room in ("ops", "tensor_parallel", "moe"):
        package = importlib.import_module(f"megatron_ds.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    return dict(sorted(OPERATIONS.items()))


def contestants(operation: Operation, compiled: bool) -> Iterator[tuple[str, Callable]]:
    """(name, function of the operation's arguments)"""
    yield "ours", operation

    def eager(*arguments):
        with selected("torch"):
            return operation.in_torch(*arguments)

    yield "torch", eager
    if compiled:
        yield "torch.compile", torch.compile(operation.in_torch, dynamic=False)
    if operation.name in LIGER:
        module, name = LIGER[operation.name]
        with contextlib.suppress(ImportError):
            yield "liger", getattr(importlib.import_module(module), name).apply


def measure(operation: Operation, function: Callable, example: tuple, clock: Clock,
            row: Row, bandwidth: float) -> None:
    """Fill in the row's times."""
    given = [x for x in tree_leaves(example) if isinstance(x, torch.Tensor)]
    trained = [x for x in given if x.requires_grad]
    kept: dict[str, list[torch.Tensor]] = {}

    def forward() -> None:
        out = function(*example)
        kept["out"] = [t for t in (out if isinstance(out, tuple | list) else [out])
                       if isinstance(t, torch.Tensor)]

    forward()
    differentiable = [t for t in kept["out"] if t.requires_grad]
    gradients = [torch.ones_like(t) for t in differentiable]
    size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors)
    row_bytes = size(given) + size(kept["out"]) + size([given[i] for i in written(operation, example)])
    if not trained or not differentiable:
        [row.forward_us] = clock.microseconds(forward)
    else:
        def backward() -> None:
            out = [t for t in kept.pop("out") if t.requires_grad]
            torch.autograd.grad(out, trained, [g.clone() for g in gradients], allow_unused=True)

        # The copies of the gradients are for kernels that overwrite them; their time is taken off.
        row.forward_us, both = clock.microseconds(forward, backward)
        [copies] = clock.microseconds(lambda: [g.clone() for g in gradients])
        row.backward_us = max(both - copies, 0.0)
        moved = size(gradients) + size(given) + size(trained)
        row.backward_percent = 100 * moved / max(row.backward_us, 1e-3) * 1e6 / bandwidth
    row.forward_percent = 100 * row_bytes / row.forward_us * 1e6 / bandwidth


def written(operation: Operation, example: tuple) -> list[int]:
    """Which of the given tensors the operation writes into, by torch's count of changes."""
    given = [x for x in tree_leaves(example) if isinstance(x, torch.Tensor)]
    before = [x._version for x in given]
    with selected("torch"):
        operation.in_torch(*example)
    return [i for i, (x, version) in enumerate(zip(given, before)) if x._version != version]


def run(args: argparse.Namespace) -> dict:
    """All rows, and what they were measured on."""
    device = torch.device(args.device)
    clock = Clock(device, args.repeats)
    bandwidth = copy_bandwidth(clock, args.copy_bytes)
    rows: list[Row] = []
    for name, operation in load_operations().items():
        if operation.make_example is None or args.only and not any(word in name for word in args.only):
            continue
        sizes = WIDE if any(word in name for word in WIDE_ONES) else SIZES
        for dtype in args.dtypes:
            for at in [(8, 64)] if args.rehearse else sizes:
                for contestant, function in contestants(operation, not args.no_compile):
                    row = Row(name, dtype, *at, contestant)
                    try:
                        torch.manual_seed(0)
                        example = operation.make_example(*at, DTYPES[dtype], device)
                        measure(operation, function, example, clock, row, bandwidth)
                    except Exception as error:  # noqa: BLE001  one failure must not cost the other rows
                        row.why = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}" \
                            if str(error) else type(error).__name__
                    rows.append(row)
                    print(text_of(row), flush=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__, "version": megatron_ds.__version__,
            "copy_gb_per_s": bandwidth / 1e9, "rows": [asdict(row) for row in rows]}


def text_of(row: Row) -> str:
    """A line for the terminal."""
    head = f"{row.operation:28} {row.dtype:5} {row.rows:6} × {row.width:<7} {row.contestant:14}"
    if row.why:
        return f"{head} failed: {row.why}"
    half = lambda us, percent: "" if us is None else f"{us:10.1f} µs {percent:5.1f} %"
    return f"{head} {half(row.forward_us, row.forward_percent)} {half(row.backward_us, row.backward_percent)}"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp32"])
    parser.add_argument("--only", nargs="*", default=[], help="words of names of operations")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--copy-bytes", type=int, default=COPY_BYTES)
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--rehearse", action="store_true", help="one tiny size: does every row run?")
    parser.add_argument("--json", type=Path, help="write the results to a file")
    args = parser.parse_args(argv)
    if args.rehearse:
        args.repeats, args.copy_bytes = 2, 1 << 20
    return args


if __name__ == "__main__":
    options = parse_arguments()
    results = run(options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
