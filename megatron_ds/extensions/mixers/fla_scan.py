"""`linear_scan` on GPUs by kernels of flash-linear-attention (Yang and Zhang 2024), where that package is installed.

    with β       fla.ops.gated_delta_rule.chunk_gated_delta_rule(q, k, v, g, beta, scale)
    without β    fla.ops.simple_gla.chunk_simple_gla(q, k, v, g, scale)

Both take [b, s, n, ..] with a query and a key for each head, and compute in 16 bits with sums in fp32. Documents need
their ends on the host there, so that sequences with documents are scanned by torch's operations.
"""

from importlib import import_module
from typing import Any

import torch

from .linear_scan import CHUNK, linear_scan

NAME = "fla"
HALVES = (torch.bfloat16, torch.float16)
DELTA_RULE = ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
STATE_SPACE = ("fla.ops.simple_gla", "chunk_simple_gla")


def reason_against() -> str:
    """Return why the package cannot be used; "" if it can."""
    for module, name in (DELTA_RULE, STATE_SPACE):
        # Packages of kernels raise any error where a compiler or a driver does not suit them.
        try:
            found = import_module(module)
        except Exception as error:
            return f"{module} cannot be imported ({error})"
        if not hasattr(found, name):
            return f"{module} has no {name}: another version of flash-linear-attention"
    return ""


def _narrow(*tensors: torch.Tensor) -> torch.dtype | None:
    """Return the dtype of 16 bits that one of the tensors has; None if all are wider."""
    return next((t.dtype for t in tensors if t.dtype in HALVES), None)


def reason_against_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> str:
    """Return why the kernels do not take these arguments; "" if they do."""
    if documents is not None:
        return "documents that are kept apart"
    return "fp32" if _narrow(q, k, v) is None else ""


@linear_scan.implementation(
    NAME,
    devices=("cuda",),
    available=reason_against,
    fits=reason_against_arguments,
    is_opaque=True,
)
def scan_by_fla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Return o [s, b, n, dv] as `linear_scan` does, of arguments without documents. chunk is that of the kernels."""
    dtype = _narrow(q, k, v)
    each = v.shape[2] // q.shape[2]

    def of_heads(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).to(dtype).repeat_interleave(each, 2)

    arguments: dict[str, Any] = {
        "q": of_heads(q),
        "k": of_heads(k),
        "v": v.transpose(0, 1).to(dtype),
        "g": decay.transpose(0, 1).float(),
    }
    if beta is not None:
        arguments["beta"] = beta.transpose(0, 1).to(dtype)
    module, name = STATE_SPACE if beta is None else DELTA_RULE
    scan = getattr(import_module(module), name)
    # Queries have their factor already.
    out, _ = scan(**arguments, scale=1.0)
    return out.transpose(0, 1).to(v.dtype)
