"""FlexAttention is compared once with attention written out, forward and backward, before a process uses it.

Unlike `self_check.py`, when a pattern first needs it: its compilation takes some seconds, for which runs
without such patterns should not wait. Where a result differs, or Triton cannot compile, a warning has the
reason, and torch's operations run.
"""

import logging
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import torch

from ....ops.attention_pattern import AttentionPattern
from ....ops.block_layout import BlockLayout
from ....ops.kernel_table import random_tensors
from ....ops.key_visibility import KeyVisibility
from ....ops.scoring import Scoring
from .kernel_check import error_between

logger = logging.getLogger(__name__)

# the last tile is shorter
POSITIONS = 300
BLOCK = 32
CHANNELS = 64
# Times the tolerance of kernels. A score too many or too few is off by a hundred times as much; roundings of
# TF32, which the process may allow for fp32, are not.
LIMITS = {torch.float32: 500, torch.bfloat16: 4, torch.float16: 8}


@lru_cache
def reason_against(
    function: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    cap: float | None = None,
) -> str:
    """Return why a function with the arguments of `core_attention.attention` is not used; "" if it equals the
    reference. Logged once for each cap of scores."""
    visible = KeyVisibility(AttentionPattern(layout=_layout()))
    try:
        # Hooks of a checkpoint around this call must not count what the comparison saves.
        with (
            torch.inference_mode(False),
            torch.autocast(device.type, enabled=False),
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        ):
            error = error_between(
                partial(_called, function, visible, cap),
                partial(_called, reference, visible, cap),
                partial(_arguments, dtype, device),
            )
        reason = (
            ""
            if error <= LIMITS[dtype]
            else f"results are wrong by {error:.3g} times the tolerance"
        )
    except Exception as error:  # whatever it is: the run goes on without the kernel
        reason = f"{type(error).__name__}: {error}"
    if reason:
        logger.warning(
            "FlexAttention failed the check for %s on %s, so torch's operations compute attention "
            "with patterns there: %s",
            dtype,
            device,
            reason,
        )
    return reason


def _layout() -> BlockLayout:
    """Return a layout of two heads: each block sees itself and the first; in the second head the one before, too."""
    blocks = -(-POSITIONS // BLOCK)
    seen = np.stack([np.eye(blocks, dtype=bool)] * 2)
    seen[:, :, 0] = True
    seen[1] |= np.eye(blocks, k=-1, dtype=bool)
    return BlockLayout.of(BLOCK, seen)


def _arguments(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    shapes = [(POSITIONS, 2, heads, CHANNELS) for heads in (2, 1, 1)]
    return tuple(random_tensors(dtype, device, *shapes, (2,)))


def _called(
    function: Callable[..., torch.Tensor],
    visible: KeyVisibility,
    cap: float | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor,
) -> torch.Tensor:
    return function(q, k, v, visible, scoring=Scoring(sink=sink, cap=cap))
