"""From which sizes on compiled products of matrices are faster than torch's library, on the machine that runs this.

    python benchmarks/product_sizes.py                       fp32 and bf16, one thread and all
    python benchmarks/product_sizes.py --dtypes fp32 --threads 1 2 8 --turns 40

Plain products have the shapes of a linear layer: forward, gradient of the input, gradient of the weight; products
of runs are those of eight experts, in one call against one product of torch an expert. Both take turns, and the least
times of each are compared. The last lines have, for each dtype, the least number of multiplications from which the
compiled product was at least as fast in all shapes and numbers of threads: the values of `LEAST_MULTIPLICATIONS`
in extensions/kernels/cpu/compiled_product.py. The table has one value for all machines, so choose the largest that
machines have shown.

A processor without AVX-512 BF16 has no compiled products; then the reason is printed.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ds.extensions.kernels.cpu import compiled_grouped, compiled_product

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Rows, numbers of a sum and columns, in parts of a size that is doubled.
FORMS = ((1, 1, 1), (4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 1, 4))
SIDES = (64, 128, 256, 512)
RUNS = 8

Pair = tuple[str, tuple[int, int, int], Callable[[], object], Callable[[], object]]
"""Which product, its rows, numbers of a sum and columns, and what computes it: compiled, by torch."""


def plain_products(n: int, k: int, m: int, dtype: torch.dtype) -> Iterator[Pair]:
    """The products of a linear layer with k inputs and m outputs, for n rows."""
    x = torch.randn(n, k).to(dtype)
    weight = torch.randn(m, k).to(dtype)
    dy = torch.randn(n, m).to(dtype)
    yield plain_product("forward", x, weight.t())
    yield plain_product("input", dy, weight)
    yield plain_product("weight", dy.t(), x)


def plain_product(name: str, a: torch.Tensor, b: torch.Tensor) -> Pair:
    """One product of two matrices."""
    rows, inner = a.shape
    columns = b.shape[1]
    out = torch.empty(rows, columns, dtype=a.dtype)
    return (
        name,
        (rows, inner, columns),
        lambda: compiled_product.product_into(out, a, b, None),
        lambda: torch.mm(a, b, out=out),
    )


def products_of_runs(n: int, k: int, m: int, dtype: torch.dtype) -> Iterator[Pair]:
    """The products of RUNS experts with n rows each."""
    counts = (n,) * RUNS
    x = torch.randn(RUNS * n, k).to(dtype)
    dy = torch.randn(RUNS * n, m).to(dtype)
    weight = torch.randn(RUNS, m, k).to(dtype)
    # Results have the shapes of what they are the gradients of.
    y = torch.empty_like(dy)
    dx = torch.empty_like(x)
    dw = torch.empty_like(weight)
    by_run = lambda t: t.view(RUNS, n, -1)

    def by_torch(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        for parts in zip(out, a, b):
            torch.mm(*parts[1:], out=parts[0])

    yield (
        "runs, forward",
        (n, k, m),
        lambda: compiled_grouped.affine_into(y, x, weight, None, counts),
        lambda: by_torch(by_run(y), by_run(x), weight.mT),
    )
    yield (
        "runs, input",
        (n, m, k),
        lambda: compiled_grouped.product_into(dx, dy, weight, counts),
        lambda: by_torch(by_run(dx), by_run(dy), weight),
    )
    yield (
        "runs, weight",
        (m, n, k),
        lambda: compiled_grouped.write_gradient(dw, dy, x, counts),
        lambda: by_torch(dw, by_run(dy).mT, by_run(x)),
    )


def least_times(pair: Pair, turns: int) -> list[float]:
    """Seconds, compiled and by torch."""
    _, _, ours, theirs = pair
    times = [[], []]
    for _ in range(turns):
        for run, of_run in zip((ours, theirs), times):
            start = time.perf_counter()
            run()
            of_run.append(time.perf_counter() - start)
    # The first turn of each allocates.
    return [min(of_run[1:]) for of_run in times]


def products(dtype: torch.dtype) -> Iterator[Pair]:
    """All products that are measured."""
    for side, form in itertools.product(SIDES, FORMS):
        sizes = [part * side for part in form]
        yield from plain_products(*sizes, dtype)
        yield from products_of_runs(*sizes, dtype)


def line_of(pair: Pair, ours: float, theirs: float) -> str:
    """The product, its size, its speed and how much faster it is than torch's."""
    name, sizes, _, _ = pair
    size = math.prod(sizes)
    shape = "x".join(map(str, sizes))
    speed = 2 * size / ours / 1e9
    return (
        f"{name:13} {shape:15} 2^{math.log2(size):4.1f}  {speed:7.1f} GFLOP/s  "
        f"{theirs / ours:5.2f} x torch's"
    )


def measure(name: str, threads: list[int], turns: int) -> int:
    """Prints a line a product; returns the multiplications from which the compiled ones won."""
    slower = 0
    for count in threads:
        torch.set_num_threads(count)
        for pair in products(DTYPES[name]):
            ours, theirs = least_times(pair, turns)
            if ours > theirs:
                size = math.prod(pair[1])
                slower = max(slower, size)
            line = line_of(pair, ours, theirs)
            print(f"{name} {count:3} threads  {line}", flush=True)
    return slower + 1


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dtypes", nargs="+", default=[*DTYPES], choices=[*DTYPES])
    parser.add_argument("--threads", nargs="+", type=int)
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    threads = options.threads or sorted({1, torch.get_num_threads()})
    found = {}
    for name in options.dtypes:
        if reason := compiled_product.reason_against(DTYPES[name]):
            found[name] = f"no compiled products on this machine: {reason}"
        else:
            least = measure(name, threads, options.turns)
            found[name] = f"as fast or faster from {least:,} multiplications on"
    for name, text in found.items():
        print(f"{name}: {text}")


if __name__ == "__main__":
    main()
