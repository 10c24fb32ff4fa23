"""One GPU: FlexAttention's kernels, forward and backward, equal attention written out in double precision."""

import pytest
import torch

from megatron_ds.batch.documents import Documents
from megatron_ds.extensions.kernels.gpu import flex_attention, flex_check, flex_choice
from megatron_ds.extensions.kernels.gpu.kernel_check import error_between
from megatron_ds.ops.alibi import Alibi, alibi_slopes
from megatron_ds.ops.attention_pattern import FULL, AttentionPattern
from megatron_ds.ops.core_attention import attention, reference_attention
from megatron_ds.ops.kernel_table import random_tensors
from megatron_ds.ops.key_visibility import KeyVisibility
from megatron_ds.ops.scoring import Scoring
from tests.ops.test_flex_attention import (
    HEADS,
    documents_of,
    padding_of,
    pattern_of,
    seen_by_element,
)
from tests.ops.test_sparse_layouts import CASES

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a GPU: torch.cuda.is_available() is False",
)
DEVICE = torch.device("cuda", 0)


def test_flex_attention_runs_on_this_gpu():
    assert flex_attention.reason_against() == ""
    for dtype in flex_check.LIMITS:
        reason = flex_check.reason_against(
            flex_attention.compiled_apart, reference_attention, dtype, DEVICE
        )
        assert reason == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case, block, alibi, apart",
    [
        (CASES[1], 16, False, False),
        (CASES[4], 64, False, True),
        (AttentionPattern(left=200), 1, True, True),
    ],
)
def test_kernels_equal_attention_written_out(
    monkeypatch, case, block, alibi, apart, dtype
):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    s, d = 700, 80
    pattern = pattern_of(case, block, s) if isinstance(case, tuple) else case
    documents = Documents(documents_of(2, s).ids.to(DEVICE)) if apart else None
    padding = padding_of(2, s, 500).to(DEVICE)
    slopes = Alibi(alibi_slopes(HEADS, DEVICE)) if alibi else None
    hidden = ~torch.from_numpy(seen_by_element(pattern, s)).to(DEVICE)[None] | padding
    hidden = hidden | documents.foreign if apart else hidden

    def make():
        return tuple(
            random_tensors(
                dtype, DEVICE, *((s, 2, heads, d) for heads in (HEADS, 2, 2)), (HEADS,)
            )
        )

    def flex(q, k, v, sink):
        given = dict(
            visible=KeyVisibility(pattern, documents, padding),
            scoring=Scoring(None, sink, slopes),
        )
        assert attention.choice(q, k, v, **given) is flex_choice._flex
        return attention(q, k, v, **given)

    def expected(q, k, v, sink):
        return reference_attention(
            q,
            k,
            v,
            visible=KeyVisibility(FULL, mask=hidden),
            scoring=Scoring(None, sink, slopes),
        )

    # of roundings of 700 terms in fp32, and of probabilities in 16 bits
    assert error_between(flex, expected, make) <= (
        16 if dtype == torch.float32 else flex_check.LIMITS[dtype]
    )
