"""Layouts train the same, to the bit, where messages arrive as late as they may (tests/harness/late_messages.py).

Every wait is needed: the kinds of waits that a step has are left out in turn, and each is found.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from tests.grid import test_layout_grid as layouts
from tests.harness.late_messages import LateNetwork, Origin
from tests.harness.layout_runs import GLOBAL_BATCH, Run, run_layout
from tests.harness.moe_runs import job_of
from tests.harness.threads import ThreadTransport
from tests.harness.tiny_jobs import tiny_job

pytestmark = [pytest.mark.threads, pytest.mark.one_in(3)]

STEPS = 2
CASES = layouts.cases(0)
SHARE = 1 if os.environ.get("MEGATRON_DS_TEST_ALL") else 12


def same_bits(run: Run, other: Run) -> bool:
    (trace, weights), (trace0, weights0) = run.merged, other.merged
    return (
        trace.losses == trace0.losses
        and trace.grad_norms == trace0.grad_norms
        and all(torch.equal(w, weights0[name]) for name, w in weights.items())
    )


@pytest.mark.parametrize("case", CASES[::SHARE], ids=layouts.name_of)
def test_a_layout_trains_to_the_same_bits_when_messages_arrive_late(case):
    job, layout = layouts.job_of(case), layouts.layout_of(case)
    network = LateNetwork()
    late = run_layout(job, layout, STEPS, network.transport)
    assert not network.unfinished()
    assert same_bits(late, run_layout(job, layout, STEPS, ThreadTransport))


class Wait(NamedTuple):
    """A kind of wait: the operation, where the package calls it, and a layout that has it."""

    operation: str
    file: str
    function: str
    layout: str
    makes_job: Callable[[], list[str]] = lambda: tiny_job(
        "gpt2", "fp32", False, 0.0, 2, GLOBAL_BATCH, STEPS
    )

    def is_of(self, origin: Origin) -> bool:
        is_there = origin.is_in(self.file, self.function)
        return origin.operation == self.operation and is_there


WAITS = {
    "weights of a layer, stage 3": Wait(
        "all-gather", "zero/gathering.py", "start", "zero=3,dp=2"
    ),
    "a bucket of gradients": Wait(
        "reduce-scatter", "zero/exchange.py", "reduce", "zero=2,dp=2"
    ),
    "updated weights, stage 1": Wait(
        "all-gather", "zero/param_store.py", "refresh", "zero=1,dp=2"
    ),
    "a sum over tensor-parallel ranks": Wait(
        "all-reduce", "tensor_parallel/linear.py", "row_rows", "tp=2"
    ),
    "a sum that overlaps with a weight gradient": Wait(
        "all-reduce", "tensor_parallel/linear.py", "_start_reduce", "tp=2"
    ),
    "inputs that are gathered in backward": Wait(
        "all-gather", "tensor_parallel/linear.py", "start_all_gather", "tp=2,sp=1"
    ),
    "an activation or gradient": Wait("receive", "mpu/channels.py", "recv", "pp=2"),
    "a sent activation": Wait("send", "mpu/channels.py", "send", "pp=2,schedule=gpipe"),
    "a block of keys": Wait(
        "exchange", "context_parallel/block_exchange.py", "forward", "cp=2"
    ),
    "rows of experts": Wait("all-to-all", "moe/dispatch.py", "", "dp=2,ep=2", job_of),
    "gradients of tied embeddings": Wait(
        "all-reduce", "zero/parameter_set.py", "reduce", "pp=2"
    ),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_wait_that_is_left_out_is_found(wait):
    job = wait.makes_job()
    network = LateNetwork(forgets=wait.is_of)
    try:
        run = run_layout(job, wait.layout, STEPS, network.transport)
    except Exception:  # noqa: BLE001  whatever NaN and huge numbers lead to
        run = None
    assert network.forgotten
    plain = run_layout(job, wait.layout, STEPS, ThreadTransport)
    assert run is None or not same_bits(run, plain)
