"""Configurations of GPT-NeoX: the same run as the flags that they stand for; other numbers are refused."""

import datetime
import math

import pytest
import yaml

from megatron_ds.compat.config.neox_names import (
    DEFAULTS,
    ONLY,
    SWITCHES,
    VALUES,
    WITHOUT_EFFECT,
)
from megatron_ds.compat.config.neox_yaml import READ, is_neox, read_neox, read_yamls
from megatron_ds.compat.recipes.file import read_recipe
from megatron_ds.compat.recipes.verdict import assess
from megatron_ds.config.parse import parse
from megatron_ds.errors import ConfigError
from tests.harness.limits import bounded

pytestmark = [pytest.mark.plan, pytest.mark.one_in(2)]

MODEL = {
    "pipe-parallel-size": 1,
    "model-parallel-size": 2,
    "num-layers": 6,
    "hidden-size": 64,
    "num-attention-heads": 8,
    "seq-length": 32,
    "max-position-embeddings": 32,
    "pos-emb": "rotary",
    "rotary-pct": 0.25,
    "no-weight-tying": True,
    "gpt-j-residual": True,
    "norm": "layernorm",
    "output-layer-parallelism": "column",
    "init_method": "small_init",
    "bias-gelu-fusion": True,
    "output_layer_init_method": "wang_init",
    "attention-config": [[["flash"], 6]],
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.001, "betas": [0.9, 0.95], "eps": 1e-8},
    },
    "min_lr": 0.0001,
    "zero_optimization": {
        "stage": 1,
        "allgather_partitions": True,
        "cpu_offload": False,
    },
    "fp16": {"fp16": True, "enabled": True, "loss_scale": 0, "initial_scale_power": 12},
    "train_micro_batch_size_per_gpu": 4,
    "gas": 1,
    "data-impl": "mmap",
    "checkpoint-activations": True,
    "checkpoint-num-layers": 1,
    "gradient_clipping": 1.0,
    "train-iters": 100,
    "lr-decay-iters": 100,
    "lr-decay-style": "cosine",
    "warmup": 0.01,
    "checkpoint-factor": 10,
    "extra-save-iters": [0, 1, 2, 4],
}
DATA = {
    "train-data-paths": ["a", "b"],
    "train-data-weights": [0.3, 0.7],
    "tokenizer-type": "HFTokenizer",
    "vocab-file": "t.json",
    "log-interval": 10,
}


def written(folder, *blocks):
    files = [folder / f"{number}.yml" for number in range(len(blocks))]
    for file, block in zip(files, blocks):
        file.write_text(yaml.safe_dump(block))
    return list(map(str, files))


def parsed(folder, *blocks, ranks=2):
    return parse(["--config", *written(folder, *blocks)], ranks, env={})


def test_files_of_one_run_are_the_run_of_its_flags(tmp_path):
    config = parsed(tmp_path, MODEL, DATA)
    deviation = math.sqrt(2 / (5 * 64))
    factor = 2 / 6 / 8 * math.sqrt(12) / deviation  # wang_init over the scaled one
    group = f"linear_proj.weight:init_factor={factor!r}"
    flags = parse(
        f"""--num-layers 6 --hidden-size 64 --num-attention-heads 8 --seq-length 32
        --max-position-embeddings 32 --tensor-model-parallel-size 2 --position-embedding-type rope
        --rotary-percent 0.25 --untie-embeddings-and-output-weights --use-parallel-residual --activation gelu
        --init-method-std {deviation!r} --param-group *.{group} *.{group.replace("proj", "fc2")} --optimizer
        adam --lr 1e-3 --adam-beta2 0.95 --min-lr 1e-4 --zero-stage 1 --fp16 --initial-loss-scale 4096
        --micro-batch-size 4 --recompute-granularity full --train-iters 100 --lr-decay-iters 100
        --lr-decay-style cosine --lr-warmup-fraction 0.01 --lr-warmup-style linear_from_one --weight-decay 0.1
        --hidden-dropout 0 --attention-dropout 0 --train-data-path 0.3 a 0.7 b --tokenizer-type
        HuggingFaceTokenizer --tokenizer-model t.json --log-interval 10""".split(),
        2,
        env={},
    )
    for section in (
        "model",
        "parallel",
        "zero",
        "optimizer",
        "train",
        "data",
        "logging",
    ):
        assert getattr(config, section) == getattr(flags, section), section


def test_names_may_have_hyphens_or_underscores_and_only_its_files_are_read_so(tmp_path):
    other = {key.replace("-", "_"): value for key, value in MODEL.items()}
    assert parsed(tmp_path, other, DATA).model == parsed(tmp_path, MODEL, DATA).model
    assert (
        is_neox(MODEL)
        and not is_neox({"model": {"num_layers": 2}})
        and not is_neox(None)
    )
    with pytest.raises(
        ConfigError, match='"hidden_size" is given twice|hidden_size is given twice'
    ):
        parsed(tmp_path, MODEL, DATA, {"hidden_size": 65})


@pytest.mark.parametrize(
    "change, says",
    [
        ({"lr-decay-style": "linear"}, "another curve"),
        ({"lr-decay-style": "exponential"}, "another curve"),
        ({"attention-config": [[["rwkv"], 6]]}, "softmax attention"),
        ({"activation": "swiglu"}, "is gelu"),
        ({"pos-emb": "rpe"}, "learned, rotary"),
        ({"tokenizer-type": "SPMTokenizer"}, "GPT2BPETokenizer, HFTokenizer"),
        ({"z_loss": 1e-4}, "no option"),
        ({"init_method": "orthogonal"}, "orthogonal is not available"),
        ({"train_impl": "dpo"}, "next token"),
        ({"use_bias_in_mlp": False}, "Make both equal"),
        ({"gas": 2}, "gradient_accumulation_steps"),
        ({"use_mup": True}, "follow the width"),
        ({"soft_prompt_tuning": {"enabled": True}}, "no option"),
    ],
)
def test_what_moves_a_number_is_refused_with_the_key_and_the_reason(
    tmp_path, change, says
):
    with pytest.raises(ConfigError, match=says):
        parsed(
            tmp_path,
            {**MODEL, **change},
            {key: v for key, v in DATA.items() if key not in change},
        )


@pytest.mark.parametrize(
    "change, path, value",
    [
        ({"bias-gelu-fusion": False}, "model.activation", "gelu_exact"),
        (
            {"norm": "rmsnorm", "rms_norm_epsilon": 1e-6},
            "model.normalization",
            "RMSNorm",
        ),
        ({"pipe-parallel-size": 0}, "parallel.pipeline_model_parallel_size", 1),
        ({"fp16": {"type": "bfloat16", "enabled": True}}, "optimizer.bf16", True),
        ({"precision": "bfloat16", "fp16": None}, "optimizer.bf16", True),
        (
            {"lr-decay-style": "linear", "min_lr": 0},
            "optimizer.lr_decay_style",
            "linear",
        ),
        (
            {"use_bias_in_mlp": False, "use_bias_in_attn_linear": False},
            "model.add_bias_linear",
            False,
        ),
        (
            {"use_bias_in_attn_linear": False},
            "model.use_bias_in_attn_linear",
            False,
        ),
        ({"use_bias_in_norms": False}, "model.use_bias_in_norms", False),
        (
            {"gpt_j_residual": True, "gpt_j_tied": True},
            "model.shared_block_norm",
            True,
        ),
        (
            {"init_method": "normal", "output_layer_init_method": "scaled_normal"},
            "optimizer.param_groups",
            (),
        ),
    ],
)
def test_values_have_their_meaning(tmp_path, change, path, value):
    assert parsed(tmp_path, {**MODEL, **change}, DATA).get(path) == value


ODD = (
    None,
    True,
    0,
    -1,
    float("inf"),
    float("nan"),
    10**400,
    "",
    "x",
    [],
    ["a"],
    [[1]],
    [None],
    {},
    {"a": 1},
    {1: {2: [3]}},
    {None: None},
    datetime.date(2024, 1, 1),
    b"x",
)


@pytest.mark.parametrize(
    "key", sorted({*READ, *ONLY, *DEFAULTS, *WITHOUT_EFFECT, "z_loss"})
)
def test_a_value_of_any_type_is_read_or_is_a_problem(key):
    for value in ODD:
        for problem in read_neox("x.yml", [{**MODEL, key: value}]).problems:
            assert "x.yml" in problem


@pytest.mark.parametrize(
    "key, value, says",
    [
        ("pos-emb", ["rotary"], r"\"pos_emb\" should be a text, not \['rotary'\]"),
        ("fp16", True, '"fp16" should be a block of keys, not True'),
        ("init_method_std", 0, '"init_method_std" should be a number above 0, not 0'),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_type(tmp_path, key, value, says):
    with pytest.raises(ConfigError, match=says):
        parsed(tmp_path, {**MODEL, key: value}, DATA)


MARKED = "pipe_parallel_size: 1\ntrain_micro_batch_size_per_gpu: 1\n"
REPEATED = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 30)
)
HOSTILE = {
    "references": REPEATED + "num_layers: *a29\n",
    "itself": "num_layers: &a [*a]\n",
    "deep": f"num_layers: {'[' * 5_000}{']' * 5_000}\n",
    "digits": f"num_layers: {'9' * 50_000}\n",
    "hexadecimal": f"num_layers: 0x{'f' * 50_000}\n",
    "minutes": f"num_layers: 1{':59' * 5_000}\n",
    "a date": "num_layers: 2024-99-99\n",
    "a call": "num_layers: !!python/object/apply:os.getcwd []\n",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_file_is_refused_in_bounded_memory_by_both_readers(tmp_path, text):
    path = tmp_path / "x.yml"
    path.write_text(MARKED + text)
    with bounded():
        assert any(reading.problems for reading in read_yamls([str(path)]))
        with pytest.raises(ConfigError, match="x.yml"):
            read_recipe(path, {})


def test_no_key_is_in_two_tables_and_each_that_changes_nothing_has_a_reason():
    tables = (VALUES, SWITCHES, WITHOUT_EFFECT, ONLY)
    keys = [key for table in tables for key in table]
    assert len(keys) == len(set(keys)) and all(WITHOUT_EFFECT.values())
    reading = read_neox("x", [{**MODEL, "deepspeed_slurm": True}])
    assert "launcher" in reading.without_effect["x deepspeed_slurm"]


@pytest.mark.parametrize("name", ["0.yml", "model_config"])
def test_a_recipe_whose_data_are_in_another_file_is_accepted_and_runs_by_its_name(
    tmp_path, name
):
    written(tmp_path, MODEL)
    path = str((tmp_path / "0.yml").rename(tmp_path / name))
    (training,) = read_recipe(tmp_path / name, {})
    assessment = assess(training, {})
    assert assessment.is_accepted and assessment.ranks == 2
    assert assessment.command[-5:] == ("-m", "megatron_ds", "train", "--config", path)
