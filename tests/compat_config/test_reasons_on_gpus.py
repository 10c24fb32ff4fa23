"""Flags of Megatron that name an implementation for GPUs which the package does not have: accepted, with a reason
that begins with "no effect yet". The sources decide what the package has."""

from pathlib import Path

import pytest

import megatron_ds
from megatron_ds.compat.config.unsupported import FLAGS

pytestmark = pytest.mark.plan

SOURCES = [
    path.read_text(encoding="utf-8")
    for path in Path(megatron_ds.__file__).parent.rglob("*.py")
    if not path.is_relative_to(Path(megatron_ds.__file__).parent / "compat")
]

# A name that sources would contain with the feature → flags that ask for it.
FEATURES = {
    "CUDAGraph": "--cuda-graph-impl --enable-cuda-graph --external-cuda-graph --cuda-graph-scope "
    "--optimizer-cuda-graph",
    "symm_mem": "--tp-comm-overlap --tp-comm-overlap-cfg --tp-comm-overlap-rs-dgrad --disable-tp-comm-split-ag",
    "register_mem_pool": "--use-nccl-ub --fsdp-manual-registration",
    "deep_ep": "--moe-enable-deepep --moe-flex-dispatcher-backend --moe-hybridep-num-sms",
    "transformer_engine": "--use-transformer-engine-op-fuser",
    "max_ctas": "--nccl-communicator-config-path",
    "recompute_modules": "--recompute-modules",
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_flag_of_an_implementation_that_is_not_here_is_said_to_have_no_effect(
    feature,
):
    is_here = any(feature in source for source in SOURCES)
    for flag in FEATURES[feature].split():
        reason = FLAGS[flag].note
        assert reason.startswith("no effect yet: ") != is_here, (flag, reason)
