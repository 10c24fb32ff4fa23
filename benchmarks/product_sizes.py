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
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ds.extensions.kernels.cpu import compiled_grouped, compiled_product

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Rows, numbers of a sum and columns, in parts of a size that is doubled.
FORMS = ((1, 1, 1), (4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 1, 4))
SIDES = (64, 128, 256, 512)
RUNS = 8


@dataclass(frozen=True)
class Product:
    """A product that is computed in two ways.

    sizes     rows, numbers of a sum, columns
    compiled  computes it with the compiled kernel
    by_torch  computes it with torch's library
    """

    name: str
    sizes: tuple[int, int, int]
    compiled: Callable[[], object]
    by_torch: Callable[[], object]

    @property
    def multiplications(self) -> int:
        """Multiplications of one run, or of a product without runs."""
        return math.prod(self.sizes)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers; those of bf16 are the rounded ones of fp32."""
    return torch.randn(shape).to(dtype)


def plain_products(n: int, k: int, m: int, dtype: torch.dtype) -> Iterator[Product]:
    """The products of a linear layer with k inputs and m outputs, for n rows."""
    x = random(n, k, dtype=dtype)
    weight = random(m, k, dtype=dtype)
    dy = random(n, m, dtype=dtype)
    yield plain_product("forward", x, weight.t())
    yield plain_product("input", dy, weight)
    yield plain_product("weight", dy.t(), x)


def plain_product(name: str, a: torch.Tensor, b: torch.Tensor) -> Product:
    """One product of two matrices."""
    rows, inner = a.shape
    columns = b.shape[1]
    out = torch.empty(rows, columns, dtype=a.dtype)
    return Product(
        name,
        (rows, inner, columns),
        compiled=lambda: compiled_product.product_into(out, a, b, None),
        by_torch=lambda: torch.mm(a, b, out=out),
    )


def products_of_runs(n: int, k: int, m: int, dtype: torch.dtype) -> Iterator[Product]:
    """The products of RUNS experts with n rows each."""
    counts = (n,) * RUNS
    x = random(RUNS * n, k, dtype=dtype)
    dy = random(RUNS * n, m, dtype=dtype)
    weight = random(RUNS, m, k, dtype=dtype)
    # Results have the shapes of what they are the gradients of.
    y = torch.empty_like(dy)
    dx = torch.empty_like(x)
    dw = torch.empty_like(weight)
    yield Product(
        "runs, forward",
        (n, k, m),
        compiled=lambda: compiled_grouped.affine_into(y, x, weight, None, counts),
        by_torch=lambda: each_run(by_run(y), by_run(x), weight.mT),
    )
    yield Product(
        "runs, input",
        (n, m, k),
        compiled=lambda: compiled_grouped.product_into(dx, dy, weight, counts),
        by_torch=lambda: each_run(by_run(dx), by_run(dy), weight),
    )
    yield Product(
        "runs, weight",
        (m, n, k),
        compiled=lambda: compiled_grouped.write_gradient(dw, dy, x, counts),
        by_torch=lambda: each_run(dw, by_run(dy).mT, by_run(x)),
    )


def by_run(rows: torch.Tensor) -> torch.Tensor:
    """[RUNS × n, columns] as [RUNS, n, columns]."""
    return rows.view(RUNS, -1, rows.shape[1])


def each_run(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """One product of torch for each run."""
    for target, first, second in zip(out, a, b):
        torch.mm(first, second, out=target)


def least_times(product: Product, turns: int) -> list[float]:
    """Seconds, compiled and by torch."""
    times = [[], []]
    for _ in range(turns):
        for run, of_run in zip((product.compiled, product.by_torch), times):
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            of_run.append(seconds)
    # The first turn of each allocates.
    return [min(of_run[1:]) for of_run in times]


def products(dtype: torch.dtype) -> Iterator[Product]:
    """All products that are measured."""
    forms = itertools.product(SIDES, FORMS)
    for side, form in forms:
        # Rows, numbers of a sum, columns.
        sizes = [part * side for part in form]
        yield from plain_products(*sizes, dtype)
        yield from products_of_runs(*sizes, dtype)


def line_of(product: Product, ours: float, theirs: float) -> str:
    """The product, its size, its speed and how much faster it is than torch's."""
    shape = "x".join(map(str, product.sizes))
    power = math.log2(product.multiplications)
    speed = 2 * product.multiplications / ours / 1e9
    ratio = theirs / ours
    return (
        f"{product.name:13} {shape:15} 2^{power:4.1f}  "
        f"{speed:7.1f} GFLOP/s  {ratio:5.2f} x torch's"
    )


def measure(name: str, threads: list[int], turns: int) -> int:
    """Print a line for each product; return the multiplications from which the compiled ones won."""
    slower = 0
    for count in threads:
        torch.set_num_threads(count)
        # What is slower at any number of threads counts.
        for product in products(DTYPES[name]):
            ours, theirs = least_times(product, turns)
            if ours > theirs:
                slower = max(slower, product.multiplications)
            line = line_of(product, ours, theirs)
            print(f"{name} {count:3} threads  {line}", flush=True)
    return slower + 1


def parse_arguments() -> argparse.Namespace:
    """The flags of the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dtypes", nargs="+", default=[*DTYPES], choices=[*DTYPES])
    parser.add_argument("--threads", nargs="+", type=int)
    parser.add_argument("--turns", type=int, default=20)
    return parser.parse_args()


def main() -> None:
    """Measure, and print what was found for each dtype."""
    options = parse_arguments()
    threads = options.threads
    if threads is None:
        threads = sorted({1, torch.get_num_threads()})
    found = {}
    for name in options.dtypes:
        reason = compiled_product.reason_against(DTYPES[name])
        if reason:
            found[name] = f"no compiled products on this machine: {reason}"
        else:
            least = measure(name, threads, options.turns)
            found[name] = f"as fast or faster from {least:,} multiplications on"
    for name, text in found.items():
        print(f"{name}: {text}")


if __name__ == "__main__":
    main()
