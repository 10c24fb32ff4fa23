"""What a first command line meets: suggestions, all problems in one round, --version, --print-config,
--local-rank."""

import re
import sys

import pytest

from megatron_ds.compat.config.deepspeed_json import reading_of
from megatron_ds.compat.config.unsupported import answer_to_flag
from megatron_ds.config import parse
from megatron_ds.config.sources.config_files import read_yaml
from megatron_ds.config.sources.flags import (
    CONFIG_FLAG,
    DEEPSPEED_FLAG,
    read_flags,
    spellings,
)
from megatron_ds.config.sources.suggest import synonyms
from megatron_ds.errors import ConfigError
from megatron_ds.launch_env import with_local_rank
from megatron_ds.mpu.launch import read_launch
from megatron_ds.version import __version__

pytestmark = pytest.mark.plan

NEEDED = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257 "
    "--micro-batch-size 2 --lr 6e-4 --train-iters 100 --mock-data"
).split()


def problems_of(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse(words, env={})
    return list(error.value.problems)


# ------------------------------------------------------------------ suggestions
@pytest.mark.parametrize(
    "typed, meant",
    [
        ("--learning-rate", "--lr"),
        ("--output-dir", "--save"),
        ("--checkpoint-dir", "--save"),
        ("--resume", "--load"),
        ("--train-batch-size", "--global-batch-size"),
        ("--per-device-train-batch-size", "--micro-batch-size"),
        ("--tp", "--tensor-model-parallel-size"),
        ("--pp", "--pipeline-model-parallel-size"),
        ("--max_steps", "--train-iters"),
        ("--steps", "--train-iters"),
        ("--data", "--data-path"),
        ("--dataset", "--data-path"),
        ("--n_layer", "--num-layers"),
        ("--warmup-steps", "--lr-warmup-iters"),
        ("--wd", "--weight-decay"),
        ("--max-grad-norm", "--clip-grad"),
        ("--block-size", "--seq-length"),
        ("--n-embd", "--hidden-size"),
        ("--logging-steps", "--log-interval"),
        ("--num_lyers", "--num-layers"),
        ("--hiden-size", "--hidden-size"),
        ("--lr-decay-itters", "--lr-decay-iters"),
        ("--num-experts-per-tok", "--moe-router-topk"),
        ("--moe-router-topkk", "--moe-router-topk"),
        ("--train-toekns", "--train-tokens"),
        ("--vresion", "--version"),
    ],
)
def test_a_name_of_another_project_or_a_typo_leads_to_the_flag(typed, meant):
    problem = read_flags([typed, "1"]).problems[0]
    assert f"'{meant}'" in problem.partition("did you mean")[2], problem


@pytest.mark.parametrize(
    "typed, says",
    [
        ("--epochs", "--train-samples"),
        ("--dp", "data-parallel size follows"),
        ("--gpus", "torchrun"),
        ("--profiler", "--use-pytorch-profiler"),
        ("--compile", "torch.compile"),
        ("--num-shared-experts", "shared experts together"),
        ("--tokenizer", "--tokenizer-type"),
        ("--precision", "--bf16"),
    ],
)
def test_a_name_without_a_flag_is_explained(typed, says):
    problem = read_flags([typed, "9"]).problems[0]
    assert says in problem and "did you mean" not in problem


@pytest.mark.parametrize(
    "typed", ["--frobnicate", "--zzz", "--quux", "--color", "--foo", "--verbose"]
)
def test_nothing_is_suggested_for_what_is_not_similar(typed):
    assert read_flags([typed]).problems == [f"unknown flag {typed}. All flags: --help."]


def test_synonyms_lead_to_flags_that_exist_and_are_no_flags_themselves():
    known = {
        *spellings(),
        CONFIG_FLAG,
        DEEPSPEED_FLAG,
        DEEPSPEED_FLAG.replace("-config", "_config"),
    }
    for name, meant in synonyms().items():
        named = (
            re.findall(r"--[a-z][a-z0-9_-]*", meant)
            if isinstance(meant, str)
            else meant
        )
        assert set(named) <= known | {"--nproc-per-node"}, name
        assert "--" + name not in known and answer_to_flag("--" + name) is None, name
    assert len(synonyms()) >= 20


def test_files_get_the_same_suggestions(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "learning_rate: 1\nmodel:\n  n_layer: 2\n  hiden_size: 3\nepochs: 1\nqqq: 1\n"
    )
    found = read_yaml(str(tmp_path / "a.yaml")).problems
    for problem, says in zip(
        found,
        (
            "'lr'?",
            "'num_layers'?",
            "'hidden_size'?",
            "epochs are not counted",
            "docs/reference/flags.md",
        ),
    ):
        assert says in problem
    block = {
        "learning_rate": 1,
        "lr": 1,
        "micro_batch_size": 1,
        "epochs": 3,
        "gradient_cliping": 1,
        "qqq": 1,
    }
    found = reading_of("ds.json", block).problems
    for problem, says in zip(
        found,
        (
            "'optimizer.params.lr'",
            "'optimizer.params.lr'",
            "'train_micro_batch_size_per_gpu'",
            "epochs are not counted",
            "'gradient_clipping'",
            '"qqq". docs',
        ),
    ):
        assert says in problem


# ------------------------------------------------------------------ one round
def test_flags_files_and_rules_report_their_problems_in_one_round(tmp_path):
    (tmp_path / "a.yaml").write_text("sed: 1\nclip_grad: much\n")
    (tmp_path / "b.json").write_text('{"stps_per_print": 1, "eigenvalue": true}')
    wrong = (
        "--frobnicate --fp32-residual-connection --eval-iters x --num-attention-heads 7 --fp16 --bf16 "
        f"--config {tmp_path}/a.yaml --deepspeed_config {tmp_path}/b.json --local-rank 4"
    )
    found = problems_of(*NEEDED, *wrong.split())
    for says in (
        "--frobnicate",
        "--fp32-residual",
        "--eval-iters: 'x'",
        "unknown key 'sed'",
        "clip_grad: 'much'",
        '"stps_per_print"',
        '"eigenvalue"',
        "--local-rank 4",
        "--num-attention-heads 7",
        "--fp16 and",
    ):
        assert sum(says in problem for problem in found) == 1, (says, found)
    assert len(found) == 10


def test_an_unreadable_value_is_not_reported_again_as_missing_or_by_a_rule():
    words = [
        w
        for w in NEEDED
        if w not in ("--lr", "6e-4", "--train-iters", "100", "--mock-data")
    ]
    found = problems_of(
        *words,
        "--lr",
        "fast",
        "--train-iters",
        "many",
        "--mock-data=1",
        "--zero-stage",
        "x",
        "--stage3-prefetch-bucket-size",
        "5",
    )
    assert len(found) == 4 and not any("missing" in problem for problem in found), found
    found = problems_of("--num-lyers", *NEEDED[1:])
    assert len(found) == 1 and "'--num-layers'" in found[0]


def test_a_file_that_cannot_be_read_hides_what_seems_missing():
    assert len(problems_of("--config", "/nowhere.yaml")) == 1


# ------------------------------------------------------------------ --version, --print-config
def printed(capsys, *words: str, **options) -> str:
    with pytest.raises(SystemExit) as exit:
        parse(words, **{"env": {}, **options})
    assert exit.value.code == 0
    return capsys.readouterr().out


def test_version_is_printed_with_those_of_torch_and_python(capsys):
    import torch

    assert printed(capsys, "--version", "--nonsense") == (
        f"megatron_ds {__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}\n"
    )
    assert printed(capsys, "--version", env={"RANK": "1"}) == ""


@pytest.mark.parametrize(
    "words",
    [
        "--seed 5",
        "--swiglu --no-overlap-comm --no-add-bias-linear --eval-iters 0 --reduce-bucket-size 5e8",
        "--train-samples 90 --no-mock-data --data-path 0.3 a: 0.7 #b --split 9,1 --tokenizer-type NullTokenizer "
        "--rampup-batch-size 4 4 30 --global-batch-size 8 --fim-data --fim-prefix-token no",
        "--bf16 --zero-stage 3 --tensor-model-parallel-size 2 --trace d --trace-steps 3 4 --save on --load 1e3",
    ],
)
def test_the_printed_configuration_gives_the_same_one_again(capsys, tmp_path, words):
    given = [
        w
        for w in NEEDED
        if "train-samples" not in words or w not in ("--train-iters", "100")
    ] + words.split()
    text = printed(capsys, *given, "--print-config", world_size=2)
    (tmp_path / "run.yaml").write_text(text)
    again = parse(["--config", str(tmp_path / "run.yaml")], 2, env={})
    assert again == parse(given, 2, env={})
    assert re.search(r"^  lr: 0\.0006 +# --lr$", text, re.M) and re.search(
        r"^  adam_beta1: 0\.9 +# default$", text, re.M
    )
    assert "# micro-batch 2 ×" in text or "--global-batch-size" in words


def test_a_wrong_configuration_is_not_printed():
    assert problems_of(*NEEDED, "--print-config", "--fp16", "--bf16")


# ------------------------------------------------------------------ --local-rank
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}


@pytest.mark.parametrize(
    "words",
    [
        ["--local_rank", "1"],
        ["--local-rank", "1"],
        ["--local_rank=1"],
        ["--local-rank=1"],
    ],
)
def test_local_rank_is_accepted_in_every_spelling_and_used_where_the_environment_has_none(
    words,
):
    assert parse([*NEEDED, *words], 4, env={**TORCHRUN, "LOCAL_RANK": "1"}) == parse(
        NEEDED, 4, env={}
    )
    assert parse([*NEEDED, *words], 4, env=TORCHRUN)
    number = read_flags(words).local_rank
    assert read_launch(with_local_rank(TORCHRUN, number)).local_rank == 1
    assert with_local_rank({**TORCHRUN, "LOCAL_RANK": "2"}, number)["LOCAL_RANK"] == "2"
    assert "LOCAL_RANK" not in with_local_rank({}, number)


def test_local_rank_may_be_zero_or_none_in_a_single_process_but_must_agree_with_the_launcher():
    for words in (["--local_rank", "0"], ["--local_rank=-1"]):
        assert parse([*NEEDED, *words], env={})
    for env, says in (
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK is 2"),
        ({}, "cannot find the others"),
    ):
        with pytest.raises(ConfigError, match=f"--local-rank 1.*{says}"):
            parse([*NEEDED, "--local_rank", "1"], 4, env=env)
