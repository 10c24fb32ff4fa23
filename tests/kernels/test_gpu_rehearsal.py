"""The tests of `make gpu` that compare a GPU with the CPU, rehearsed on a GPU that does not exist; they find
what they look for."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch

from tests.gpu import test_ranks_as_threads
from tests.harness.device_ranks import train_on_one_gpu
from tests.harness.fake_cuda import FakeGpu, fake_cuda
from tests.harness.gpu_equality import CASES, check, train

pytestmark = [pytest.mark.threads, pytest.mark.rest]

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


class HostStream:
    """A stream that orders nothing: on a CPU each operation ends before the next one."""

    def wait_stream(self, stream):
        pass

    wait_event = wait_stream

    def record_event(self):
        return self

    def query(self):
        return True


@contextmanager
def streams_of_a_cpu():
    """Streams and events of torch.cuda are `HostStream`."""
    names = {"Stream": HostStream, "current_stream": HostStream}
    names |= {"_sleep": lambda _: None}
    names |= {"synchronize": lambda *_: None, "stream": lambda _: ExitStack()}
    with ExitStack() as stack:
        for name, value in names.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        yield


@pytest.mark.parametrize(
    ("layout", "dtype", "more"), test_ranks_as_threads.CASES[3::4], ids=str
)
def test_ranks_that_share_a_gpu_train(layout, dtype, more):
    """The delays are drawn and the messages arrive, on the CPU: the bits are those of a run without delays."""
    with streams_of_a_cpu():
        trace, weights = train_on_one_gpu(layout, None, dtype, more, CPU)
        late, late_weights = train_on_one_gpu(layout, 0, dtype, more, CPU)
    assert late.losses == trace.losses
    assert all(torch.equal(weights[key], late_weights[key]) for key in weights)
