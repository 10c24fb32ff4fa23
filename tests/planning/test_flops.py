"""FLOPs of a model by Megatron's formula: its published values, to the last digit, and a count by hand."""

from dataclasses import replace

import pytest
import torch

from megatron_ds.config.options.model import ModelConfig
from megatron_ds.planning.flops import layers_of, model_flops, peak_flops, utilization

pytestmark = pytest.mark.plan

GPT3 = ModelConfig(
    num_layers=96, hidden_size=12288, num_attention_heads=96, seq_length=2048
)
GPT2_MEDIUM = ModelConfig(
    num_layers=24, hidden_size=1024, num_attention_heads=16, seq_length=1024
)
LLAMA3_8B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    seq_length=8192,
    ffn_hidden_size=14336,
    activation="swiglu",
)


def layer_flops(model, kind, seq_length, vocab_size):
    return (
        next(layer for layer in layers_of(model) if layer.kind == kind)
        .flops(seq_length, vocab_size)
        .total
    )


@pytest.mark.parametrize(
    "model, samples, vocab, flops",
    [
        (GPT3, 1536, 51200, 3.3405978001601987e18),
        (GPT2_MEDIUM, 8, 50304, 18612240777216),
        (LLAMA3_8B, 128, 128256, 5.397062776101274e16),
    ],
    ids=["GPT-3 175B", "GPT-2 345M", "Llama-3 8B"],
)
def test_flops_of_known_models_are_megatrons(model, samples, vocab, flops):
    assert model_flops(
        layers_of(model), samples, model.seq_length, vocab
    ) == pytest.approx(flops, rel=1e-12)


def test_a_block_is_its_matrix_products_counted_by_hand():
    model = ModelConfig(
        num_layers=1,
        hidden_size=12,
        num_attention_heads=3,
        num_query_groups=1,
        seq_length=7,
        ffn_hidden_size=20,
        activation="gelu",
    )
    products = {
        "qkv": (7, 12, (3 + 2) * 4),
        "proj": (7, 12, 12),
        "fc1": (7, 12, 20),
        "fc2": (7, 20, 12),
    }
    forward = sum(
        2 * rows * inner * columns for rows, inner, columns in products.values()
    )
    scores = (
        2 * (2 * 3 * 7 * 7 * 4) / 2
    )  # q kᵀ and p v of 3 heads of 4 channels, the causal half
    assert layer_flops(model, "block", 7, 99) == 3 * (forward + scores)
    assert layer_flops(model, "head", 7, 99) == 3 * 2 * 7 * 12 * 99
    assert (
        layer_flops(model, "embedding", 7, 99) == layer_flops(model, "norm", 7, 99) == 0
    )


def test_recomputation_does_not_count_and_samples_count_linearly():
    assert model_flops(layers_of(GPT2_MEDIUM), 6, 1024, 50304) == 6 * model_flops(
        layers_of(GPT2_MEDIUM), 1, 1024, 50304
    )


def dropping_blocks():
    """Return the layers, of which all blocks but the first and the last drop tokens."""
    names = {f"decoder.layers.{number}" for number in range(1, 23)}
    return [
        replace(layer, drops_tokens=layer.name in names)
        for layer in layers_of(GPT2_MEDIUM)
    ]


def test_of_blocks_that_drop_tokens_the_kept_ones_count():
    dropping = model_flops(dropping_blocks(), 3, 1024, 50304, 256)
    blocks = 2 * layer_flops(GPT2_MEDIUM, "block", 1024, 0) + 22 * layer_flops(
        GPT2_MEDIUM, "block", 256, 0
    )
    assert dropping == pytest.approx(
        3 * (blocks + layer_flops(GPT2_MEDIUM, "head", 1024, 50304)), rel=1e-12
    )
    assert model_flops(dropping_blocks(), 3, 1024, 50304, 1024) == pytest.approx(
        model_flops(layers_of(GPT2_MEDIUM), 3, 1024, 50304)
    )


@pytest.mark.parametrize(
    "name, dtype, peak",
    [
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5e12),
        ("NVIDIA H200 NVL", torch.bfloat16, 835e12),
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA B300 SXM6 AC", torch.bfloat16, 2250e12),
        ("NVIDIA GB300", torch.bfloat16, 2500e12),
        ("NVIDIA B200", torch.bfloat16, 2250e12),
    ],
)
def test_the_longest_name_on_the_data_sheet_wins(monkeypatch, name, dtype, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0), dtype) == peak


def test_where_no_data_sheet_gives_the_peak_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some New GPU")
    assert peak_flops(torch.device("cuda", 0), torch.bfloat16) is None
    assert peak_flops(torch.device("cpu"), torch.float32) is None


@pytest.mark.parametrize(
    "flops, peak, mfu",
    [(2e12, 8e12, 0.25), (8e12, 8e12, 1.0), (8.1e12, 8e12, None), (2e12, None, None)],
)
def test_utilization_never_exceeds_100_percent(flops, peak, mfu):
    assert utilization(flops, peak) == mfu
