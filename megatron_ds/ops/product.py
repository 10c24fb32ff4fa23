"""Matrix products in the dtype of their factors, at the speed of fp32 where a processor cannot multiply 16-bit numbers.

torch multiplies bf16 and fp16 matrices on a CPU through oneDNN where the processor has instructions for it (AVX-512 with
BF16, AMX), and otherwise element by element: on two AVX2 cores 0.7 GFLOP/s, where fp32 reaches 100. Such products are computed
here in fp32 and rounded once, which is what the instructions do, too; some rows at a time, as logits in fp32 are large.
"""

import functools

import torch

LEAST_ROWS, BLOCK_ELEMENTS = 256, 2**20

_ASK_ONEDNN = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


@functools.cache
def has_products(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies matrices of `dtype` at full speed."""
    ask = _ASK_ONEDNN.get(dtype)
    return ask is None or getattr(torch.ops.mkldnn, ask)()


def is_widened(t: torch.Tensor) -> bool:
    """Whether products of `t` are better computed in fp32."""
    return t.device.type == "cpu" and not has_products(t.dtype)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b for matrices [n, k] and [k, m]."""
    return _widened(a, b, None) if is_widened(a) else a.mm(b)


def affine(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x Wᵀ + b for x [n, in], weight [out, in], bias [out] or None."""
    if is_widened(x):
        return _widened(x, weight.t(), bias)
    return x.mm(weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def add_product_(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out += a b, in place. `out` may be wider than the factors."""
    if out.dtype == torch.float32 and is_widened(a):
        b = b.float()
        for rows in _blocks(a, b):
            out[rows].addmm_(a[rows].float(), b)
    elif out.dtype == a.dtype and not is_widened(a):
        out.addmm_(a, b)
    else:
        out.add_(product(a, b))


def _widened(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """a b, or a b + bias, in fp32, rounded."""
    out, b = a.new_empty(a.shape[0], b.shape[1]), b.float()
    bias = None if bias is None else bias.float()
    for rows in _blocks(a, b):
        wide = a[rows].float()
        out[rows] = wide.mm(b) if bias is None else torch.addmm(bias, wide, b)
    return out


def _blocks(a: torch.Tensor, b: torch.Tensor) -> list[slice]:
    """Rows of a that are widened, and multiplied, at a time: BLOCK_ELEMENTS in fp32, or some rows, beside b as a whole."""
    rows = max(LEAST_ROWS, BLOCK_ELEMENTS // (a.shape[1] + b.shape[1]))
    return [slice(start, start + rows) for start in range(0, a.shape[0], rows)]
