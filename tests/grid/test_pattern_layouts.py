"""Windows, sinks and sparse layouts train over several ranks as in one process."""

import pytest

from tests.harness.layout_runs import GLOBAL_BATCH, NUM_LAYERS, reference_of, stray
from tests.harness.tiny_jobs import TOLERANCE, tiny_job

pytestmark = pytest.mark.threads

STEPS = 3
WINDOWS = "--window-size 5,0 --window-attn-skip-freq 2 --softmax-type learnable".split()
SPARSE = (
    "--sparse-attention bigbird --sparse-block 2 --sparse-num-random-blocks 1 --sparse-layout-per-head "
    "--sparse-num-sliding-window-blocks 3"
).split()


FIXED = (
    "--sparse-attention fixed --sparse-block 4 --sparse-num-local-blocks 2 --sparse-layout-per-head "
    "--sparse-num-different-global-patterns 2"
).split()


@pytest.mark.parametrize(
    "style, features, layout",
    [
        ("gpt2", SPARSE, "tp=2,pp=2,dp=2,zero=2,recompute=selective"),
        ("llama", SPARSE, "cp=2,tp=2,comm_type=a2a"),
        ("llama", SPARSE, "cp=2,tp=2,sp=1"),
        ("gpt2", FIXED, "cp=4,comm_type=a2a+p2p,hcp=2 2"),
        ("bert", FIXED, "cp=2,comm_type=all_gather,zero=3"),
        ("bert", SPARSE, "cp=2,recompute=selective"),
        ("llama", FIXED, "cp=2,comm_type=all_gather,pp=2"),
        ("llama", WINDOWS, "cp=2"),
        ("gpt2", WINDOWS, "cp=2,comm_type=a2a"),
        ("llama", WINDOWS, "cp=2,tp=2,sp=1,comm_type=all_gather,recompute=full"),
    ],
)
def test_ranks_train_like_one_process(style, features, layout):
    dropout, documents = (0.0, "joined") if style == "bert" else (0.1, "apart")
    dropout *= features is not FIXED  # then blocks of keys have fused kernels
    job = [
        *tiny_job(
            style, "fp32", False, dropout, NUM_LAYERS, GLOBAL_BATCH, STEPS, documents
        ),
        *features,
    ]
    difference, run = stray(job, layout, STEPS)
    assert difference.is_within(TOLERANCE["fp32"]), difference
    assert run.merged[0].losses != pytest.approx(plain_losses(job, features), rel=1e-4)


def plain_losses(job, features):
    """Those of attention to all tokens, in one process."""
    return reference_of(job[: -len(features)], "", STEPS).merged[0].losses
