"""Time of every operation that has a kernel table entry: ours, torch's operations, torch.compile, Liger.

    python benchmarks/kernels.py                                   # on a GPU: bf16 and fp32, real sizes
    python benchmarks/kernels.py --only norm softmax --dtypes bf16
    python benchmarks/kernels.py --budget 120 --json rows.json     # what is measured in two minutes
    python benchmarks/kernels.py --rehearse                        # tiny sizes on any machine

The operations, arguments for them and their sizes come from ops/kernel_table.py: a new operation with an
example needs no edit here. Each row is one operation, dtype, size and contestant (kernel_contestants.py).
Operations with a goal are first, those without a kernel of ours last; torch.compile, whose compilations take
most of the time, comes after all other rows. The example is made once for all contestants. The file is written
again every few seconds and when the program is interrupted, with the rows to come as "not run": so figures remain
if it is stopped, and after --budget it names what is missing and ends.

The percentage is that of the bytes which the operation moves (kernel_clock.py) to what a copy of 1 GiB moves
in the same time on the same device. Softmax need not read the half of the scores that causality hides, so it
can exceed 100 %. Times are medians; before each the caches are overwritten.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron_ds
from benchmarks.kernel_clock import Clock, copy_bandwidth, tensors_of, traffic
from benchmarks.kernel_contestants import TINY, contestant, has_own, names_of, written
from megatron_ds.ops.kernel_table import OPERATIONS, Operation, load_kernels

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
REPEATS = 30
COPY_BYTES = 1 << 30
MOST_ON_CPU = 1 << 29  # numbers of a size; larger ones are for GPUs
COMPILED = "torch.compile"
NOT_RUN = "not run"
SECONDS = 3  # between two writings of the file, which take longer than many a row


@dataclass(frozen=True)
class Goal:
    """What a kernel must reach on a GPU.

    forward, backward: percent of the copy bandwidth, 0 for none; us: longest time of forward
    """

    forward: float = 0.0
    backward: float = 0.0
    us: float = float("inf")


GOALS = {
    "residual_norm": Goal(90, 75),
    "masked_softmax": Goal(90),
    "cross_entropy_facts": Goal(90),
    "cross_entropy_gradient_": Goal(90),
    "adamw": Goal(),
}
GOALS_OF_SIZES = {
    ("adamw", "bf16", 317_383, 4096): Goal(us=10_300)
}  # 1.3 billion parameters


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

    @property
    def case(self) -> tuple[str, str, int, int]:
        """What an example is made for."""
        return self.operation, self.dtype, self.rows, self.width

    @property
    def name(self) -> str:
        """Operation, dtype, shape and contestant, separated by blanks."""
        return (
            f"{self.operation} {self.dtype} {self.rows}×{self.width} {self.contestant}"
        )


# --------------------------------------------------------------------------------------- which rows
def load_operations() -> dict[str, Operation]:
    """The table after all modules with operations have been imported."""
    for room in ("ops", "tensor_parallel", "moe"):
        package = importlib.import_module(f"megatron_ds.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    load_kernels()
    return dict(sorted(OPERATIONS.items()))


def planned_rows(args: argparse.Namespace) -> list[Row]:
    """In the order in which they are measured; none has run."""
    device = torch.device(args.device)
    cases = sorted(_cases(args, device), key=lambda case: case[0])
    rows = [
        Row(operation.name, *where, name, why=NOT_RUN)
        for _, operation, where in cases
        for name in names_of(operation, device)
    ]
    if not args.no_compile:
        rows += [
            Row(operation.name, *where, COMPILED, why=NOT_RUN)
            for _, operation, where in cases
        ]
    return rows


def _cases(
    args: argparse.Namespace, device: torch.device
) -> Iterator[tuple[tuple, Operation, tuple]]:
    """(what it is sorted by, the operation, (dtype, rows, width))"""
    for name, operation in load_operations().items():
        if (
            operation.make_example is None
            or args.only
            and not any(word in name for word in args.only)
        ):
            continue
        for number, at in enumerate(
            [TINY] if args.rehearse else operation.benchmark_sizes
        ):
            if device.type == "cpu" and at[0] * at[1] > MOST_ON_CPU:
                continue
            for dtype in args.dtypes:
                order = (
                    name not in GOALS,
                    not has_own(operation, device),
                    args.dtypes.index(dtype),
                    number,
                )
                yield order, operation, (dtype, *at)


# --------------------------------------------------------------------------------------- measurements
@dataclass(frozen=True)
class Copies:
    """What the bytes of rows are divided by. bandwidth: bytes a second that a copy moves."""

    clock: Clock
    bandwidth: float

    def percent(self, nbytes: int, us: float) -> float:
        """Bandwidth of `nbytes` in `us` microseconds, in percent of the device's."""
        return 100 * nbytes / max(us, 1e-3) * 1e6 / self.bandwidth


def measure(
    row: Row,
    function: Callable,
    arguments: tuple,
    moved: tuple[int, int],
    copies: Copies,
) -> None:
    """Fill in the row's times. moved: bytes of forward and backward."""
    trained = [x for x in tensors_of(arguments) if x.requires_grad]
    kept: dict[str, list[torch.Tensor]] = {}

    def forward() -> None:
        kept["out"] = tensors_of(function(*arguments))

    def backward() -> None:
        out = [t for t in kept.pop("out") if t.requires_grad]
        torch.autograd.grad(
            out, trained, [g.clone() for g in gradients], allow_unused=True
        )

    forward()
    gradients = [torch.ones_like(t) for t in kept["out"] if t.requires_grad]
    if trained and gradients:
        backward()  # torch.compile compiles it in its first call
        # The copies of the gradients are for kernels that overwrite them; their time is taken off.
        row.forward_us, both = copies.clock.microseconds(forward, backward)
        [cloned] = copies.clock.microseconds(lambda: [g.clone() for g in gradients])
        row.backward_us = max(both - cloned, 0.0)
        row.backward_percent = copies.percent(moved[1], row.backward_us)
    else:
        [row.forward_us] = copies.clock.microseconds(forward)
    row.forward_percent = copies.percent(moved[0], row.forward_us)


def measure_case(
    rows: list[Row], copies: Copies, deadline: float, done: Callable[[Row], None]
) -> None:
    """All contestants of one example. done: called after each."""
    operation = OPERATIONS[rows[0].operation]
    first = rows[0]
    dtype = DTYPES[first.dtype]
    made = []
    for row in rows:
        if time.monotonic() > deadline:
            return
        try:
            if not made:
                example = operation.make_example(
                    first.rows, first.width, dtype, copies.clock.device
                )
                made = [
                    example,
                    _traffic(operation, dtype, example, copies.clock.device),
                ]
            entrant = contestant(operation, row.contestant, dtype)
            measure(row, entrant.function, entrant.arguments(made[0]), made[1], copies)
            row.why = ""
        except Exception as error:  # noqa: BLE001  one failure must not cost the other rows
            text = str(error).splitlines() or [""]
            row.why = f"{type(error).__name__}: {text[0][:160]}".removesuffix(": ")
        done(row)
    torch.compiler.reset()  # compiled code keeps examples


def _traffic(
    operation: Operation, dtype: torch.dtype, example: tuple, device: torch.device
) -> tuple[int, int]:
    entrant = contestant(
        operation, "ours" if has_own(operation, device) else "torch", dtype
    )
    return traffic(
        entrant.function, entrant.arguments(example), written(operation, dtype)
    )


def run(args: argparse.Namespace) -> dict:
    """All rows, and what they were measured on, also in args.json."""
    start = time.monotonic()
    device = torch.device(args.device)
    clock = Clock(device, args.repeats)
    rows = planned_rows(args)
    copies = Copies(clock, copy_bandwidth(clock, args.copy_bytes))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    head = {
        "device": name,
        "torch": torch.__version__,
        "version": megatron_ds.__version__,
        "copy_gb_per_s": copies.bandwidth / 1e9,
    }
    results = lambda: head | {"rows": [asdict(row) for row in rows]}

    written = time.monotonic()

    def done(row: Row) -> None:
        nonlocal written
        print(text_of(row), flush=True)
        if time.monotonic() - written > SECONDS:
            write(results(), args.json)
            written = time.monotonic()

    try:
        for _, of_case in itertools.groupby(
            rows, key=lambda row: (row.case, row.contestant == COMPILED)
        ):
            measure_case(list(of_case), copies, start + args.budget, done)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    finally:  # also after an interrupt
        write(results(), args.json)
    print(*summary(rows, device.type == "cuda"), sep="\n", flush=True)
    return results()


def write(results: dict, file: Path | None) -> None:
    """The file is always whole: it is replaced, as the program may be stopped at any time."""
    if file:
        part = file.with_suffix(".part")
        part.write_text(json.dumps(results, indent=1))
        os.replace(part, file)


# --------------------------------------------------------------------------------------- text
def text_of(row: Row) -> str:
    """A line for the terminal."""
    head = f"{row.operation:28} {row.dtype:5} {row.rows:6} × {row.width:<7} {row.contestant:14}"
    if row.why:
        return f"{head} failed: {row.why}"
    half = lambda us, percent: "" if us is None else f"{us:10.1f} µs {percent:5.1f} %"
    return f"{head} {half(row.forward_us, row.forward_percent)} {half(row.backward_us, row.backward_percent)}"


def summary(rows: list[Row], has_goals: bool) -> list[str]:
    """The last lines: goals, rows that failed, rows that were not run."""
    failed = [row.name for row in rows if row.why not in ("", NOT_RUN)]
    left = [row.name for row in rows if row.why == NOT_RUN]
    lines = [*goal_lines(rows)] if has_goals else []
    lines += [f"failed, {len(failed)} of {len(rows)} rows: {'; '.join(failed)}"] * bool(
        failed
    )
    lines += [
        f"not run within the budget, {len(left)} of {len(rows)} rows: {'; '.join(left)}"
    ] * bool(left)
    return lines or [f"all {len(rows)} rows were measured"]


def goal_lines(rows: list[Row]) -> Iterator[str]:
    """What of each goal was reached."""
    for row in rows:
        goal = GOALS_OF_SIZES.get(row.case, GOALS.get(row.operation, Goal()))
        if row.contestant != "ours" or goal == Goal():
            continue
        if row.why:
            yield f"goal of {row.name}: {row.why}"
            continue
        pairs = (
            (row.forward_percent, goal.forward, "forward"),
            (row.backward_percent, goal.backward, "backward"),
        )
        parts = [
            f"{half} {got:.1f} % of {least:.0f}" for got, least, half in pairs if least
        ]
        parts += (
            [f"{row.forward_us:.0f} µs of {goal.us:.0f}"]
            if goal.us < float("inf")
            else []
        )
        is_met = (
            all(got >= least for got, least, _ in pairs if least)
            and row.forward_us <= goal.us
        )
        yield f"goal of {row.name}: {'met' if is_met else 'missed'}, {', '.join(parts)}"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp32"])
    parser.add_argument(
        "--only", nargs="*", default=[], help="words of names of operations"
    )
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--copy-bytes", type=int, default=COPY_BYTES)
    parser.add_argument(
        "--no-compile", action="store_true", help="leave out torch.compile"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="one tiny size: does every row run?"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=float("inf"),
        help="seconds after which no other row begins; the rest is named as not run",
    )
    parser.add_argument(
        "--json", type=Path, help="the file of results, written after each row"
    )
    args = parser.parse_args(argv)
    if args.rehearse:
        args.repeats = 2
        args.copy_bytes = 1 << 20
    return args


if __name__ == "__main__":
    run(parse_arguments())
