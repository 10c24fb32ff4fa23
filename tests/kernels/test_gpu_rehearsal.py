"""The tests of `make gpu` that compare a GPU with the CPU, rehearsed on a GPU that does not exist; they find
what they look for."""

import pytest
import torch

from tests.harness.fake_cuda import FakeGpu, fake_cuda
from tests.harness.gpu_equality import CASES, check, train

pytestmark = pytest.mark.threads

CPU = torch.device("cpu")
# Values on the fake GPU are the CPU's, so one case of each path is enough.
REHEARSED = ["llama bf16", "loss scaling, offloaded"]


def on_a_gpu(name):
    with fake_cuda(), FakeGpu() as gpu:
        result = train(CASES[name], torch.device("cuda", 0), ("--kernels", "torch"))
        assert not gpu.order.problems and gpu.order.launches
    return result


@pytest.mark.parametrize("name", REHEARSED)
def test_the_gpu_trains_like_the_cpu(name):
    check(CASES[name], on_a_gpu(name), train(CASES[name], CPU))


def test_a_gpu_that_computes_something_else_is_found():
    """A run with other dropout; one that skips no step."""
    here = train(CASES["gpt2"], CPU)
    with pytest.raises(AssertionError, match="loss"):
        check(
            CASES["gpt2"], train(CASES["gpt2"], CPU, ("--hidden-dropout", "0.2")), here
        )
    with pytest.raises(AssertionError):
        check(CASES["loss scaling"], train(CASES["gpt2"], CPU), here)


def test_all_cases_run_on_this_machine():
    """Their flags are accepted; the values are compared on a GPU."""
    for name in CASES.keys() - {*REHEARSED}:
        trace, _ = train(CASES[name], CPU)[0]
        assert trace.losses[-1] < trace.losses[0], name
