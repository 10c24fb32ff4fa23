"""Weights in 8 bits with a scale for each block are read as the product of both, in every family."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ds.compat.conversion.formats import Wishes
from megatron_ds.compat.conversion.huggingface.block_scales import (
    ScaledBlocks,
    multiplied,
)
from megatron_ds.compat.conversion.huggingface.format import (
    FORMAT as HUGGING_FACE,
)
from megatron_ds.compat.conversion.own_format import FORMAT as OURS
from megatron_ds.errors import CheckpointError
from tests.harness.huggingface_models import saved

pytestmark = pytest.mark.processes

pytest.importorskip("transformers", reason="transformers is not installed")
BLOCK = (20, 12)  # no divisors of the sizes of the models
QUANTIZED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}
SUFFIX = "_scale_inv"
HIGHEST = 448.0  # of the codes


def by_elements(codes, scale, block):
    """The product, one element after the other."""
    numbers = torch.empty(codes.shape)
    for i, row in enumerate(codes.float()):
        for j, code in enumerate(row):
            numbers[i, j] = code * scale[i // block[0], j // block[1]]
    return numbers


def in_blocks(weight, block):
    """(codes, scales) of a matrix."""
    rows, columns = (-(-n // size) for n, size in zip(weight.shape, block))
    scale = torch.empty(rows, columns)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            part = (
                slice(i * block[0], (i + 1) * block[0]),
                slice(j * block[1], (j + 1) * block[1]),
            )
            scale[i, j] = weight[part].abs().max() / HIGHEST
            codes[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
    return codes, scale


def quantized(folder, change=lambda tensors: tensors, **table):
    """Rewrite the linear layers of a folder. Returns the tensors, with the products in place of codes."""
    path = folder / "model.safetensors"
    stored, numbers = {}, {}
    for name, tensor in load_file(path).items():
        is_linear = "_proj" in name and name.endswith("weight")
        if not is_linear:
            stored[name] = numbers[name] = tensor
            continue
        codes, scale = in_blocks(tensor.float(), BLOCK)
        stored |= {name: codes, name + SUFFIX: scale}
        numbers[name] = by_elements(codes, scale, BLOCK)
    save_file(change(stored), path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = QUANTIZED | table
    (folder / "config.json").write_text(json.dumps(config))
    return numbers


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(256, 128), (7, 300), (130, 1), (128, 129)])
def test_products_are_those_of_each_element(shape):
    draw = torch.Generator().manual_seed(1)
    codes = torch.randn(shape, generator=draw).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=draw)
    found = multiplied(codes, scale, ScaledBlocks(128, 128))
    assert found.dtype == torch.float32
    assert torch.equal(found, by_elements(codes, scale, (128, 128)))


@pytest.mark.parametrize(
    "name", ["llama", "qwen3, tied", "glm4_moe", "phi3, window", "deepseek_v3"]
)
def test_a_quantized_folder_is_the_folder_of_its_products(name, tmp_path):
    folder = saved(name, tmp_path / "theirs", torch.bfloat16)
    numbers = quantized(folder)
    read = HUGGING_FACE.read(folder, Wishes())
    # There and back in fp32: all values; in the dtype of the settings: each rounded once.
    OURS.write(read, tmp_path / "ours", Wishes())
    ours = OURS.read(tmp_path / "ours", Wishes())
    for dtype in ("float32", None):
        back = tmp_path / f"back-{dtype}"
        HUGGING_FACE.write(ours, back, Wishes(dtype=dtype))
        found = load_file(back / "model.safetensors")
        assert found.keys() == numbers.keys()
        for key, tensor in found.items():
            assert tensor.dtype != torch.float8_e4m3fn
            assert torch.equal(tensor, numbers[key].to(tensor.dtype)), key
        config = json.loads((back / "config.json").read_text())
        assert "quantization_config" not in config
        assert config["dtype"] == (dtype or "bfloat16")
    assert found["model.norm.weight"].dtype == torch.bfloat16


Q = "model.layers.0.self_attn.q_proj.weight"


def without_scale(tensors):
    del tensors[Q + SUFFIX]
    return tensors


def without_weight(tensors):
    del tensors[Q]
    return tensors


def with_scale_of(shape, dtype=torch.float32):
    return lambda tensors: {**tensors, Q + SUFFIX: torch.ones(shape, dtype=dtype)}


def with_wide_weight(tensors):
    return {**tensors, Q: tensors[Q].float()}


@pytest.mark.parametrize(
    "change, words",
    [
        (without_scale, rf"{Q} has no {Q}{SUFFIX}"),
        (without_weight, rf"{Q}{SUFFIX} has no weight"),
        (with_scale_of((1, 3)), r"has shape \[1, 3\] and \[2, 3\] is needed"),
        (with_scale_of((2, 3), torch.int32), "is in torch.int32, not in float32"),
        (with_wide_weight, "is in torch.float32, and has a scale"),
    ],
)
def test_codes_and_scales_that_do_not_fit_are_named(change, words, tmp_path):
    folder = saved("llama", tmp_path / "theirs")
    quantized(folder, change)
    with pytest.raises(CheckpointError, match=words):
        HUGGING_FACE.read(folder, Wishes())


@pytest.mark.parametrize(
    "table",
    [
        {"weight_block_size": None},
        {"weight_block_size": [128]},
        {"weight_block_size": [0, 128]},
        {"weight_block_size": [1 << 40, 128]},
        {"quant_method": "gptq"},
    ],
)
def test_another_quantization_is_refused(table, tmp_path):
    folder = saved("llama", tmp_path / "theirs")
    quantized(folder, **table)
    with pytest.raises(CheckpointError, match="quantized in a way that is not read"):
        HUGGING_FACE.read(folder, Wishes())


def test_a_run_from_such_a_folder_has_the_dtype_of_its_settings(tmp_path):
    from megatron_ds.compat.conversion.foreign_start import dtype_options

    folder = saved("llama", tmp_path / "theirs", torch.bfloat16)
    quantized(folder)
    assert dtype_options(HUGGING_FACE.read(folder, Wishes())) == {"bf16": True}
