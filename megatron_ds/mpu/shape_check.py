"""A promise: what a rank of a pipeline will send in a step, in a message of fixed length, to be compared with another's.

    | micro-batches | dtype | digest of all shapes | runs | of each run of equal shapes: micro-batches, dimensions, sizes |

Runs beyond the room for them are compared by the digest alone.
"""

import zlib
from collections.abc import Sequence
from itertools import groupby

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST_RUNS, MOST_SIZES = 12, 4
HEADER, RUN = 4, 2 + MOST_SIZES


def make_promise(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> torch.Tensor:
    """shapes: of each micro-batch in turn. int64 on the CPU."""
    shapes = [tuple(shape) for shape in shapes]
    assert all(len(shape) <= MOST_SIZES for shape in shapes), f"hidden states have at most {MOST_SIZES} dimensions: {shapes}"
    runs = [(len(list(same)), len(shape), *shape, *[0] * (MOST_SIZES - len(shape))) for shape, same in groupby(shapes)]
    shown = runs[:MOST_RUNS]
    numbers = [len(shapes), DTYPES.index(dtype), zlib.crc32(repr(runs).encode()), len(shown), *sum(shown, ())]
    return torch.tensor(numbers + [0] * (HEADER + RUN * MOST_RUNS - len(numbers)))


def difference(expected: torch.Tensor, got: torch.Tensor) -> str:
    """What of another rank's promise is not as expected, in words; "" if nothing."""
    if torch.equal(expected, got):
        return ""
    (m, dtype, *_), (its_m, its_dtype, *_) = expected.tolist(), got.tolist()
    dtypes = [str(DTYPES[d]).removeprefix("torch.") if 0 <= d < len(DTYPES) else "?" for d in (dtype, its_dtype)]
    if m != its_m:
        return f"expected a step of {m} micro-batches, but that one takes a step of {its_m}"
    for k, (shape, its_shape) in enumerate(zip(_shapes(expected), _shapes(got))):
        if shape != its_shape or dtype != its_dtype:
            return f"micro-batch {k} was expected as {shape} {dtypes[0]}, but comes as {its_shape} {dtypes[1]}"
    return f"one of the micro-batches after number {len(_shapes(expected)) - 1} has another shape than expected"


def _shapes(promise: torch.Tensor) -> list[list[int]]:
    _, _, _, num_runs, *numbers = promise.tolist()
    runs = [numbers[RUN * i:RUN * (i + 1)] for i in range(num_runs)]
    return [sizes[:dimensions] for count, dimensions, *sizes in runs for _ in range(count)]
