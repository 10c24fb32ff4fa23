"""The softmax of logits and the gradient of the cross entropy, in place, compiled from
csrc/elementwise/cross_entropy.cpp: an optional extension that reads and writes each row once.
"""

import functools
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from ....host import load_compiled
from ....ops import kept_probabilities
from ....ops.kernel_table import CPU
from ....ops.meta_tensors import has_memory

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def extension() -> ModuleType | Any:
    """Return the compiled functions; None, with one line in the log, where the package was installed without a
    compiler.
    """
    return load_compiled(
        "_cross_entropy",
        "Cross entropy",
        "torch's operations run instead, several times slower on CPU",
        logger,
    )


def softmax_(
    logits: torch.Tensor, column: torch.Tensor, valid: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kept_probabilities.probabilities_` of contiguous logits with memory on the CPU, of one of `DTYPES`."""
    at_column, lse = (
        logits.new_empty(len(logits), 1, dtype=torch.float32) for _ in range(2)
    )
    column = column.contiguous()
    extension().softmax(
        logits.data_ptr(),
        *logits.shape,
        valid,
        column.data_ptr(),
        at_column.data_ptr(),
        lse.data_ptr(),
        logits.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return at_column, lse


def gradient_(
    p: torch.Tensor,
    valid: int,
    column: torch.Tensor,
    elsewhere: torch.Tensor,
    factors: Sequence[torch.Tensor],
) -> None:
    """`kept_probabilities.probability_gradient_` of contiguous p as above.

    factors: factor, everywhere and at_label, fp32 [n, 1]
    """
    # contiguous tensors live until the call has ended
    facts = [t.contiguous() for t in (column, elsewhere, *factors)]
    extension().gradient(
        p.data_ptr(),
        *p.shape,
        valid,
        *(t.data_ptr() for t in facts),
        p.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )


def _suits(t: torch.Tensor, *_: object) -> bool:
    return has_memory(t) and t.is_contiguous()


_LIMITS = {
    "devices": CPU,
    "dtypes": DTYPES,
    "suits": _suits,
    "available": lambda: "" if extension() else "not compiled",
}


@kept_probabilities.probabilities_.kernel("c++", **_LIMITS)
def _compiled_probabilities_(
    logits: torch.Tensor, column: torch.Tensor, valid: int, times: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return softmax_(logits, column, valid)


@kept_probabilities.probability_gradient_.kernel("c++", **_LIMITS)
def _compiled_gradient_(
    p: torch.Tensor,
    column: torch.Tensor,
    elsewhere: torch.Tensor,
    factor: torch.Tensor,
    everywhere: torch.Tensor,
    at_label: torch.Tensor,
    valid: int,
) -> torch.Tensor:
    gradient_(p, valid, column, elsewhere, (factor, everywhere, at_label))
    return p
