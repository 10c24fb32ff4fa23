"""Dropout of the inputs of adapters: its masks, and when it acts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_ds.batch.ledger import DISCARDING
from megatron_ds.config import parse
from megatron_ds.data.samples.gpt_data import GPT_DATA
from megatron_ds.extensions.lora.adapted_layers import with_adapters
from megatron_ds.extensions.lora.adapter_dropout import AdapterDropout, BatchUnderWay
from megatron_ds.extensions.lora.options import LoraConfig
from megatron_ds.models import MODELS
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.mpu.fake_group import fake_mesh
from megatron_ds.mpu.grid import Grid
from megatron_ds.ops import keep_tables
from megatron_ds.ops.keyed_random import seed_of
from tests.harness.pretraining import MOCK

pytestmark = pytest.mark.plan

S, B, H = 16, 3, 64
P = 0.25
TARGETS = "--lora-target-modules linear_fc1 linear_fc2"


def test_parts_of_the_channels_have_the_masks_of_the_whole():
    """The ranks of a row layer divide its input."""
    under_way = BatchUnderWay()
    under_way.batch = GPT_DATA.blank(B, S, "cpu")
    x = torch.ones(S, B, H)
    whole = AdapterDropout(0.25, "here", None, ParallelContext(), under_way)(x)
    halves = []
    for rank in range(2):
        ctx = ParallelContext(fake_mesh(Grid(tp=2), rank, "cpu"))
        drop = AdapterDropout(0.25, "here", H, ctx, under_way)
        halves.append(drop(x[..., : H // 2]))
    assert torch.equal(torch.cat(halves, -1), whole)
    assert 0.2 < (whole == 0).float().mean() < 0.3


@pytest.mark.parametrize("training", [True, False])
def test_elements_are_dropped_in_training_alone(training):
    under_way = BatchUnderWay()
    under_way.batch = replace(GPT_DATA.blank(B, S, "cpu"), training=training)
    drop = AdapterDropout(0.25, "here", None, ParallelContext(), under_way)
    x = torch.ones(S, B, H)
    y = drop(x)
    assert (y is x) != training
    assert bool((y == 0).any()) == training


@pytest.mark.parametrize("dora", [(), ("--use-dora",)])
def test_experts_drop_by_token_expert_and_channel(dora):
    """The sum of the experts of each token, written out with masks of NumPy's generator."""
    words = f"--lora-rank 2 --lora-alpha 6 --lora-dropout {P} --num-experts 4 --moe-router-topk 2"
    config = parse([*MOCK, *words.split(), *TARGETS.split(), *dora])
    ctx = ParallelContext(seed=7)
    layer = with_adapters(
        MODELS["gpt"](config.model, ctx), config.of(LoraConfig), config.model, ctx
    )[1]
    moe = layer.make().mlp
    draw = torch.Generator().manual_seed(1)
    for parameter in moe.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw) / 4
    batch = replace(GPT_DATA.blank(B, S, "cpu"), sample_ids=(5, 3, 11))
    batch = batch.with_ledger(DISCARDING)
    x = torch.randn(S, B, config.model.hidden_size, generator=draw)
    routing = moe.router(x, batch, None)
    expected = torch.zeros_like(x).flatten(0, 1)
    for token, (experts, weights) in enumerate(zip(routing.experts, routing.weights)):
        position, sample = divmod(token, B)
        for expert, weight in zip(experts.tolist(), weights):
            y = x[position, sample]
            for name in ("linear_fc1", "linear_fc2"):
                key = seed_of_row(name, batch.sample_ids[sample], position, expert)
                y = of_expert(getattr(moe.experts, name), expert, y, key)
                if name == "linear_fc1":
                    y = moe.experts.activation(y[None])[0]
            expected[token] += weight * y
    torch.testing.assert_close(
        moe(x, batch).flatten(0, 1), expected, rtol=1e-4, atol=1e-5
    )
    assert moe.token_keys(replace(batch, training=False)) is None


def seed_of_row(name, sample, position, expert):
    """SplitMix64 of the token and of the expert."""
    site = f"decoder.layers.0.mlp.experts.{name}.weight.lora"
    numbers = []
    for key, steps in (
        ((7, "tokens of experts", sample), position),
        ((7, site), expert),
    ):
        z = seed_of(*key) + (steps + 1) * 0x9E3779B97F4A7C15
        z = ((z ^ z % 2**64 >> 30) % 2**64) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        numbers.append(z ^ z >> 31)
    return numbers[0] ^ numbers[1]


def of_expert(linear, expert, x, seed):
    """One row through W + B A of an expert, B A with dropout."""
    words = np.random.Philox(key=seed).random_raw(-(-len(x) // 4))
    kept = (
        torch.from_numpy(words.view(np.uint16)[: len(x)].astype(np.int64))
        < (1 - P) * 2**16
    )
    weight, bias = linear.weight[expert], getattr(linear, "own_bias", None)
    down, up = linear.down.weight[expert], linear.up.weight[expert]
    y = weight @ x + 3 * up @ (down @ (x * kept / (1 - P)))
    if hasattr(linear, "change"):
        norm = weight.norm(dim=1) + linear.change[expert]
        y = y * norm / (weight + 3 * up @ down).norm(dim=1)
        return y if bias is None else y + bias[expert]
    bias = linear.base.bias
    return y if bias is None else y + bias[expert]


@pytest.mark.parametrize("columns", [range(40), range(7, 31), range(32, 40)])
def test_columns_of_rows_are_those_of_whole_rows(columns, monkeypatch):
    monkeypatch.setattr(keep_tables, "COUNTERS_AT_ONCE", 7)
    keys = torch.arange(5) * 12345678912345678
    whole = keep_tables.keep_rows(0.3, keys, range(48))
    part = keep_tables.keep_rows(0.3, keys, columns)
    assert torch.equal(part, whole[:, columns.start : columns.stop])
    assert 0.15 < (~whole).float().mean() < 0.45
