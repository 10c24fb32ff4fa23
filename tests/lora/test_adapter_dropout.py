"""Dropout of the inputs of adapters: its masks, and when it acts."""

from dataclasses import replace

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.data.samples.gpt_data import GPT_DATA
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.lora.adapter_dropout import AdapterDropout, BatchUnderWay
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.ops.dropout import dropout, dropout_of_columns
from tests.harness.pretraining import MOCK

pytestmark = pytest.mark.plan

S, B, H = 16, 3, 64
KEY = {"p": 0.25, "seed": 5, "site": "here", "sample_ids": (4, 9, 2)}


def test_parts_of_the_channels_have_the_masks_of_the_whole():
    x = torch.ones(S, B, H)
    whole = dropout(x, rows=range(S), **KEY)
    halves = [
        dropout_of_columns(half, (i, 2), rows=range(S), **KEY)
        for i, half in enumerate(x.chunk(2, -1))
    ]
    assert torch.equal(torch.cat(halves, -1), whole)
    dropped = (whole == 0).float().mean()
    assert 0.2 < dropped < 0.3


@pytest.mark.parametrize("training", [True, False])
def test_elements_are_dropped_in_training_alone(training):
    under_way = BatchUnderWay()
    under_way.batch = replace(GPT_DATA.blank(B, S, "cpu"), training=training)
    drop = AdapterDropout(0.25, "here", False, ParallelContext(), under_way)
    x = torch.ones(S, B, H)
    y = drop(x)
    assert (y is x) != training
    assert bool((y == 0).any()) == training


def test_adapters_of_experts_have_no_dropout():
    words = [*MOCK, "--lora-rank", "2", "--lora-dropout", "0.1", "--num-experts", "4"]
    with pytest.raises(ConfigError, match="--lora-dropout 0, or --lora-target-modules"):
        parse(words)
    parse([*words, "--lora-target-modules", "linear_qkv"])
