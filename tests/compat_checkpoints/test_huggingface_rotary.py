"""Rotary positions of transformers' configurations: read, they have the same frequencies; written, they are
read as the same model."""

import copy
from itertools import product

import pytest
import torch

from megatron_ds.compat.conversion.huggingface.rotary import (
    rotary_options,
    rotary_settings,
)
from megatron_ds.compat.conversion.huggingface.settings import DEFAULTS
from megatron_ds.config.options.model import ModelConfig
from megatron_ds.errors import CheckpointError
from megatron_ds.models.attention import rotary_scalings, scaled_rotary_base
from megatron_ds.models.identity import model_identity

pytestmark = pytest.mark.plan

SIZES = dict(num_layers=1, hidden_size=64, num_attention_heads=2, vocab_size=9)
POSITIONS, HEAD_DIM = 4096, 32
ORIGINAL = {"original_max_position_embeddings": 512}
KINDS = {
    "default": dict(rope_type="default"),
    "linear": dict(rope_type="linear", factor=8.0),
    "dynamic": dict(rope_type="dynamic", factor=2.5),
    "llama3": dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=2048,
    ),
    "yarn": dict(rope_type="yarn", factor=8.0, **ORIGINAL),
    "yarn, original length as of phi3": dict(rope_type="yarn", factor=8.0),
    "yarn, factor of the lengths": dict(rope_type="yarn", factor=None, **ORIGINAL),
    "yarn, bounds": dict(
        rope_type="yarn",
        factor=8.0,
        beta_fast=20.0,
        beta_slow=2.0,
        truncate=False,
        **ORIGINAL,
    ),
    "yarn, weights": dict(
        rope_type="yarn", factor=8.0, mscale=0.707, mscale_all_dim=1.1, **ORIGINAL
    ),
    "yarn, one weight": dict(rope_type="yarn", factor=8.0, mscale=0.707, **ORIGINAL),
    "yarn, attention factor": dict(
        rope_type="yarn", factor=8.0, attention_factor=1.3, **ORIGINAL
    ),
    "yarn, attention factor 1": dict(
        rope_type="yarn", factor=8.0, attention_factor=1.0, **ORIGINAL
    ),
}


def model_of(options, positions=POSITIONS) -> ModelConfig:
    return ModelConfig(
        **SIZES,
        **{
            "position_embedding_type": "rope",
            "seq_length": 8,
            "max_position_embeddings": positions,
            **options,
        },
    )


def frequencies(model: ModelConfig) -> tuple[torch.Tensor, float]:
    channels = int(HEAD_DIM * model.rotary_percent)
    found, amplitude = (
        scaled_rotary_base(model) ** -(torch.arange(0, channels, 2) / channels),
        1.0,
    )
    for scaling in rotary_scalings(model):
        found, amplitude = scaling(found), amplitude * scaling.amplitude
    return found, amplitude


def theirs(parameters, positions=POSITIONS, length=None):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed"
    )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        rope_parameters=dict(parameters),
        max_position_embeddings=positions,
    )
    if parameters["rope_type"] == "default":
        return parameters["rope_theta"] ** -(
            torch.arange(0, HEAD_DIM, 2) / HEAD_DIM
        ), 1.0
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("version", [4, 5])
def test_what_is_read_rotates_as_transformers_does_and_is_written_as_it_is_read(
    name, version
):
    settings = {
        "max_position_embeddings": POSITIONS,
        "rope_parameters": KINDS[name] | {"rope_theta": 5e5},
    }
    if version == 4:
        settings = {
            "max_position_embeddings": POSITIONS,
            "rope_theta": 5e5,
            "rope_scaling": KINDS[name],
        }
    model = model_of(rotary_options(settings, {}))
    found, amplitude = frequencies(model)
    expected, factor = theirs(KINDS[name] | {"rope_theta": 5e5})
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert amplitude == pytest.approx(factor, rel=1e-9)
    written = rotary_settings(model, is_partial=False)
    again = model_of(
        rotary_options({"max_position_embeddings": POSITIONS, **written}, {})
    )
    assert model_identity(again) == model_identity(model)
    expected, factor = theirs(written["rope_parameters"])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert written["rope_parameters"]["rope_type"] == KINDS[name]["rope_type"]
    assert amplitude == pytest.approx(factor, rel=1e-9)


def test_a_model_that_dynamic_ntk_lengthened_has_their_angles_of_that_length_at_all_lengths():
    read = rotary_options(
        {"max_position_embeddings": 512, "rope_scaling": KINDS["dynamic"]}, {}
    )
    assert model_identity(model_of(read, 512)) == model_identity(
        model_of({}, 512)
    )  # not lengthened yet
    model = model_of(read)
    expected, _ = theirs(
        KINDS["dynamic"] | {"rope_theta": 1e4}, positions=512, length=POSITIONS
    )
    torch.testing.assert_close(frequencies(model)[0], expected, rtol=1e-6, atol=0)
    written = rotary_settings(model, is_partial=False)
    assert (
        written["rope_parameters"]["rope_type"] == "default"
        and written["rope_theta"] > 1e5
    )
    assert model_identity(model_of(rotary_options(written, {}))) == model_identity(
        model
    )


def test_the_factor_of_yarn_is_the_ratio_of_the_lengths_unless_it_is_given():
    yarn = dict(position_embedding_type="yarn", original_max_position_embeddings=512)
    default, same, other = (
        model_identity(model_of(yarn | given))
        for given in (
            {},
            {"yarn_rotary_scaling_factor": 8.0},
            {"yarn_rotary_scaling_factor": 4.0},
        )
    )
    assert default == same != other


# Tables that may stand in rope_scaling and rope_parameters, and values that may stand beside them.
TABLES = (
    "absent",
    None,
    {},
    {"rope_type": "default", "rope_theta": 5e4},
    {"type": "linear", "factor": 4.0},
    {"type": "yarn", "factor": 8.0, **ORIGINAL},
    {"rope_type": "yarn", "factor": None, "rope_theta": 2e4},
    {"rope_type": "yarn", "rope_theta": 2e4},
    {"rope_type": "dynamic", "factor": 2.5, "type": "linear"},
    KINDS["llama3"] | {"rope_theta": 5e5},
    {"type": "yarn", "factor": 8.0, "partial_rotary_factor": 0.5},
    {"rope_type": "llama3", "factor": 8.0},
    {"rope_type": "longrope", "factor": 2.0},
)
BESIDE = (
    {},
    {"rope_theta": 3e4},
    {"rotary_emb_base": 7e4, "rotary_pct": 0.5},
    {"partial_rotary_factor": 0.5},
    {"original_max_position_embeddings": 1024, "rope_theta": 3e4},
    {"rope_theta": None},
)


def settings_of(tables, beside):
    named = zip(("rope_scaling", "rope_parameters"), tables)
    return {
        "max_position_embeddings": POSITIONS,
        **beside,
        **{name: copy.deepcopy(table) for name, table in named if table != "absent"},
    }


def rotary_of_transformers(model_type, settings):
    """(frequencies, amplitude) of the module that the models of a type rotate with; None if it fails."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed"
    )
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind = GPTNeoXRotaryEmbedding if model_type == "gpt_neox" else LlamaRotaryEmbedding
    try:
        config = transformers.AutoConfig.for_model(
            model_type,
            hidden_size=64,
            num_attention_heads=2,
            head_dim=HEAD_DIM,
            **settings,
        )
        rotary = kind(config)
    except (KeyError, TypeError, ValueError):
        return None
    return rotary.inv_freq, rotary.attention_scaling


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "qwen2", "gpt_neox"])
def test_every_pair_of_tables_is_read_in_the_order_of_transformers_or_refused(
    model_type,
):
    defaults = DEFAULTS.get(model_type, {})
    refused = 0
    compared = 0
    for tables, beside in product(product(TABLES, TABLES), BESIDE):
        settings = settings_of(tables, beside)
        expected = rotary_of_transformers(model_type, copy.deepcopy(settings))
        try:
            model = model_of(
                rotary_options({**settings, "model_type": model_type}, defaults)
            )
        except CheckpointError:
            shares = [
                settings.get("partial_rotary_factor"),
                *(
                    (settings.get(name) or {}).get("partial_rotary_factor")
                    for name in ("rope_scaling", "rope_parameters")
                ),
            ]
            assert expected is None or model_type != "gpt_neox" and any(shares), (
                settings,
                "is refused",
            )
            refused += 1
            continue
        assert expected is not None, (settings, "transformers refuses it")
        found, amplitude = frequencies(model)
        torch.testing.assert_close(
            found, expected[0], rtol=2e-6, atol=0, msg=str(settings)
        )
        assert amplitude == pytest.approx(expected[1], rel=1e-9)
        compared += 1
    assert compared > 300 and refused > 100
