"""Matrix products of 16-bit numbers at the speed of fp32, where a CPU cannot multiply them.

torch multiplies bf16 and fp16 matrices on a CPU through oneDNN where the processor has instructions for it
(AVX-512 with BF16, AMX), and otherwise element by element: on two AVX2 cores 0.7 GFLOP/s, where fp32 reaches
100. There 16-bit products are computed in fp32 and rounded once, as the instructions do, in parts of the
longest dimension, since a vocabulary in fp32 is large. Their fp32 intermediates are in a workspace, as are
those of other operations on the CPU.
"""

import functools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Workspace(threading.local):
    """Tensors for intermediates that are not needed after the function that computes them, one for each role.

    Reused memory stays in the CPU's cache. New tensors would be allocated between those that layers keep for
    backward and leave holes that nothing else fits into: a twentieth of the peak of a training step in bf16
    with fp32 products. Not for autograd: write to them without gradients.
    """

    def __init__(self):
        self._memory: dict[str, torch.Tensor | None] = {}

    def take(self, role: str, *shape: int) -> torch.Tensor:
        """Return an uninitialised tensor, valid until the thread takes the same role again."""
        memory = self._memory.get(role)
        numel = math.prod(shape)
        if memory is None or memory.numel() < numel:
            # The old memory is freed before the new one is allocated.
            memory = None
            self._memory[role] = None
            # A tensor of inference mode could not be written to elsewhere.
            with torch.inference_mode(False):
                memory = torch.empty(numel, dtype=torch.float32, device="cpu")
            self._memory[role] = memory
        return memory[:numel].view(shape)

    @contextmanager
    def apart(self) -> Iterator[dict[str, torch.Tensor | None]]:
        """Use other memory within the context: {role: tensor}, freed at its end."""
        held = self._memory
        self._memory = {}
        try:
            yield self._memory
        finally:
            self._memory = held


WORKSPACE = Workspace()


# A part of the longest dimension has about PART_ELEMENTS fp32 numbers, but at least LEAST_PART rows, to stay
# fast.
PART_ELEMENTS = 2**20
LEAST_PART = 256
EVERYTHING = slice(None)

_ASK_ONEDNN = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}


@functools.cache
def has_products(dtype: torch.dtype) -> bool:
    """Return whether this processor multiplies matrices of `dtype` at full speed."""
    if dtype not in _ASK_ONEDNN:
        return True
    return has_instructions(dtype)


def has_instructions(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has instructions of this processor for products of a 16-bit dtype."""
    ask = getattr(torch.ops.mkldnn, _ASK_ONEDNN[dtype])
    return ask()


def is_widened(t: torch.Tensor) -> bool:
    """Return whether products of `t` are computed in fp32."""
    return t.device.type == "cpu" and not has_products(t.dtype)


@torch.no_grad()
def widened_product(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """a b, or a b + bias, in fp32, rounded to the dtype of a; in `out` if it is given."""
    n, k = a.shape
    m = b.shape[1]
    if bias is not None:
        bias = bias.float()
    if out is None:
        out = a.new_empty(n, m)
    # Parts of the summed dimension add up in fp32.
    if k > max(n, m):
        sums = WORKSPACE.take("product", n, m)
        if bias is None:
            sums.zero_()
        else:
            sums.copy_(bias)
        add_widened_product_(sums, a, b)
        return out.copy_(sums)
    # Otherwise each part is a part of the result.
    for rows, columns, wide_a, wide_b in _parts(a, b):
        part = WORKSPACE.take("product", len(wide_a), wide_b.shape[1])
        if bias is None:
            torch.mm(wide_a, wide_b, out=part)
        else:
            torch.addmm(bias[columns], wide_a, wide_b, out=part)
        out[rows, columns] = part
    return out


@torch.no_grad()
def add_widened_product_(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out += a b for an fp32 `out`, without rounding between parts.

    out [n, m], a [n, k], b [k, m]
    """
    for rows, columns, wide_a, wide_b in _parts(a, b):
        out[rows, columns].addmm_(wide_a, wide_b)


def _parts(
    a: torch.Tensor, b: torch.Tensor
) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor]]:
    """Yields (rows of a, columns of b, their parts in fp32); the products are those rows and columns of a b.
    If the summed dimension is the longest, the products add up to a b instead. The next iteration reuses the
    yielded tensors.
    """
    n, k = a.shape
    m = b.shape[1]
    wide_a = functools.partial(_widen, "factor a")
    wide_b = functools.partial(_widen, "factor b")
    # The longest dimension is split; the factor without it is widened once.
    if k > max(n, m):
        for some in _split(k, n + m):
            yield EVERYTHING, EVERYTHING, wide_a(a[:, some]), wide_b(b[some])
    elif n >= m:
        whole = wide_b(b)
        for some in _split(n, k + m):
            yield some, EVERYTHING, wide_a(a[some]), whole
    else:
        whole = wide_a(a)
        for some in _split(m, k + n):
            yield EVERYTHING, some, whole, wide_b(b[:, some])


def working_elements(n: int, k: int, m: int) -> dict[str, int]:
    """fp32 numbers that the workspace holds for a product [n, k] [k, m], by role."""
    if k > max(n, m):
        part = _split(k, n + m)[0].stop
        return {"factor a": n * part, "factor b": part * m, "product": n * m}
    if n >= m:
        part = _split(n, k + m)[0].stop
        return {"factor a": part * k, "factor b": k * m, "product": part * m}
    part = _split(m, k + n)[0].stop
    return {"factor a": n * k, "factor b": k * part, "product": n * part}


def _split(size: int, each: int) -> list[slice]:
    """[0, size) in parts whose lengths differ by at most one. each: numbers per index, for PART_ELEMENTS."""
    wanted = -(-size * each // PART_ELEMENTS)
    count = max(1, min(wanted, size // LEAST_PART))
    ends = [-(-size * i // count) for i in range(count + 1)]
    return [slice(start, stop) for start, stop in zip(ends, ends[1:])]


def _widen(role: str, t: torch.Tensor) -> torch.Tensor:
    """Return a matrix in fp32 in the workspace, in its own memory order."""
    if t.stride(0) < t.stride(1):
        return _widen(role, t.t()).t()
    wide = WORKSPACE.take(role, *t.shape)
    return wide.copy_(t)
