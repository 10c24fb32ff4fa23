"""Hugging Face's DeepSpeed configs, whose values are "auto", filled from TrainingArguments and the model."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_ds.compat.config.deepspeed_json import auto_keys, known_keys
from megatron_ds.compat.engine.json_settings import (
    NAMES,
    Sources,
    fill_autos,
    read_settings,
)
from megatron_ds.errors import ConfigError

pytestmark = pytest.mark.plan

# The values of the config that Transformers' documentation gives for ZeRO 3.
STANDARD = {
    "fp16": {"enabled": "auto", "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {
            "lr": "auto",
            "betas": "auto",
            "eps": "auto",
            "weight_decay": "auto",
        },
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
ARGS = dict(
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_grad_norm=0.7,
    learning_rate=1e-3,
    adam_beta1=0.8,
    adam_beta2=0.99,
    adam_epsilon=1e-6,
    weight_decay=0.2,
    fp16=False,
    bf16=True,
    max_steps=50,
    warmup_steps=5,
)


def model(**config):
    module = nn.Linear(2, 2)
    module.config = SimpleNamespace(**config)
    return module


def sources(args=ARGS, module=None, ranks=3, samples=None):
    return Sources(
        SimpleNamespace(**args), module or model(hidden_size=10), ranks, samples
    )


def test_all_of_the_standard_config_is_filled():
    block = fill_autos(STANDARD, sources())
    assert not auto_keys(block) and STANDARD["fp16"]["enabled"] == "auto"
    assert [
        block[key]
        for key in (
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "train_batch_size",
        )
    ] == [4, 2, 24]
    assert (
        block["gradient_clipping"],
        block["fp16"]["enabled"],
        block["bf16"]["enabled"],
    ) == (0.7, False, True)
    assert block["optimizer"]["params"] == {
        "lr": 1e-3,
        "betas": [0.8, 0.99],
        "eps": 1e-6,
        "weight_decay": 0.2,
    }
    assert block["scheduler"]["params"] == {
        "warmup_min_lr": 0,
        "warmup_max_lr": 1e-3,
        "warmup_num_steps": 5,
        "total_num_steps": 50,
    }
    assert block["zero_optimization"] == {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 100,
        "stage3_prefetch_bucket_size": 90,
        "stage3_param_persistence_threshold": 100,
    }
    settings = read_settings(block, 3)
    assert (
        settings.train.global_batch_size,
        settings.optimizer.lr,
        settings.optimizer.adam_beta1,
    ) == (24, 1e-3, 0.8)


def test_transformers_own_arguments_and_config_fill_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    args = SimpleNamespace(
        **{
            f.name: f.default
            for f in __import__("dataclasses").fields(transformers.TrainingArguments)
        }
    )
    args.max_steps, args.warmup_steps, args.learning_rate = 20, 3, 5e-5
    args.bf16, args.fp16 = bool(args.bf16), bool(args.fp16)
    module = nn.Linear(1, 1)
    module.config = transformers.GPT2Config(n_embd=24)
    block = fill_autos(STANDARD, Sources(args, module, 1))
    assert (
        not auto_keys(block) and block["zero_optimization"]["reduce_bucket_size"] == 576
    )
    assert (
        block["optimizer"]["params"]["betas"] == [0.9, 0.999]
        and block["train_micro_batch_size_per_gpu"] == 8
    )


def test_what_is_written_stays():
    block = fill_autos(
        {
            "train_batch_size": 24,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": "auto",
            "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        },
        sources({"learning_rate": 1}),
    )
    assert block["gradient_accumulation_steps"] == 2 and block["optimizer"][
        "params"
    ] == {"lr": 0.5}


@pytest.mark.parametrize(
    "args, samples, total, warmup",
    [
        ({"max_steps": 7, "warmup_steps": 2}, None, 7, 2),
        ({"max_steps": -1, "num_train_epochs": 3}, 100, 15, None),
        ({"num_train_epochs": 0.5, "warmup_ratio": 0.1}, 100, 3, 1),
        ({"max_steps": 10, "warmup_steps": 0.25}, None, 10, 3),
        ({"num_train_epochs": 3}, None, None, None),
        ({"max_steps": 20, "warmup_steps": 0, "warmup_ratio": 0.1}, None, 20, 2),
    ],
)
def test_steps_are_counted_or_follow_from_the_epochs(args, samples, total, warmup):
    given = {
        "scheduler": STANDARD["scheduler"],
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
    }
    params = fill_autos(given, sources(args, samples=samples))["scheduler"]["params"]
    assert (params["total_num_steps"], params["warmup_num_steps"]) == (
        total or "auto",
        warmup or "auto",
    )


@pytest.mark.parametrize(
    "config, size",
    [
        ({"hidden_sizes": [4, 9, 6]}, 9),
        ({"text_config": SimpleNamespace(hidden_size=5)}, 5),
        ({}, None),
    ],
)
def test_the_hidden_size_is_found_where_models_have_it(config, size):
    assert sources(module=model(**config)).hidden_size == size
    assert Sources(None, nn.Linear(1, 1), 1).hidden_size is None


def test_without_arguments_the_format_is_the_models():
    block = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        filled = fill_autos(block, Sources(None, nn.Linear(2, 2).to(dtype), 1))
        assert (filled["fp16"]["enabled"], filled["bf16"]["enabled"]) == (
            dtype == torch.float16,
            dtype == torch.bfloat16,
        )


def test_all_that_cannot_be_filled_is_named_at_once():
    block = fill_autos(STANDARD, Sources(None, nn.Linear(2, 2), 1))
    with pytest.raises(ConfigError) as error:
        read_settings(block, 1)
    text = str(error.value)
    left = auto_keys(block)
    assert len(left) == 14 and all(f'"{key}" is "auto"' in text for key in left)
    assert (
        "was given as args.per_device_train_batch_size" in text
        and "config.hidden_size" in text
    )


def test_every_name_is_one_of_a_known_key():
    assert set(NAMES) <= set(known_keys())
