"""YAML files, and how the sources are merged."""

import json
import re

import pytest

from megatron_ds.config import parse
from megatron_ds.config.saved_values import to_dict
from megatron_ds.config.sources.config_files import read_yaml
from megatron_ds.errors import ConfigError

pytestmark = pytest.mark.plan

NEEDED = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257 "
    "--micro-batch-size 2 --lr 6e-4 --train-iters 100 --mock-data"
).split()


def written(tmp_path, text: str, name: str = "run.yaml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def values(tmp_path, text: str) -> dict:
    return {
        setting.path: setting.value
        for setting in read_yaml(written(tmp_path, text)).settings_or_error()
    }


def test_names_may_be_bare_or_in_their_section_and_in_any_spelling(tmp_path):
    assert values(
        tmp_path,
        """
        num_layers: 4
        optimizer: {optimizer: sgd, lr: 1e-4}
        zero_stage: 1
        layernorm-epsilon: 1e-6
        model:
          model: gpt
          activation: swiglu
        """,
    ) == {
        "model.num_layers": 4,
        "optimizer.optimizer": "sgd",
        "optimizer.lr": 1e-4,
        "zero.stage": 1,
        "model.norm_epsilon": 1e-6,
        "model.model": "gpt",
        "model.activation": "swiglu",
    }


@pytest.mark.parametrize(
    "text, path, expected",
    [
        ("lr: 1e-4", "optimizer.lr", 1e-4),  # a text in YAML 1.1
        ("seed: 010", "train.seed", 10),  # eight in YAML 1.1
        ("train_samples: 1e6", "train.train_samples", 1_000_000),
        ("split: 1:30", "data.split", "1:30"),  # ninety in YAML 1.1
        ("split: 969,30,1", "data.split", "969,30,1"),
        ("vocab_file: no", "data.vocab_file", "no"),  # false in YAML 1.1
        ("data_path: my corpus", "data.data_path", ("my corpus",)),
        ("data_path: [0.30, a, 0.7, b]", "data.data_path", ("0.30", "a", "0.7", "b")),
        ("rampup_batch_size: 16 8 300", "train.rampup_batch_size", (16, 8, 300)),
        ("bf16: yes", "optimizer.bf16", True),
        ("bf16: False", "optimizer.bf16", False),
    ],
)
def test_the_fields_type_decides_not_yaml(tmp_path, text, path, expected):
    assert values(tmp_path, text) == {path: expected}


def test_an_empty_value_leaves_the_option_to_others(tmp_path):
    assert values(tmp_path, "lr:\nsave: null\nseed: ~\n") == {}
    assert values(tmp_path, "") == {}


def test_a_tag_that_would_run_code_is_only_a_text(tmp_path):
    with pytest.raises(ConfigError, match="not a whole number|block under it"):
        read_yaml(
            written(tmp_path, "seed: !!python/object/apply:os.system ['echo hi']")
        ).settings_or_error()


def test_flags_win_over_files_and_files_over_the_script(tmp_path):
    path = written(tmp_path, "seed: 1\nlog_interval: 5\n")
    config = parse(
        [*NEEDED, "--config", path, "--seed", "2"],
        defaults={"log_interval": 7, "eval_iters": 9},
    )
    assert (
        config.train.seed,
        config.logging.log_interval,
        config.train.eval_iters,
    ) == (2, 5, 9)
    assert config.source("logging.log_interval") == f"{path}:2"


def test_two_files_may_agree_but_not_differ(tmp_path):
    one, same, other = (
        written(tmp_path, text, name)
        for text, name in (
            ("seed: 1\n", "one.yaml"),
            ("train: {seed: 1}\n", "same.yaml"),
            ("seed: 2\n", "other.yaml"),
        )
    )
    assert parse([*NEEDED, "--config", one, same]).train.seed == 1
    with pytest.raises(
        ConfigError, match=re.escape(f"seed is 1 in {one}:1 but 2 in {other}:1")
    ):
        parse([*NEEDED, "--config", one, "--config", other])


def test_yaml_and_deepspeed_json_may_not_differ_either(tmp_path):
    yaml = written(tmp_path, "clip_grad: 1.0\n")
    json_file = written(tmp_path, '{"gradient_clipping": 0.5}', "ds.json")
    with pytest.raises(
        ConfigError, match="run.yaml:1 but 0.5 in .*ds.json gradient_clipping"
    ):
        parse([*NEEDED, "--config", yaml, "--deepspeed_config", json_file])
    assert (
        parse(
            [
                *NEEDED,
                "--config",
                yaml,
                "--deepspeed_config",
                json_file,
                "--clip-grad",
                "2",
            ]
        ).optimizer.clip_grad
        == 2
    )


def test_problems_of_flags_and_of_several_files_come_together(tmp_path):
    one, two = (
        written(tmp_path, "sed: 1\n", "one.yaml"),
        written(tmp_path, '{"stps_per_print": 1}', "two.json"),
    )
    with pytest.raises(ConfigError) as error:
        parse([*NEEDED, "--sseed", "1", "--config", one, "--deepspeed_config", two])
    assert [
        words in str(error.value)
        for words in ("3 problems", "'--seed'?", "'seed'?", "'steps_per_print'?")
    ] == [True] * 4


def test_a_checkpoints_run_json_gives_the_same_configuration_again(tmp_path):
    config = parse(
        [*NEEDED, "--swiglu", "--no-overlap-comm", "--tensor-model-parallel-size", "2"],
        4,
    )
    run = {"format_version": 1, "config": to_dict(config), "progress": {"step": 3}}
    again = parse(
        ["--config", written(tmp_path, json.dumps(run, indent=2), "run.json")], 4
    )
    assert again == config
    changed = parse(["--config", str(tmp_path / "run.json"), "--train-iters", "200"], 2)
    assert (
        changed.train.train_iters,
        changed.train.global_batch_size,
        changed.data_parallel_size,
    ) == (200, 4, 1)
