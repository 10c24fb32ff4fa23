"""A feature that fills the slot `attention` of some blocks, in this file alone: each token gets the mean of a
projection of those up to it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron_ds import features
from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.features import Feature
from megatron_ds.models import LayerFlops, build_stage, gpt_layers, run_layers
from megatron_ds.models.attention import SelfAttention
from megatron_ds.models.identity import model_identity
from megatron_ds.models.mixers import HeadSizes, Mixer, mixer_of
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.tensor_parallel.init import initialize
from megatron_ds.tensor_parallel.linear import ReplicatedLinear
from tests.harness.gpt_runs import make_batch
from tests.harness.plain_gpt import STYLES

CONFIG = replace(
    STYLES["gpt2"], hidden_dropout=0.0, attention_dropout=0.0, vocab_size=40
)


class RunningMean(nn.Module):
    def __init__(self, config, name, ctx, std):
        super().__init__()
        h = config.hidden_size
        self.recompute_core = False
        self.linear = ReplicatedLinear(
            h, h, ctx, name=f"{name}.linear", init_std=std, bias=False
        )

    def forward(self, x, batch):
        counts = torch.arange(1, len(x) + 1)[:, None, None]
        return self.linear(x).cumsum(0) / counts


class Means(Mixer):
    kind = "mean_"
    fields = ("moe_z_loss_coeff",)

    def make(self, config, name, ctx, *, output_std, rotary, pattern, comm_type):
        return RunningMean(config, name, ctx, output_std)

    def flops(self, config, seq_length, pattern):
        return LayerFlops(6.0 * seq_length * config.hidden_size**2)

    def head_sizes(self, config):
        return None


class Wide(Mixer):
    kind = "wide_"

    def head_sizes(self, config):
        return HeadSizes(4, 4, 64, 64)


MEANS = Means()


@pytest.fixture
def means_in_block_1(monkeypatch):
    one = Feature("means", mixer=lambda config, block: MEANS if block == 1 else None)
    monkeypatch.setattr(features._LOADED, "features", [*features.features(), one])


def test_blocks_get_the_mixers_that_a_feature_names(means_in_block_1):
    layers = [
        layer for layer in gpt_layers(CONFIG, ParallelContext()) if layer.is_block
    ]
    first, second = layers[:2]
    assert [first.kind, second.kind] == ["block", "mean_block"]
    h, s = CONFIG.hidden_size, 12
    plain, mean = (layer.flops(s, 40) for layer in (first, second))
    # Four square products of self-attention, and one of the mean, which has no scores.
    assert plain.weights - mean.weights == 6 * s * h**2 * (4 - 1)
    assert plain.scores > 0 == mean.scores
    assert type(first.make().self_attention) is SelfAttention
    assert type(second.make().self_attention) is RunningMean


def test_a_block_computes_with_its_mixer(means_in_block_1):
    model = build_stage(gpt_layers(CONFIG, ParallelContext()))
    initialize(list(model.parameters()), 3, {})
    batch = make_batch(CONFIG, s=8)
    x = run_layers(model[:2], None, batch)
    block = model[2]
    normed = block.input_layernorm(x)
    means = [block.self_attention.linear(normed)[: i + 1].mean(0) for i in range(8)]
    expected = x + torch.stack(means)
    expected = expected + block.mlp(block.pre_mlp_layernorm(expected), batch)
    torch.testing.assert_close(block(x, batch), expected)
    run_layers(model, None, batch).sum().backward()
    assert block.self_attention.linear.weight.grad.abs().sum() > 0


def test_a_checkpoint_records_the_options_of_the_mixers(means_in_block_1):
    flags = (
        "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data "
        "--vocab-size 9 --lr 1 --train-iters 1 --micro-batch-size 1"
    )
    plain = parse(flags.split()).model
    assert "moe_z_loss_coeff" not in model_identity(plain)
    assert Means.fields[0] in model_identity(replace(plain, moe_z_loss_coeff=0.1))


def test_other_mixers_take_the_place_of_attention_and_two_of_a_sort_are_refused(
    means_in_block_1, monkeypatch
):
    wide = Wide()
    everywhere = Feature("wide", mixer=lambda config, block: wide)
    loaded = [*features.features(), everywhere]
    monkeypatch.setattr(features._LOADED, "features", loaded)
    assert [mixer_of(CONFIG, block) for block in range(2)] == [wide, MEANS]
    twice = Feature("twice", mixer=lambda config, block: Wide())
    monkeypatch.setattr(features._LOADED, "features", [*loaded, twice])
    with pytest.raises(ConfigError, match="block 0 .*two \\(wide_ and wide_\\)"):
        mixer_of(CONFIG, 0)
