"""Each setting of config.json, changed and removed: outputs stay those of transformers, or the folder is
refused, or the setting is listed."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_ds.compat.conversion.family import model_of
from megatron_ds.compat.conversion.formats import Wishes
from megatron_ds.compat.conversion.huggingface.format import (
    FORMAT as HUGGING_FACE,
)
from megatron_ds.compat.conversion.logits_proof import (
    largest_difference,
    our_outputs,
    random_tokens,
    their_outputs,
)
from megatron_ds.errors import CheckpointError
from tests.harness.huggingface_models import saved
from tests.harness.layout_comparison import DOCUMENT_ENDS, random_samples
from tests.harness.next_step import next_step

pytestmark = pytest.mark.processes

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed"
)
NAMES = (
    "gpt2",
    "llama",
    "mistral, window",
    "qwen2, a layer with a window",
    "qwen3, tied",
    "gpt_neox",
    "opt",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "megatron-bert",
    "gpt_oss",
    "falcon 40b",
    "mpt",
    "gemma 2",
    "gemma 3",
    "glm4",
    "ernie4_5",
    "seed_oss",
    "helium",
    "arcee",
    "nemotron",
    "ministral, a layer with a window",
    "glm4_moe",
    "dots1",
    "granite",
    "smollm3",
    "cohere",
    "cohere2",
    "stablelm",
    "starcoder2, window",
    "gpt_bigcode",
    "biogpt",
)
# Settings that change training and no output → what our model has for the value.
OF_TRAINING = {
    "attention_dropout": "attention_dropout",
    "attn_pdrop": "attention_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "hidden_dropout": "hidden_dropout",
    "hidden_dropout_prob": "hidden_dropout",
    "dropout": "hidden_dropout",
    "residual_dropout": "hidden_dropout",
    "resid_pdrop": "hidden_dropout",
    "initializer_range": "init_method_std",
    "init_std": "init_method_std",
}
# Settings that a class of transformers declares and its model never reads: MPT drops out by attn_config alone.
NEVER_READ = {("mpt", "resid_pdrop")}
LISTED = ("layerdrop", "router_jitter_noise", "router_aux_loss_coef", "pad_token_id")
CHANGES = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    float: lambda value: value + 0.125,
}
WORDS = {"hidden_act": "relu", "activation_function": "silu", "dtype": "bfloat16"}
OTHER_LISTS = {
    "layer_types": ["full_attention", "sliding_attention"],
    "mlp_only_layers": [1],
}


def settings_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def fields_of(model_type: str) -> dict:
    """Name → default of the settings that the class of a family declares, those of all families left out."""
    everywhere = {
        field.name for field in dataclasses.fields(transformers.PreTrainedConfig)
    }
    kind = type(transformers.AutoConfig.for_model(model_type))
    return {
        field.name: field.default
        for field in dataclasses.fields(kind)
        if field.name not in everywhere
    }


def changed(name: str, value: object) -> object:
    if name in OTHER_LISTS:
        return OTHER_LISTS[name]
    if name in WORDS:
        return WORDS[name]
    if value is None:
        return {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0},
            "head_dim": 4,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 3.0,
            "summary_activation": "tanh",
        }.get(name, 3)
    if isinstance(value, str):
        return f"{value}_2"
    if isinstance(value, dict):
        return value | {"rope_theta": 123.0}
    return CHANGES.get(type(value), lambda value: [value])(value)


def outcome(folder: Path, expected: list | None = None):
    """(our checkpoint, "same" or "differs" from `expected` or transformers' outputs), or the refusal."""
    try:
        ours = HUGGING_FACE.read(folder, Wishes())
        tokens = random_tokens(model_of(ours.model, "the test"))
        found = our_outputs(ours, tokens)
    except CheckpointError as error:
        return None, str(error)
    theirs = expected or their_outputs(folder, tokens)
    difference, largest = largest_difference(found, theirs)
    return ours, "same" if difference <= 1e-5 * max(
        1.0, largest
    ) else f"differs by {difference}"


@pytest.mark.parametrize("name", NAMES)
def test_each_setting_is_followed_or_refused_or_listed(name, tmp_path):
    folder = saved(name, tmp_path)
    config = settings_of(folder)
    before, _ = outcome(folder)
    followed, wrong = [], []
    for key, default in fields_of(config["model_type"]).items():
        value = changed(key, config.get(key, default))
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        ours, result = outcome(folder)
        if ours is None:
            continue
        followed.append(key)
        is_training = key in OF_TRAINING and (name, key) not in NEVER_READ
        is_told = any(key in note for note in ours.notes)
        if result != "same":
            wrong.append((key, value, result))
        elif is_training and ours.model.get(OF_TRAINING[key]) == before.model.get(
            OF_TRAINING[key]
        ):
            wrong.append((key, value, "is not followed"))
        elif (
            key in LISTED
            and not is_told
            or any("not known" in note and key in note for note in ours.notes)
        ):
            wrong.append((key, value, f"is listed: {is_told}"))
    assert not wrong and len(followed) > 6


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_that_is_absent_has_the_value_of_transformers(name, tmp_path):
    folder = saved(name, tmp_path)
    config, wrong = settings_of(folder), []
    names = fields_of(config["model_type"]).keys() & config.keys()
    # transformers has no rows for a family's usual padding in so small a vocabulary.
    for key in names - {"pad_token_id"}:
        (folder / "config.json").write_text(
            json.dumps({k: v for k, v in config.items() if k != key})
        )
        ours, result = outcome(folder)
        if ours is not None and result != "same":
            wrong.append((key, result))
    assert not wrong


def test_unknown_settings_are_listed_and_layers_of_other_sizes_are_refused(tmp_path):
    folder = saved("llama", tmp_path)
    config = settings_of(folder)
    known = {
        "bos_token_id": 1,
        "temperature": 0.7,
        "_name_or_path": "x",
        "final_logit_softcapping": None,
    }
    note = "not known for this model_type, and not used: embedding_multiplier 12, logit_scale 0.5"
    unknown = {"embedding_multiplier": 12, "logit_scale": 0.5, **known}
    for added, told in ((known, ()), (unknown, (note,))):
        (folder / "config.json").write_text(json.dumps(config | added))
        assert HUGGING_FACE.read(folder, Wishes()).notes == told
    scaled = {
        "rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 7},
        "rope_theta": 1e4,
    }
    (folder / "config.json").write_text(json.dumps(config | scaled))
    (note,) = HUGGING_FACE.read(folder, Wishes()).notes
    assert (
        "alpha of rope_scaling is not known: 7; rope_parameters" in note
        and "5 prefers" in note
    )
    (folder / "config.json").write_text(
        json.dumps(config | {"per_layer_config": {"0": {"head_dim": 4}}})
    )
    with pytest.raises(
        CheckpointError, match="per_layer_config is .* layers of other sizes"
    ):
        HUGGING_FACE.read(folder, Wishes())


def test_embeddings_with_a_dropout_of_their_own_are_listed(tmp_path):
    """The folder of phi-2 has such settings."""
    folder = saved("phi", tmp_path)
    config = settings_of(folder) | {"resid_pdrop": 0.1, "embd_pdrop": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    found = HUGGING_FACE.read(folder, Wishes())
    assert found.model["hidden_dropout"] == 0.1
    (note,) = found.notes
    assert "embd_pdrop 0.0 is not followed" in note and "resid_pdrop 0.1" in note


@pytest.mark.parametrize("name", ["gpt_oss", "mpt", "falcon 7b", "gptj", "gemma 3"])
def test_settings_that_a_family_always_has_are_not_unknown(name, tmp_path):
    notes = HUGGING_FACE.read(saved(name, tmp_path), Wishes()).notes
    assert not [note for note in notes if "not known" in note]


def balanced(folder: Path, layers: int, **router) -> Path:
    """A Mixtral with router settings and uneven loads."""
    torch.manual_seed(5)
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=32,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=99,
            max_position_embeddings=24,
            intermediate_size=48,
            num_local_experts=4,
            sliding_window=None,
            **router,
        )
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(20.0 if name.endswith("gate.weight") else 1.0)
    model.save_pretrained(folder)
    return folder


def gradient_norm_of_transformers(folder: Path, tokens: torch.Tensor) -> float:
    """The norm of the mean gradient of the objective of transformers over two micro-batches of 2 samples."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    for part in tokens.split(2):
        inputs, targets = part[:, :-1].contiguous(), part[:, 1:].contiguous()
        (model(inputs, labels=inputs, shift_labels=targets).loss / 2).backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))


@pytest.mark.parametrize("layers, is_on", [(1, True), (3, True), (3, False)])
def test_the_objective_of_a_folder_with_experts_is_that_of_transformers(
    layers, is_on, tmp_path
):
    folder = balanced(
        tmp_path, layers, output_router_logits=is_on, router_aux_loss_coef=0.3
    )
    found = HUGGING_FACE.read(folder, Wishes())
    tokens = random_samples(4, 16, 98, seed=3)
    tokens += (tokens % DOCUMENT_ENDS == 0).long()
    expected = gradient_norm_of_transformers(folder, tokens)

    def error(**options) -> float:
        model = found.model | options
        trace, _ = next_step(
            replace(found, model=model),
            tokens,
            "dp=1",
            seq_length=16,
            hidden_dropout=0.0,
            lr=0.01,
            clip_grad=0.0,
        )
        return abs(trace.grad_norms[0] / expected - 1)

    if is_on:
        assert found.model["moe_aux_loss_coeff"] == (pytest.approx(0.3 * 2 / layers),)
        unscaled = error(moe_aux_loss_coeff=(0.3,))
        assert unscaled > 0.05  # the term is not small
    else:
        assert "moe_aux_loss_coeff" not in found.model
    # Loads of layers differ here, so that the sum of our terms is another than theirs of all layers.
    assert error() < (0.7 * unscaled if is_on and layers > 1 else 1e-5)
    (note,) = (note for note in found.notes if "router_aux_loss_coef" in note)
    assert ("0.2 = 0.3 × 2 / 3" in note) == (is_on and layers == 3) and (
        "is 0 unless" in note
    ) == (not is_on)


LONG = {
    "llama": dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=256,
    ),
    "mistral, window": dict(rope_type="linear", factor=4.0),
    "qwen2": dict(rope_type="yarn", factor=8.0),
    "gpt_neox": dict(rope_type="yarn", factor=8.0, beta_fast=16.0),
    "qwen3_moe": dict(rope_type="dynamic", factor=4.0),
}


@pytest.mark.parametrize("name", LONG)
def test_outputs_of_late_positions_are_those_of_transformers(name, tmp_path):
    folder = saved(name, tmp_path)
    config = settings_of(folder)  # with rope_parameters, which rope_scaling replaces
    scaled = {"rope_scaling": LONG[name], "max_position_embeddings": 2048}
    if LONG[name]["rope_type"] == "yarn":
        scaled["original_max_position_embeddings"] = 256
    (folder / "config.json").write_text(json.dumps(config | scaled))
    tokens = torch.randint(
        0, config["vocab_size"], (1, 2000), generator=torch.Generator().manual_seed(1)
    )
    ours, theirs = (
        our_outputs(HUGGING_FACE.read(folder, Wishes()), tokens),
        their_outputs(folder, tokens),
    )
    late, largest = largest_difference([ours[0][:, 1500:]], [theirs[0][:, 1500:]])
    early, _ = largest_difference([ours[0][:, :500]], [theirs[0][:, :500]])
    assert max(early, late) < 3e-5 * largest, (early, late, largest)


def test_gpt_oss_with_a_window_that_hides_no_token_runs_in_transformers(tmp_path):
    config = transformers.GptOssConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=99,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=128,
        max_position_embeddings=32,
        rope_parameters=dict(
            rope_type="yarn",
            factor=4.0,
            truncate=False,
            original_max_position_embeddings=8,
            rope_theta=1e4,
        ),
    )
    torch.manual_seed(3)
    theirs = transformers.GptOssForCausalLM(config)
    theirs.save_pretrained(tmp_path / "in")
    found = HUGGING_FACE.read(tmp_path / "in", Wishes())
    HUGGING_FACE.write(found, tmp_path / "out", Wishes())
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.tensor([[5, 9, 31, 77, 14, 3]])
    with torch.no_grad():
        assert torch.equal(back(tokens).logits, theirs.eval()(tokens).logits)
    assert back.config.layer_types == config.layer_types
