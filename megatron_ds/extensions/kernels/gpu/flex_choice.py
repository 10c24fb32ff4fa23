"""When `core_attention.attention` runs FlexAttention on a GPU: for what torch's fused attention
needs a mask for, or cannot do.
"""

import torch

from ....ops.core_attention import attention, reference_attention
from ....ops.dropout import KeepMask
from ....ops.kernel_table import FLOATS, GPU
from ....ops.key_visibility import CAUSAL_KEYS, KeyVisibility
from ....ops.scoring import PLAIN, Scoring
from . import flex_attention, flex_check
from .flex_attention import TILE


def _suits_flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: KeyVisibility = CAUSAL_KEYS,
    *,
    keep: KeepMask | None = None,
    scoring: Scoring = PLAIN,
) -> bool:
    if (
        q.shape[0] != k.shape[0] or q.shape[0] <= TILE
    ):  # one tile: nothing can be skipped
        return False
    others = (visible.documents, scoring.sink, scoring.alibi)
    return not visible.pattern.is_plain or any(other is not None for other in others)


def _fits_flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: KeyVisibility = CAUSAL_KEYS,
    *,
    keep: KeepMask | None = None,
    scoring: Scoring = PLAIN,
) -> str:
    if keep is not None:
        return "dropout of probabilities"
    if not visible.hides_by_key:
        return "a mask that differs between queries or heads"
    if scoring.has_places:
        return "ALiBi of tokens that are no neighbours"
    reason = flex_attention.fits(q, k, v)
    if reason or not q.is_cuda:  # a plan assumes that the check succeeds
        return reason
    return flex_check.reason_against(
        flex_attention.compiled_apart, reference_attention, q.dtype, q.device
    )


@attention.kernel(
    "flex",
    devices=GPU,
    dtypes=FLOATS,
    suits=_suits_flex,
    fits=_fits_flex,
    available=flex_attention.reason_against,
)
def _flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: KeyVisibility = CAUSAL_KEYS,
    *,
    keep: None = None,
    scoring: Scoring = PLAIN,
) -> torch.Tensor:
    return flex_attention.flex_attention(q, k, v, visible, scoring)
