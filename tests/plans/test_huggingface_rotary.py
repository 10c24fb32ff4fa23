"""Rotary positions of transformers' configurations: read, they have the same frequencies; written, they are
read as the same model."""

import pytest
import torch

from megatron_ds.config.model_options import ModelConfig
from megatron_ds.conversion.huggingface_rotary import rotary_options, rotary_settings
from megatron_ds.models.attention import rotary_scalings, scaled_rotary_base
from megatron_ds.models.model_identity import model_identity

SIZES = dict(num_layers=1, hidden_size=64, num_attention_heads=2, vocab_size=9)
POSITIONS, HEAD_DIM = 4096, 32
ORIGINAL = {"original_max_position_embeddings": 512}
KINDS = {
    "default": dict(rope_type="default"), "linear": dict(rope_type="linear", factor=8.0),
    "dynamic": dict(rope_type="dynamic", factor=2.5),
    "llama3": dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=2048),
    "yarn": dict(rope_type="yarn", factor=8.0, **ORIGINAL),
    "yarn, original length as of phi3": dict(rope_type="yarn", factor=8.0),
    "yarn, factor of the lengths": dict(rope_type="yarn", factor=None, **ORIGINAL),
    "yarn, bounds": dict(rope_type="yarn", factor=8.0, beta_fast=20.0, beta_slow=2.0, truncate=False,
                         **ORIGINAL),
    "yarn, weights": dict(rope_type="yarn", factor=8.0, mscale=0.707, mscale_all_dim=1.1, **ORIGINAL),
    "yarn, one weight": dict(rope_type="yarn", factor=8.0, mscale=0.707, **ORIGINAL),
    "yarn, attention factor": dict(rope_type="yarn", factor=8.0, attention_factor=1.3, **ORIGINAL),
    "yarn, attention factor 1": dict(rope_type="yarn", factor=8.0, attention_factor=1.0, **ORIGINAL)}


def model_of(options, positions=POSITIONS) -> ModelConfig:
    return ModelConfig(**SIZES, **{"position_embedding_type": "rope", "seq_length": 8,
                                   "max_position_embeddings": positions, **options})


def frequencies(model: ModelConfig) -> tuple[torch.Tensor, float]:
    found, amplitude = scaled_rotary_base(model) ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM), 1.0
    for scaling in rotary_scalings(model):
        found, amplitude = scaling(found), amplitude * scaling.amplitude
    return found, amplitude


def theirs(parameters, positions=POSITIONS, length=None):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=2, rope_parameters=dict(parameters),
                                      max_position_embeddings=positions)
    if parameters["rope_type"] == "default":
        return parameters["rope_theta"] ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM), 1.0
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("version", [4, 5])
def test_what_is_read_rotates_as_transformers_does_and_is_written_as_it_is_read(name, version):
    settings = {"max_position_embeddings": POSITIONS, "rope_parameters": KINDS[name] | {"rope_theta": 5e5}}
    if version == 4:
        settings = {"max_position_embeddings": POSITIONS, "rope_theta": 5e5, "rope_scaling": KINDS[name]}
    model = model_of(rotary_options(settings, {}))
    found, amplitude = frequencies(model)
    expected, factor = theirs(KINDS[name] | {"rope_theta": 5e5})
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert amplitude == pytest.approx(factor, rel=1e-9)
    written = rotary_settings(model, is_partial=False)
    again = model_of(rotary_options({"max_position_embeddings": POSITIONS, **written}, {}))
    assert model_identity(again) == model_identity(model)
    expected, factor = theirs(written["rope_parameters"])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert written["rope_parameters"]["rope_type"] == KINDS[name]["rope_type"]
    assert amplitude == pytest.approx(factor, rel=1e-9)


def test_a_model_that_dynamic_ntk_lengthened_has_their_angles_of_that_length_at_all_lengths():
    read = rotary_options({"max_position_embeddings": 512, "rope_scaling": KINDS["dynamic"]}, {})
    assert model_identity(model_of(read, 512)) == model_identity(model_of({}, 512))      # not lengthened yet
    model = model_of(read)
    expected, _ = theirs(KINDS["dynamic"] | {"rope_theta": 1e4}, positions=512, length=POSITIONS)
    torch.testing.assert_close(frequencies(model)[0], expected, rtol=1e-6, atol=0)
    written = rotary_settings(model, is_partial=False)
    assert written["rope_parameters"]["rope_type"] == "default" and written["rope_theta"] > 1e5
    assert model_identity(model_of(rotary_options(written, {}))) == model_identity(model)


def test_the_factor_of_yarn_is_the_ratio_of_the_lengths_unless_it_is_given():
    yarn = dict(position_embedding_type="yarn", original_max_position_embeddings=512)
    default, same, other = (model_identity(model_of(yarn | given)) for given in (
        {}, {"yarn_rotary_scaling_factor": 8.0}, {"yarn_rotary_scaling_factor": 4.0}))
    assert default == same != other
