"""An operation and a model of this file alone have their part of the planned seconds, and of a search."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from megatron_ds.config import parse
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.extensions.plan_time.cluster import Cluster
from megatron_ds.extensions.plan_time.device import Constants, Device
from megatron_ds.extensions.plan_time.recorded_work import WorkRecorder
from megatron_ds.extensions.plan_time.search import Search
from megatron_ds.extensions.plan_time.step_time import step_time
from megatron_ds.models import MODELS, gpt_layers, language_model
from megatron_ds.ops.kernel_table import OPERATIONS, Operation

pytestmark = pytest.mark.plan

NAME = "exponential-gpt"
LAYERS = 2
# A device on which one FLOP and one byte take a second, and a launch nothing.
UNIT = Device("unit", 1e12, {"float32": 1.0}, 1.0, 0, Constants(1.0, 1.0, 1.0, 0.0))
CLUSTER = Cluster(UNIT, latency=0.0)
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --vocab-size 100 --attention-dropout 0 --hidden-dropout 0 --mock-data --lr 1e-4 "
    "--train-iters 10 --dry-run"
)
MICROBATCHES = 4
BYTES = 32 * 2 * 64 * 4  # of the hidden states of a micro-batch


class ExponentialBlock(nn.Module):
    """A block of a GPT with an operation behind it."""

    def __init__(self, make, operation):
        super().__init__()
        self.block = make()
        self.operation = operation

    def forward(self, x, batch):
        return self.operation(self.block(x, batch))


@pytest.fixture(scope="module", autouse=True)
def registered():
    """The operation and the model."""
    known = dict(MODELS._things)

    @Operation
    def exponential_of_a_user(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    @MODELS.register(NAME)
    @language_model
    def exponential_gpt(config, ctx):
        made = lambda layer: partial(
            ExponentialBlock, layer.make, exponential_of_a_user
        )
        return [
            replace(layer, make=made(layer)) if layer.is_block else layer
            for layer in gpt_layers(config, ctx)
        ]

    yield
    MODELS._things = known
    del OPERATIONS["exponential_of_a_user"]


def test_an_operation_of_a_new_model_is_in_the_seconds_of_a_step():
    seconds = {}
    for model in ("gpt", NAME):
        config = parse(f"{FLAGS} --model {model}".split(), world_size=1)
        plan = plan_world(config, 0, "cuda", WorkRecorder)
        seconds[model] = step_time(plan, CLUSTER).seconds
    # It reads and writes once; its backward multiplies the gradient by the result.
    each = (2 + 3) * BYTES
    assert seconds[NAME] - seconds["gpt"] == LAYERS * MICROBATCHES * each


def test_a_new_model_is_searched():
    config = parse(f"{FLAGS} --model {NAME}".split(), world_size=2)
    search = Search(config, 2, CLUSTER)
    one = next(
        one
        for one in search.tried()
        if (one.layout.pp, one.layout.micro_batch, one.layout.recompute) == (1, 1, "")
    )
    [found] = search.best([one], 1)
    assert one.estimate.seconds == pytest.approx(found.seconds, rel=0.05)
