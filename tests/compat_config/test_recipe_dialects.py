"""Flags of Megatron's forks: each name sets its option, each answer has a reason, no number is ignored."""

import math

import pytest
import torch

from megatron_ds.compat.config.dialects import (
    DIALECTS,
    FORK_FLAGS,
    FORK_NAMES,
    FORK_READERS,
)
from megatron_ds.config.parse import parse
from megatron_ds.config.sources.flags import read_flags, spellings
from megatron_ds.config.training_schedule import make_learning_rate
from megatron_ds.errors import ConfigError
from megatron_ds.models import MODELS
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.training.step_metrics import stop_reason
from megatron_ds.training.trigger_files import exit_file, take_save_file

pytestmark = pytest.mark.plan

RUN = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--train-iters 100 --lr 1e-3 --mock-data --vocab-size 61"
).split()
VALUES = {str: "some/text", int: "3", float: "0.5"}


def parsed(words: str, ranks: int = 1):
    return parse([*RUN, *words.split()], ranks, env={})


@pytest.mark.parametrize("name, meaning", FORK_NAMES.items())
def test_a_name_of_a_fork_sets_the_option_of_its_meaning(name, meaning):
    flag, _, value = meaning.partition(" ")
    option = spellings()[flag].option
    word = value or (
        str(option.choices[-1]) if option.choices else VALUES.get(option.kind, "")
    )
    with_value = [] if value or spellings()[flag].is_switch else [word]
    theirs = read_flags([name, *with_value])
    ours = read_flags([flag, word] if value else [flag, *with_value])
    assert not theirs.problems and not ours.problems
    assert [(s.path, s.value) for s in theirs.settings] == [
        (s.path, s.value) for s in ours.settings
    ]


@pytest.mark.parametrize("name", FORK_FLAGS)
def test_an_answer_to_a_flag_of_a_fork_is_a_reason(name):
    answer = FORK_FLAGS[name]
    assert (
        name not in spellings() and name not in FORK_NAMES and name not in FORK_READERS
    )
    assert answer.note if answer.values is None else answer.refusal
    if answer.values is None:
        assert read_flags([name, "x"]).without_effect == {name: answer.note}
    else:
        assert answer.refusal in read_flags([name, "x"]).problems[0]


def test_each_fork_has_one_table():
    assert len({dialect.project for dialect in DIALECTS}) == len(DIALECTS)
    assert all(
        dialect.names or dialect.answers or dialect.readers for dialect in DIALECTS
    )


@pytest.mark.parametrize(
    "words, path, value",
    [
        (
            "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path x",
            "data.tokenizer_type",
            "HuggingFaceTokenizer",
        ),
        (
            "--context-parallel-algo ulysses_cp_algo --context-parallel-size 2",
            "parallel.cp_comm_type",
            ("a2a",),
        ),
        (
            "--use-glm-rope --position-embedding-type rope",
            "model.rotary_interleaved",
            True,
        ),
        ("--RMSNorm", "model.normalization", "RMSNorm"),
        ("--position-embedding-type rotary", "model.position_embedding_type", "rope"),
        ("--attention-head-type multiquery", "model.num_query_groups", 1),
        ("--attention-head-type multihead", "model.num_query_groups", None),
        ("--eval-iters -1", "train.eval_iters", 0),
        ("--tokenizer-file t.json", "data.tokenizer_model", None),  # mock data
        ("--wandb-project-name p", "services.wandb_project", "p"),
        (
            "--num-layer-list 5,3 --pipeline-model-parallel-size 2",
            "parallel.pipeline_layout",
            "5,3",
        ),
        ("--optimizer-cpu-offload", "zero.stage", 1),
        ("--optimizer-cpu-offload --zero-stage 2", "zero.stage", 2),
        (
            "--rope-scaling-type llama3 --position-embedding-type rope --low-freq-factor 1.0",
            "model.use_rope_scaling",
            True,
        ),
        ("--eval-only True", "train.skip_train", True),
        ("--wandb-name n", "services.wandb_exp_name", "n"),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 10 --lr-wsd-decay-style 1-sqrt",
            "optimizer.lr_wsd_decay_style",
            "minus_sqrt",
        ),
    ],
)
def test_values_of_forks_have_their_meaning_here(words, path, value):
    words = words.split()
    argv = (
        [word for word in RUN if word != "--mock-data"] + ["--data-path", "p"]
        if "x" in words
        else RUN
    )
    assert parse([*argv, *words], 2, env={}).get(path) == value


def test_padded_vocabulary_is_the_size_of_the_model_unless_it_moves_the_end_of_document():
    argv = [
        *RUN[: RUN.index("--mock-data")],
        *"--data-path p --tokenizer-model t --tokenizer-type".split(),
    ]
    sizes = ["--vocab-size", "60", "--pad-vocab-size-to", "64"]
    config = parse([*argv, "Llama2Tokenizer", *sizes], env={})
    assert config.model.vocab_size == 64
    with pytest.raises(ConfigError, match="contradict"):
        parse([*argv, "NullTokenizer", *sizes], env={})


def test_a_partition_of_the_pipeline_with_embeddings_counts_them_as_layers():
    method = "--pipeline-model-parallel-size 5 --pp-partition-method type:transformer|embedding"
    assert parsed(method, 5).parallel.pipeline_layout == "Et|tt|tt|tt|tL"
    with pytest.raises(
        ConfigError, match="manual is not available. It may be type:transformer"
    ):
        parsed("--pp-partition-method manual")


def test_the_flags_of_bloom_are_its_model_with_embeddings_counted_as_layers():
    words = (
        "--num-layers 70 --hidden-size 14336 --num-attention-heads 112 --seq-length 2048 --vocab-size 250000 "
        "--micro-batch-size 2 --global-batch-size 2048 --rampup-batch-size 192 16 9_765_625 --mock-data "
        "--train-samples 220_000_000 --lr 6e-5 --bf16 --embed-layernorm --position-embedding-type alibi "
        "--checkpoint-activations --pad-vocab-size-to 250880 --tokenizer-type GPT2BPETokenizer --vocab-file v "
        "--merge-file m --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12 --zero-stage 0 "
        "--pp-partition-method type:transformer|embedding --abort-on-unmet-fused-kernel-constraints "
        "--sync-tp-duplicated-parameters --valid-num-workers 0 --kill-switch-path kill"
    )
    config = parse(words.split(), 384, env={})
    layers = MODELS["gpt"](config.model, ParallelContext(device=torch.device("meta")))
    specs = {p.spec.name: p.spec for layer in layers for p in layer.make().parameters()}
    assert sum(spec.numel for spec in specs.values()) == 176_247_271_424
    stages = config.parallel.pipeline_layout.split("|")
    assert stages == ["Ettttt", *["tttttt"] * 10, "tttttL"]


SPEC = "megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_with_transformer_engine_spec"


@pytest.mark.parametrize(
    "words",
    [
        *"--no-load-optim --finetune --no-load-rng --log-progress".split(),
        "--num-dataset-builder-threads 4",
        "--use-precision-aware-optimizer --main-params-dtype fp32 --exp-avg-dtype fp32",
        "--dist-url env://",
        "--use-mpi",
        "--no-shared-storage",
        "--use-fused-swiglu",
        "--tiktoken-pattern v2",
        "--rope-type rope",
        f"--spec {SPEC}",
        "--spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec",
        "--no-one-logger",
        "--first-k-dense-replace -1",
        "--moe-capacity-factor 0",
        "--router-gating-in-fp32",
        "--mid-level-dataset-surplus 0.005",
        "--dataset MMAP",
        "--train-mode pretrain",
        "--lazy-mpu-init",
        "--log-path logs",
        "--valid-num-workers 2",
        "--moe-lbl-in-fp32 True",
    ],
)
def test_what_moves_no_number_is_accepted_with_a_reason(words):
    config = parsed(words)
    assert config.without_effect and all(config.without_effect.values())


@pytest.mark.parametrize(
    "words, says",
    [
        ("--exp-avg-dtype fp8", "in fp32"),
        ("--spec my.layers spec", "chosen by its options"),
        ("--rope-type yarn", "position-embedding-type yarn"),
        ("--handler-name x", "megatron-ds preprocess"),
        ("--moe-num-experts 8", "one bias after the sum"),
        ("--moe-loss-weight 0.1", "divided by --num-layers"),
        ("--moe-capacity-factor 1", "floor"),
        ("--n-shared-experts x", "not a whole number"),
        ("--rope-scaling-type longrope", "llama3 or yarn"),
        ("--low-freq-factor 2", "numbers of Llama 3"),
        ("--attention-head-type grouped", "may be multihead, multiquery"),
        ("--stage sft", "preprocess --chat"),
        ("--loss-on-targets-only", "two files each"),
        ("--outer-optimizer nesterov", "same step"),
        ("--norm-topk-prob True", "takes no value"),
        ("--vocab-extra-ids 10", "padded"),
        ("--fp16-lm-cross-entropy", "in fp32"),
        ("--init-method-xavier-uniform", "normally distributed"),
        ("--train-weighted-split-paths x", "not have the form"),
        ("--rotary-scale-factor 2", "interpolation"),
        ("--glu-activation geglu", "4 times --hidden-size"),
        ("--glu", "the activation gelu"),
        ("--moe-use-megatron-switch True", "--moe-router-topk 1"),
        ("--inference", "megatron-ds generate"),
        ("--noise-density 0.15", "not masked"),
        ("--eval-only False", "--eval-only False"),
    ],
)
def test_what_would_move_a_number_is_refused_with_the_reason(words, says):
    with pytest.raises(ConfigError, match=says):
        parsed(words)


@pytest.mark.parametrize(
    "style, left",
    [
        ("exponential", lambda r: 2 * 0.5**r - 1),
        ("linear", lambda r: 1 - r),
        ("cosine", lambda r: (1 + math.cos(math.pi * r)) / 2),
        ("minus_sqrt", lambda r: 1 - math.sqrt(r)),
        ("1-sqrt", lambda r: 1 - math.sqrt(r)),
    ],
)
@pytest.mark.parametrize("unit, size", [("iters", 1), ("samples", 2)])
def test_the_final_decay_of_wsd_is_the_closed_form_in_both_units(
    style, left, unit, size
):
    argv = [word for word in RUN if word not in ("--train-iters", "100")]
    rate = make_learning_rate(
        parse(
            [
                *argv,
                "--global-batch-size",
                "2",
                f"--train-{unit}",
                str(100 * size),
                "--lr-decay-style",
                "WSD",
                f"--lr-wsd-decay-{unit}",
                str(40 * size),
                "--lr-wsd-decay-style",
                style,
                "--min-lr",
                "1e-4",
            ],
            env={},
        )
    )
    for step in (60, 61, 70, 99, 100):
        expected = 1e-4 + 9e-4 * left((step - 60) / 40)
        assert rate.at(2 * step) == pytest.approx(expected, rel=1e-12)


def test_a_warm_up_from_one_begins_with_the_rate_of_its_first_step():
    words = "--lr-decay-style cosine --lr-warmup-iters 4 --lr-warmup-style"
    first = make_learning_rate(parsed(f"{words} linear_from_one"))
    second = make_learning_rate(parsed(f"{words} linear"))
    assert [first.at(n) for n in range(6)] == [second.at(max(n, 1)) for n in range(6)]
    assert first.at(0) == pytest.approx(2.5e-4) and second.at(0) == 0


def test_files_ask_a_run_to_save_and_to_exit(tmp_path):
    train = parsed(
        f"--kill-switch-path {tmp_path}/kill --trigger-path {tmp_path}"
    ).train
    assert exit_file(train) is None and not take_save_file(train)
    (tmp_path / "save").touch()
    assert take_save_file(train) and not take_save_file(train)
    (tmp_path / "exit").touch()
    assert exit_file(train) == f"{tmp_path}/exit"
    (tmp_path / "kill").touch()
    assert exit_file(train) == f"{tmp_path}/kill"
    assert stop_reason([(None, None, "x/exit"), (None, None, None)]) == "found x/exit"


def test_a_folder_of_triggers_that_cannot_exist_asks_for_nothing():
    train = parsed("--trigger-path /dev/null").train  # swiss-ai's default
    assert exit_file(train) is None and not take_save_file(train)


def test_evaluation_alone_needs_no_learning_rate_and_saves_nothing(tmp_path):
    argv = [
        word for word in RUN if word not in ("--train-iters", "100", "--lr", "1e-3")
    ]
    config = parse(
        [*argv, "--skip-train", "--load", "l", "--save", str(tmp_path)], env={}
    )
    assert config.checkpoint.save is None and config.checkpoint.no_load_optim
    assert config.train.train_iters == 0
