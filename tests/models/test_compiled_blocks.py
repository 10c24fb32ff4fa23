"""Blocks inside torch.compile train like blocks outside of it, and break its graphs only where a linear layer
writes gradients to buffers of the optimizer."""

import os
from dataclasses import replace

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.models import MODELS, build_stage
from megatron_ds.models.block import Block
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.tensor_parallel.init import initialize
from tests.harness.gpt_runs import make_batch
from tests.harness.layout_comparison import (
    difference,
    merge,
    random_samples,
    train_layout,
)
from tests.harness.model_runs import context_of
from tests.harness.plain_gpt import STYLES
from tests.harness.tiny_jobs import SEQ_LENGTH, VOCAB, tiny_job

pytestmark = [pytest.mark.threads, pytest.mark.parts(2, together=True)]

STEPS, BATCH = 3, 4
BY_INDUCTOR = pytest.param(
    "inductor",
    marks=[
        pytest.mark.timeout(900),
        pytest.mark.skipif(
            "MEGATRON_DS_TEST_ALL" not in os.environ,
            reason="compiles C++: MEGATRON_DS_TEST_ALL=1 (make test-all)",
        ),
    ],
)


@pytest.fixture(autouse=True)
def compiler():
    """An empty torch._dynamo, whose breaks of graphs are counted; yields the counters."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    reset()
    counters.clear()
    yield counters
    reset()


def train(backend=None):
    """Loss curve and weights of a GPT with dropout, whose one block is compiled if there is a backend."""
    flags = [
        *tiny_job("gpt2", "fp32", False, 0.1, 1, BATCH, STEPS),
        *"--micro-batch-size 2 --zero-stage 1".split(),
    ]
    config = parse(flags, world_size=1)
    mesh = Mesh(Grid.fit(1), 0, lambda *args: None, torch.device("cpu"))

    def compiled(engine):
        [block] = [module for module in engine.modules if isinstance(module, Block)]
        block.compile(backend=backend)

    samples = random_samples(4 * BATCH, SEQ_LENGTH, VOCAB, seed=1)
    return merge(
        [train_layout(config, mesh, STEPS, samples, watch=backend and compiled)]
    ), config.model


def test_compiled_blocks_train_alike_to_rounding(compiler):
    (eager, model), (compiled, _) = train(), train("aot_eager")
    found = difference(compiled, eager, model)
    assert found.loss <= 1e-6 and found.grad_norm <= 1e-6, found
    # Each of the four linear layers breaks the block, and what calls it.
    breaks = compiler["graph_break"]
    assert compiler["stats"]["unique_graphs"] > 0 and breaks
    assert all("call_outside_graphs" in reason for reason in breaks), breaks


@pytest.mark.parametrize("backend", ["aot_eager", BY_INDUCTOR])
def test_a_block_whose_gradients_autograd_keeps_is_one_graph_and_trains_alike(backend):
    config = replace(
        STYLES["llama"], hidden_dropout=0.1, attention_dropout=0.1, num_layers=1
    )
    # One context, whose slice of the sequence is made by the eager run, as a run makes it before its steps.
    ctx, batch, x = (
        context_of(),
        make_batch(config, 2),
        torch.randn(10, 2, config.hidden_size),
    )
    losses, weights = {}, {}
    for name in ("eager", "compiled"):
        block = build_stage(MODELS["gpt"](config, ctx))[1]
        initialize(list(block.parameters()), 1, {})
        run = (
            block
            if name == "eager"
            else torch.compile(block, backend=backend, fullgraph=True)
        )
        optimizer, losses[name] = torch.optim.SGD(block.parameters(), lr=5.0), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = run(x, batch).square().mean()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.detach())
        weights[name] = list(block.parameters())
    assert losses["eager"][-1] < 0.995 * losses["eager"][0]
    torch.testing.assert_close(losses["compiled"], losses["eager"], rtol=1e-5, atol=0)
    torch.testing.assert_close(
        weights["compiled"], weights["eager"], rtol=1e-4, atol=1e-6
    )
