"""A plan in the process of a run leaves nothing behind: `--zero3-pin-stage auto` plans each run before it
begins, in tensors without memory."""

import gc

import pytest
import torch

from megatron_ds.batch import documents
from megatron_ds.host.fake_cpu import FakeCpuTensor
from megatron_ds.models import MODELS
from tests.harness.layout_runs import run_layout
from tests.harness.tiny_jobs import tiny_job

pytestmark = [pytest.mark.threads, pytest.mark.one_in(3)]

STEPS = 2
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-expert-capacity-factor 1"
DROPPED = (
    "--random-ltd --random-ltd-min-tokens 8 --random-ltd-steps 4 "
    "--random-ltd-tokens-per-step 8 --random-ltd-layer-ids 0"
)
OF_EVERY_MODEL = {"dense": "", "experts": EXPERTS, "dropped tokens": DROPPED}
OF_GPT = {
    "window": "--window-size 7 0",
    "window of documents": "--window-size 7 0 --reset-attention-mask",
    "documents": "--reset-attention-mask --reset-position-ids",
    "sparse": "--sparse-attention fixed --sparse-block 8 --sparse-num-local-blocks 1",
    "llama": "--swiglu --normalization RMSNorm --position-embedding-type rope",
}
CASES = [
    *(
        (model, name, flags)
        for model in MODELS
        for name, flags in OF_EVERY_MODEL.items()
    ),
    *(("gpt", name, flags) for name, flags in OF_GPT.items()),
]


def job_of(model, flags):
    style = "bert" if model == "bert" else "gpt2"
    return [
        *tiny_job(style, "fp32", False, 0.0, 2, 4, STEPS),
        "--model",
        model,
        *flags.split(),
    ]


def tensors_without_memory():
    """Tensors without memory that something still refers to, by their identity."""
    documents._foreign.cache_clear()  # keyed by the batch itself, which a run never has
    documents._bias.cache_clear()
    gc.collect()
    return {id(t): t for t in gc.get_objects() if type(t) is FakeCpuTensor}


@pytest.mark.parametrize(
    "model, name, flags", CASES, ids=lambda value: str(value).split(" --")[0]
)
def test_a_run_that_was_planned_in_its_process_equals_one_that_was_not(
    model, name, flags
):
    job = job_of(model, flags)
    before = tensors_without_memory()  # of other tests of this process
    planned = run_layout(job, "dp=2,zero=3,pin=auto", STEPS)
    left = [
        tuple(t.shape)
        for which, t in tensors_without_memory().items()
        if which not in before
    ]
    assert not left
    plain = run_layout(job, "dp=2,zero=3,pin=on", STEPS)
    (trace, weights), (expected, expected_weights) = planned.merged, plain.merged
    assert trace.losses == expected.losses and trace.grad_norms == expected.grad_norms
    assert all(
        torch.equal(w, expected_weights[parameter]) for parameter, w in weights.items()
    )


@pytest.mark.parametrize("flags", [OF_EVERY_MODEL["experts"], "--window-size 7 0"])
def test_a_run_does_not_disturb_a_plan_after_it(flags):
    job = job_of("gpt" if "window" in flags else "bert", flags)
    plain, _ = run_layout(job, "dp=2,zero=3,pin=on", STEPS).merged
    planned, _ = run_layout(job, "dp=2,zero=3,pin=auto", STEPS).merged
    assert planned.losses == plain.losses
