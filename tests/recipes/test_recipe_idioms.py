"""Idioms of public recipes: text for `bash -c`, loops, functions in `$( )`, gaps, options in variables."""

import json
from pathlib import Path

import pytest

from megatron_ds.compat.recipes import check
from megatron_ds.compat.recipes.file import kind_of, read_recipe
from megatron_ds.compat.recipes.shell_script import included_devices, read_script
from megatron_ds.compat.recipes.shell_values import shown
from megatron_ds.compat.recipes.verdict import Kind, assess, config_of

pytestmark = pytest.mark.plan

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--train-iters 4 --lr 1e-3 --mock-data --vocab-size 61"
)


def launches(folder: Path, text: str):
    path = folder / "run.sh"
    path.write_text(text)
    return read_script(path, {}).launches


def assessed(folder: Path, text: str):
    path = folder / "run.sh"
    path.write_text(text)
    return [assess(training, {}) for training in read_recipe(path, {})]


@pytest.mark.parametrize(
    "quoted",
    [
        "'$LAUNCHER --node_rank $SLURM_PROCID $CMD'",
        '"$LAUNCHER --node_rank \\$SLURM_PROCID $CMD"',
    ],
)
@pytest.mark.parametrize(
    "shell", ["bash -c", "srun --jobid $ID bash -c", "srun -lu sh -c", "/bin/bash -lc"]
)
def test_the_text_after_bash_c_is_read(tmp_path, shell, quoted):
    (launch,) = launches(
        tmp_path,
        'export LAUNCHER="python -m torch.distributed.launch --nproc_per_node 8 '
        f'--nnodes 2"\nexport CMD=" `pwd`/pretrain_gpt.py --lr 1"\n'
        f"clear; {shell} {quoted} 2>&1 | tee log.txt\n",
    )
    assert launch.words == ("--lr", "1") and launch.ranks == 16


def test_a_loop_is_read_with_each_of_its_values(tmp_path):
    text = """
DATA=""
for part in a b "c d"; do DATA="$DATA 1.0 $part"; done
for ((i=1; i<=3; i++)); do SUM="$SUM$i"; done
for seed in 1 2; do torchrun pretrain_gpt.py --seed $seed --data-path $DATA --sum x$SUM; done
while read line; do torchrun pretrain_gpt.py --wrong; done
"""
    assert [
        [shown(word) for word in launch.words[:2]]
        for launch in launches(tmp_path, text)
    ] == [["--seed", "1"], ["--seed", "2"]]
    words = list(launches(tmp_path, text)[0].words)
    assert words[3:10] == ["1.0", "a", "1.0", "b", "1.0", "c", "d"] and words[
        -1
    ].endswith("123")


def test_a_loop_over_more_values_than_are_read_ends(tmp_path):
    found = launches(
        tmp_path, "for ((i=0; i<1000000000; i++)); do torchrun p.py --n $i; done"
    )
    assert len(found) == 100


def test_what_a_function_prints_is_known_and_what_a_program_prints_is_not(tmp_path):
    (launch,) = launches(
        tmp_path,
        """
model_args() { local L=$1; echo "--num-layers $L --hidden-size 64"; }
L=7
torchrun pretrain_gpt.py $(model_args 2) --seed $(echo 5) --n $(nvidia-smi | wc -l) --last `echo $L`
""",
    )
    words = [shown(word) for word in launch.words]
    assert words == [
        *"--num-layers 2 --hidden-size 64 --seed 5".split(),
        "--n",
        "$(nvidia-smi | wc -l)",
        "--last",
        "7",
    ]


def test_a_script_that_a_recipe_writes_and_submits_is_read(tmp_path):
    (launch,) = launches(
        tmp_path,
        "LR=3\ncat > job.sbatch <<EOF\n#!/bin/bash\nsrun torchrun "
        "pretrain_gpt.py --lr $LR\nEOF\nsbatch job.sbatch\n",
    )
    assert launch.words == ("--lr", "3")


@pytest.mark.parametrize(
    "text, count",
    [("node1:0,1@node2:2,3", 4), ("localhost:0", 1), ("node1@node2:0", None)],
)
def test_devices_of_the_deepspeed_launcher_are_counted(tmp_path, text, count):
    assert included_devices(text) == count
    (launch,) = launches(tmp_path, f"deepspeed --include={text} pretrain_gpt.py --lr 1")
    assert launch.ranks == count


def test_a_gap_that_the_reader_fills_is_not_checked(tmp_path):
    (assessment,) = assessed(
        tmp_path,
        f"""
SAVE="your model save path"; TOKENIZER=
ARGS="--save $SAVE --tokenizer-model $TOKENIZER --tokenizer-name-or-path PATH OF THE TOKENIZER"
torchrun pretrain_gpt.py {TINY} $ARGS
""",
    )
    assert assessment.is_accepted
    assert [v.text for v in assessment.verdicts if "gap" in v.text] == [
        f"{flag} (a gap that the reader fills)"
        for flag in ("--save", "--tokenizer-model", "--tokenizer-model")
    ]


@pytest.mark.parametrize(
    "name, text, kind",
    [
        ("ds_config", '{"fp16": {"enabled": true}}', "JSON"),
        ("config.txt", "# x\nnum_layers: 2\n", "YAML"),
        ("train", "#!/bin/bash\nX=1\n", "shell"),
        ("a.json", "x", "JSON"),
        ("b.yml", "{a: 1}", "YAML"),
        ("run.job", "export A=1\n", "shell"),
        ("empty", "", "shell"),
    ],
)
def test_a_file_of_any_name_is_recognised_by_how_it_begins(tmp_path, name, text, kind):
    (tmp_path / name).write_text(text)
    assert kind_of(tmp_path / name) == kind


def test_check_recipe_judges_a_json_for_its_reader(tmp_path, capsys):
    (tmp_path / "ds").write_text(
        '{"train_batch_size": 4, "torch_autocast": {"enabled": true}, '
        '"optimizer": {"type": "Adam", "params": {"lr": 0.001}}}'
    )
    found = {}
    for reader in ("train", "engine"):
        code = check.main(["--for", reader, str(tmp_path / "ds")])
        found[reader] = code, capsys.readouterr().out
    assert found["engine"] == (
        0,
        f"{tmp_path / 'ds'}, for megatron_ds.initialize: accepted\n",
    )
    assert found["train"][0] == 1 and "for pretrain_gpt.py" in found["train"][1]
    assert "torch_autocast" in found["train"][1].partition("refused:")[2]


def test_a_json_for_an_engine_is_checked_with_values_for_auto(tmp_path, capsys):
    """Programs fill them; what else is wrong with the JSON is found."""
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}
    block = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": optimizer,
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"},
    }
    path = tmp_path / "ds.json"
    found = []
    for more in ({}, {"zero_optimization": {"stage": 4}}, {"optimizer": "auto"}):
        path.write_text(json.dumps(block | more))
        code = check.main(["--for", "engine", "--world-size", "4", str(path)])
        found.append((code, capsys.readouterr().out))
    assert [code for code, _ in found] == [0, 1, 1]
    assert "initialize: accepted; the program fills" in found[0][1]
    filled = found[0][1].partition("Trainer: ")[2]
    assert filled.count(",") == 6 and "scheduler.params.total_num_steps" in filled
    assert '"zero_optimization.stage"' in found[1][1] and '"optimizer"' in found[2][1]


def test_a_flag_that_is_refused_with_any_value_is_refused_with_an_unknown_one(tmp_path):
    for flag in ("--fp8-format", "--outer-sync-interval", "--kd-temp"):
        (assessment,) = assessed(
            tmp_path, f"torchrun pretrain_gpt.py {TINY} {flag} $VALUE"
        )
        assert [
            verdict.name
            for verdict in assessment.verdicts
            if verdict.kind is Kind.REFUSED
        ] == [flag]


def test_groups_and_files_of_split_paths_may_have_unknown_values(tmp_path):
    on_text = TINY.replace("--mock-data", "--tokenizer-type NullTokenizer")
    for words in (
        "-path $VALUE",
        "-path $DIR/p31_train.txt",
        ' "TRAIN: 1 0:0.9 $CORPUS"',
        " $GROUP",
    ):
        run = f"torchrun pretrain_gpt.py {on_text} --train-weighted-split-paths{words}"
        (assessment,) = assessed(tmp_path, run)
        assert assessment.is_accepted, (words, assessment)


def test_unknown_files_of_a_vocabulary_imply_its_tokenizer(tmp_path):
    tiny = TINY.replace("--mock-data", "--data-path corpus")
    (assessment,) = assessed(
        tmp_path, f"torchrun pretrain_gpt.py {tiny} --vocab-file $V --merge-file $M"
    )
    assert assessment.is_accepted


def test_several_words_of_a_number_are_no_gap(tmp_path):
    (assessment,) = assessed(
        tmp_path, f"torchrun pretrain_gpt.py {TINY} --seed one two"
    )
    assert not assessment.is_accepted


def test_options_in_an_unknown_variable_may_set_what_is_missing(tmp_path):
    tiny = TINY.replace("--mock-data", "")
    (known,) = assessed(tmp_path, f"torchrun pretrain_gpt.py {tiny} --bf16")
    (unknown,) = assessed(
        tmp_path,
        f"torchrun pretrain_gpt.py {tiny} --bf16 $MORE --train-mode pretrain $LAST",
    )
    assert "missing: the data" in known.problems[0]
    assert unknown.is_accepted
    (mode,) = (
        verdict for verdict in unknown.verdicts if verdict.name == "--train-mode"
    )
    assert mode.kind is Kind.ACCEPTED


def test_the_configuration_of_a_recipe_has_the_values_of_its_json(tmp_path):
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": 4, "zero_optimization": {"stage": 2}}'
    )
    run = f"torchrun pretrain_gpt.py {TINY} --deepspeed --deepspeed_config ds.json"
    (tmp_path / "run.sh").write_text(run)
    (training,) = read_recipe(tmp_path / "run.sh", {})
    config = config_of(training, 1)
    assert config.zero.stage == 2 and config.train.global_batch_size == 4
