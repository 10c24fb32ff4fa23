"""Dropout of the inputs of adapters: its masks, and when it acts."""

from dataclasses import replace

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.data.samples.gpt_data import GPT_DATA
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.lora.adapter_dropout import AdapterDropout, BatchUnderWay
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.mpu.fake_group import fake_mesh
from megatron_ds.mpu.grid import Grid
from tests.harness.pretraining import MOCK

pytestmark = pytest.mark.plan

S, B, H = 16, 3, 64


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


def test_adapters_of_experts_have_no_dropout():
    words = [*MOCK, "--lora-rank", "2", "--lora-dropout", "0.1", "--num-experts", "4"]
    with pytest.raises(ConfigError, match="--lora-dropout 0, or --lora-target-modules"):
        parse(words)
    parse([*words, "--lora-target-modules", "linear_qkv"])
