"""A new kind of layer, in this file alone: planned to the byte, cut by its own FLOPs, shown by --dry-run.

The block replaces attention by a gated running mean: y_t = W_o (silu(g_t) * mean of v_1 .. v_t), [g; v] = W_i
norm(x).
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_ds.config import parse
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.models import (
    MODELS,
    LayerFlops,
    build_stage,
    gpt_layers,
    language_model,
)
from megatron_ds.models.block import MLP, make_norm
from megatron_ds.mpu.fake_group import fake_mesh
from megatron_ds.mpu.grid import Grid
from megatron_ds.ops.widened_products import WORKSPACE
from megatron_ds.pipeline.stage import Stage
from megatron_ds.planning.run_model import describe_layers, loss_function
from megatron_ds.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_ds.training.pretrain import pretrain
from tests.harness.alive_bytes import AliveBytes

NAME = "running-mean-gpt"
JOB = [
    "--model",
    NAME,
    *(
        "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 23 "
        "--micro-batch-size 3 --global-batch-size 12 --vocab-size 130 "
        "--make-vocab-size-divisible-by 8 --lr 1 --train-iters 1 --mock-data --hidden-dropout 0 "
        "--attention-dropout 0"
    ).split(),
]


class RunningMeanBlock(nn.Module):
    def __init__(self, config, name, ctx):
        super().__init__()
        h, std = config.hidden_size, config.init_method_std
        self.mean_norm = make_norm(config, f"{name}.mean_norm", ctx)
        self.linear_in = ColumnParallelLinear(
            h, 2 * h, ctx, name=f"{name}.linear_in", init_std=std, parts=2
        )
        self.linear_out = RowParallelLinear(
            h, h, ctx, name=f"{name}.linear_out", init_std=std
        )
        self.mlp_norm = make_norm(config, f"{name}.mlp_norm", ctx)
        self.mlp = MLP(config, f"{name}.mlp", ctx, output_std=std)

    def forward(self, x, batch):
        gate, value = self.linear_in(self.mean_norm(x)).chunk(
            2, dim=-1
        )  # each [s, b, h/t]
        seen = torch.arange(1, len(value) + 1, device=x.device, dtype=torch.float32)[
            :, None, None
        ]
        mean = (value.float().cumsum(0) / seen).to(x.dtype)
        x = x + self.linear_out(F.silu(gate) * mean)
        return x + self.mlp(self.mlp_norm(x), batch)


def block_flops(config, seq_length, vocab_size):
    h = config.hidden_size
    return LayerFlops(6.0 * seq_length * h * (3 * h + 2 * config.ffn_size))


@language_model
def running_mean_gpt(config, ctx):
    layers = gpt_layers(config, ctx)
    return [
        replace(
            layer,
            make=partial(RunningMeanBlock, config, layer.name, ctx),
            flops=partial(block_flops, config),
        )
        if layer.is_block
        else layer
        for layer in layers
    ]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(MODELS, "_things", dict(MODELS._things))
    MODELS.register(NAME)(running_mean_gpt)


@pytest.mark.parametrize("dtype", [[], ["--bf16"]], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "ranks", [[], ["--tensor-model-parallel-size", "2"]], ids=["alone", "tp"]
)
def test_it_is_planned_to_keep_what_it_keeps_to_the_byte(dtype, ranks):
    config = parse([*JOB, *dtype, *ranks], world_size=2)
    tp = config.parallel.tensor_model_parallel_size
    mesh = fake_mesh(Grid.fit(2, tp=tp), 0, "cpu")
    modules = build_stage(describe_layers(config, mesh))
    for parameter in modules.parameters():
        nn.init.normal_(parameter, std=0.02)
    stage = Stage(
        0,
        list(modules),
        is_first=True,
        is_last=True,
        loss=loss_function(config, mesh),
    )
    batch = MODELS[NAME].data.blank(3, 23)
    with AliveBytes() as alive, WORKSPACE.apart() as workspace:
        loss = stage.forward(0, batch, None, 1.0)
        measured = alive.now() - sum(memory.nbytes for memory in workspace.values())
    assert loss.tokens == 3 * 23
    assert plan_world(config, 0, "cpu").rank_plan(0).kept_each == measured


def test_a_plan_counts_its_messages_its_flops_and_its_parameters():
    flags = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    plan = plan_world(parse([*JOB, *flags], world_size=4), device="cuda")
    rank = plan.rank_plan(0)
    h = 64
    passes = 4  # two linears and their backward, twice a block
    blocks = [layer.is_block for layer in plan.stages[0].layers]
    hidden = 23 * 3 * h * 4
    assert rank.traffic.bytes["all_reduce", "tp", 2] == plan.microbatches * hidden * (
        1 + passes * sum(blocks)
    )
    [cost] = {
        cost.forward
        for cost, layer in zip(plan.run.layer_costs, plan.run.layers)
        if layer.is_block
    }
    assert cost == 2 * 23 * h * (3 * h + 2 * 4 * h)
    assert (
        plan.parameters
        == 130 * h
        + 23 * h
        + 3 * (11 * h * h + 2 * 2 * h + (2 * h + h) + (4 * h + h))
        + 2 * h
    )


def test_dry_run_shows_it(capsys):
    assert (
        pretrain(
            [*JOB, *"--dry-run --world-size 4 --pipeline-model-parallel-size 2".split()]
        )
        == 0
    )
    assert (
        "proof: rank 0's modules were built on the meta device among 4 simulated ranks"
        in capsys.readouterr().out
    )
