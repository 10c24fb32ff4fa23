"""Shell recipes are read as bash would run them, without running them; every flag and key gets a verdict."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_ds.compat.recipes.file import read_recipe
from megatron_ds.compat.recipes.shell_script import read_script
from megatron_ds.compat.recipes.shell_values import shown
from megatron_ds.compat.recipes.verdict import Kind, assess
from megatron_ds.errors import ConfigError
from tests.harness.limits import HUNG

pytestmark = pytest.mark.plan

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--train-iters 4 --lr 1e-3 --mock-data --vocab-size 61"
)

STYLES = {
    "variables and continuations": r"""
GPUS=4   # a comment
LR=6.0e-4; BASE="lr ${LR}"
torchrun --nproc_per_node $GPUS pretrain_gpt.py \
    --lr $LR \
    --save "${HOME_DIR:-runs}/${BASE// /_}" --split '969, 30, 1' --seed=7
""",
    "arrays": r"""
MODEL=( --num-layers 12   # of the model
        --hidden-size $((64 * 12)) )
EXTRA=()
if [[ "${MOCK:-yes}" == "yes" ]] && [ -z "$OTHER" ]; then
    EXTRA+=("--mock-data" "--split '99,1,0'" "--vocab-size 50304")
elif [ 3 -gt 2 ]; then EXTRA+=(--wrong)
else
    EXTRA+=(--wrong-too)
fi
torchrun --nproc-per-node=2 pretrain_gpt.py ${MODEL[@]} "${EXTRA[@]}" ${EXTRA[@]} --flag "${#MODEL[@]}"
""",
    "strings that grow": r"""
DTYPE=bf16
options=" \
    --num-layers 4 \
    --${DTYPE}"
options="${options} --lr 1e-3"
options+=" --seq-length $(( 2 ** 3 * 16 / 2 ))"
for size in 7 8; do last=$size; break_here=1; done
case "$DTYPE" in
  fp*) options="--wrong" ;;
  bf16|bf8) options="$options --eval-iters ${EVALS-3}" ;;
esac
[[ $DTYPE == *16 ]] && options="$options --use-flash-attn" || options=wrong
run() { torchrun pretrain_gpt.py $1 --seed "$2" $@; }
run "$options" 5
""",
    "names that are removed": r"""
run() {
  first=$1; shift
  torchrun pretrain_gpt.py --first $first --seed "$1" "$@" ${SIZE:+--size $SIZE} \
    --name "x$NAME" ${NAME-none} $NAME "${LIST[@]}" --last "$3"
}
other() { torchrun pretrain_gpt.py --wrong; }
SIZE=4; NAME=old; LIST=(--wrong 1)
unset SIZE NAME LIST; unset -f other
other; run 1 2 3 4
""",
    "a command in a string": r"""
NAME="gpt-${X:-1}"
NAME=${NAME%-*}_${NAME##*-}
cmd="torchrun --nnodes 2 --nproc_per_node 4 pretrain_gpt.py --save '/tmp/a b/${NAME}' --num-layers 2 \
     ${VP:+--num-layers-per-virtual-pipeline-stage "$VP"} --fp16 &> log.txt"
eval ${cmd}
""",
    "blocks in pipes and lists": r"""
depth() ( echo "--num-layers 4" )
printf 'a b\n' | while read -r a b; do WRONG=1; done | cat
(cd / && true) && FIRST=one
false || (SECOND=wrong; true) && SECOND=two
if true; then THIRD=three; fi > log 2>&1
case x in y) FOURTH=wrong ;;& x) FOURTH=four ;& z) : ;; esac | cat
case x in y) FOURTH=wrong ;;& x) FOURTH=four ;& z) : ;; esac
while read -r word; do WRONG=$word; done < <(echo FIFTH=wrong)
cat <<EOF | sed s/x/y/ > log
FIRST=$FIRST
EOF
{ torchrun pretrain_gpt.py --names $FIRST $SECOND $THIRD $FOURTH $(depth); } 2>&1 | tee -a log && true
""",
}


def as_bash_runs_it(script: str, folder: Path) -> list[str]:
    """The words that the training command gets; torchrun is a function that prints them."""
    stub = 'torchrun() { printf "%s\\0" "$@" > "$WORDS"; }\n'
    path = folder / "run.sh"
    path.write_text(stub + script)
    subprocess.run(
        ["bash", path],
        check=True,
        cwd=folder,
        timeout=HUNG,
        capture_output=True,
        env={"PATH": "/usr/bin:/bin", "WORDS": str(folder / "words")},
    )
    return (folder / "words").read_text().split("\0")[:-1]


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
@pytest.mark.parametrize("script", STYLES.values(), ids=list(STYLES))
def test_a_script_is_read_as_bash_runs_it(script, tmp_path):
    words = as_bash_runs_it(script, tmp_path)
    (tmp_path / "train.sh").write_text(script)
    (launch,) = read_script(tmp_path / "train.sh", {}).launches
    after = words[words.index("pretrain_gpt.py") + 1 :]
    assert [shown(word) for word in launch.words] == after and len(after) > 4


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
def test_here_documents_are_the_files_that_bash_writes(tmp_path):
    script = r"""
A=1
cat <<EOF > list.json && echo written
{"a": $A}
EOF
cat <<-'EOF' | sed s/old/new/ > piped.json
	{"old": $A}
	EOF
cat <<ONE <<"TWO" > last.json
$A
ONE
$A
TWO
cat > empty.json <<EOF
EOF
"""
    path = tmp_path / "run.sh"
    path.write_text(script)
    subprocess.run(
        ["bash", path], check=True, cwd=tmp_path, timeout=HUNG, capture_output=True
    )
    written = {file.name: file.read_text() for file in tmp_path.glob("*.json")}
    found = read_script(path, {}).files
    assert {name: f"{text}\n".lstrip("\n") for name, text in found.items()} == written
    assert len(written) == 4 and written["piped.json"] == '{"new": $A}\n'


def test_nothing_in_a_script_is_executed(tmp_path):
    victim = tmp_path / "victim"
    path = tmp_path / "train.sh"
    path.write_text(
        f"touch {victim}\nX=$(touch {victim})\nY=`touch {victim}`\nZ=$((1 + $(touch {victim}; "
        f"echo 2)))\neval 'touch {victim}'\ncat > {victim} <<EOF\nx\nEOF\n"
        f"A[$(touch {victim})]=3\npython pretrain_gpt.py --num-layers $X --seed $Z "
        f"--lr $(({'9**' * 50}9)) > {victim}\n"
    )
    (launch,) = read_script(path, {}).launches
    assert not victim.exists() and shown(launch.words[1]).startswith("$(touch")


def test_templates_are_those_that_sed_would_write_and_here_documents_are_files(
    tmp_path,
):
    (tmp_path / "TEMPLATE.json").write_text(
        '{"train_batch_size": GBS, "zero_optimization": {"stage": ZS},\n'
        '"fp16": {"enabled": ON, "initial_scale_power": 11}}'
    )
    script = f"""
STAGE=1
sed "s/GBS/8/" TEMPLATE.json | sed "s/ZS/${{STAGE}}/" | sed 's#ON#true#' > ds_$STAGE.json
deepspeed --num_gpus 2 pretrain_gpt.py {TINY} --fp16 --deepspeed --deepspeed_config ds_$STAGE.json
cat <<EOT > other.json
{{"train_batch_size": $((4 * 4)), "zero_optimization": {{"stage": $STAGE}}}}
EOT
deepspeed --num_gpus 2 pretrain_gpt.py {TINY} --deepspeed_config=other.json
"""
    (tmp_path / "train.sh").write_text(script)
    first, second = read_recipe(tmp_path / "train.sh", {})
    one, two = assess(first, {}), assess(second, {})
    assert one.is_accepted and two.is_accepted and one.ranks == 2
    values = {verdict.name: verdict.value for verdict in one.verdicts}
    assert (
        values["train_batch_size"] == "8" and values["zero_optimization.stage"] == "1"
    )
    assert {verdict.name: verdict.value for verdict in two.verdicts}[
        "train_batch_size"
    ] == "16"


def test_every_flag_has_its_verdict_and_the_command_has_what_is_done(tmp_path):
    recipe = tmp_path / "train.sh"
    recipe.write_text(
        f"python pretrain_gpt.py {TINY} --save $1 --use-mcore-models --data-impl mmap "
        "--use-mup --num-layrs 3 --use-persistent-ckpt-worker"
    )
    assessed = assess(*read_recipe(recipe, {}), {})
    kinds = {verdict.name: verdict.kind for verdict in assessed.verdicts}
    assert (kinds["--lr"], kinds["--save"], kinds["--use-persistent-ckpt-worker"]) == (
        Kind.DONE,
        Kind.DONE,
        Kind.ACCEPTED,
    )
    assert (kinds["--use-mup"], kinds["--num-layrs"]) == (
        Kind.REFUSED,
        Kind.UNKNOWN,
    )
    assert "did you mean '--num-layers'" in next(
        v.text for v in assessed.verdicts if v.name == "--num-layrs"
    )
    assert not assessed.is_accepted and assessed.command == ()
    recipe.write_text(
        f"python pretrain_gpt.py {TINY} --save $1 --use-mcore-models --bf16"
    )
    command = assess(*read_recipe(recipe, {}, ["runs/a"]), {}).command
    assert command[:6] == (
        "torchrun",
        "--nproc-per-node",
        "1",
        "-m",
        "megatron_ds",
        "train",
    )
    assert "--use-mcore-models" not in command and command[-3:] == (
        "--save",
        "runs/a",
        "--bf16",
    )


def test_a_line_for_deepspeeds_launcher_keeps_its_words(tmp_path):
    """The launcher of this package takes them, but not for another number of ranks."""
    recipe = tmp_path / "train.sh"
    recipe.write_text(
        "exec /opt/bin/deepspeed --hostfile hosts -i a:0,1 --num_gpus 2 --no_python pretrain_gpt.py "
        f"{TINY} --mock-data"
    )
    (training,) = read_recipe(recipe, {})
    command = assess(training, {}).command
    launcher = "megatron-ds launch --hostfile hosts -i a:0,1 --num_gpus 2 --module"
    assert command[:11] == (*launcher.split(), "megatron_ds", "train")
    assert assess(training, {}, ranks=4).command[0] == "torchrun"


def test_a_yaml_of_megatrons_tests_and_a_json_are_recipes(tmp_path):
    words = TINY.split()
    lines = [f"  {flag}: {value}" for flag, value in zip(words[0:14:2], words[1:14:2])]
    path = tmp_path / "model_config.yaml"
    path.write_text(
        "ENV_VARS:\n  A: 1\nMODEL_ARGS:\n"
        + "\n".join(
            [
                *lines,
                "  --mock-data: true",
                "  --vocab-size: 61",
                "  --save: ${SAVE_PATH}",
                "  --train-data-path: [a b]",
                "  --split: 949,50,1",
                "  --window-size: 127 0",
                "  --bf16: true",
            ]
        )
    )
    (training,) = read_recipe(path, {})
    assert training.words[-9:] == (
        "--train-data-path",
        "a",
        "b",
        "--split",
        "949,50,1",
        "--window-size",
        "127",
        "0",
        "--bf16",
    )
    assert {verdict.kind for verdict in assess(training, {}).verdicts} == {Kind.DONE}
    cfg = tmp_path / "cfg.yaml"
    cfg.write_text(
        "language_model:\n  num_layers: 2\n  add_bias_linear: false\nbf16: true\nlr: 1e-3\n"
    )
    words = read_recipe(cfg, {})[0].words
    assert words == (
        "--num-layers",
        "2",
        "--disable-bias-linear",
        "--bf16",
        "--lr",
        "1e-3",
    )
    ds = tmp_path / "ds.json"
    ds.write_text(
        json.dumps(
            {
                "train_batch_size": 8,
                "amp": {"enabled": True},
                "dump_state": False,
                "zero_optimization": {"stage": 2, "contiguous_gradients": True},
            }
        )
    )
    kinds = {
        verdict.name: verdict.kind
        for verdict in assess(*read_recipe(ds, {}), {}).verdicts
    }
    assert kinds == {
        "train_batch_size": Kind.DONE,
        "zero_optimization.stage": Kind.DONE,
        "zero_optimization.contiguous_gradients": Kind.ACCEPTED,
        "amp": Kind.REFUSED,
    }


def test_names_of_a_yaml_cfg_that_are_false_are_not_lost(tmp_path):
    def words_of(text):
        (tmp_path / "cfg.yaml").write_text(text)
        (training,) = read_recipe(tmp_path / "cfg.yaml", {})
        return training

    assert words_of(
        "bert_binary_head: false\nqk_layernorm: false\nasync_save: false\n"
    ).words == ("--no-bert-binary-head",)
    switches = words_of(
        "disable_bias_linear: false\nadd_bias_linear: true\nswiglu: true\n"
    )
    assert switches.words == ("--swiglu",)
    assert words_of("activation_func: swiglu\ngated_linear_unit: true\n").words == (
        "--swiglu",
    )
    assert words_of("activation_func: [swiglu]\n").words == (
        "--activation-func",
        "swiglu",
    )
    for text in ("frobnicate: false\n", "gated_linear_unit: true\n"):
        (verdict,) = assess(words_of(text), {}).verdicts
        assert (
            verdict.kind is Kind.UNKNOWN
            and text.partition("_")[0].partition(":")[0] in verdict.name
        )


@pytest.mark.parametrize("value", ["3", "[a, b]", "word"])
def test_model_args_that_are_no_block_are_one_clear_error(value, tmp_path):
    (tmp_path / "model_config.yaml").write_text(f"MODEL_ARGS: {value}\n")
    with pytest.raises(ConfigError, match="MODEL_ARGS should be a block"):
        read_recipe(tmp_path / "model_config.yaml", {})


@pytest.mark.parametrize(
    "words, problem",
    [
        ("--zero-stage 1 --use-torch-fsdp2", "contradict each other"),
        ("--zero-stage 2 --use-distributed-optimizer", ""),
    ],
)
def test_flags_of_a_recipe_are_compared_with_each_other(words, problem, tmp_path):
    (tmp_path / "train.sh").write_text(f"python pretrain_gpt.py {TINY} {words}")
    assessed = assess(*read_recipe(tmp_path / "train.sh", {}), {})
    assert assessed.is_accepted == (not problem)
    assert [problem in text for text in assessed.problems] == [True] * bool(problem)


def test_a_key_that_occurs_twice_in_a_json_is_refused(tmp_path):
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "train_batch_size": 4}')
    (verdict,) = assess(*read_recipe(tmp_path / "ds.json", {}), {}).verdicts
    assert (
        verdict.kind is Kind.REFUSED
        and "'train_batch_size' occurs twice" in verdict.text
    )


@pytest.mark.parametrize(
    "text, says",
    [
        ("echo 'no end", "line 1: ' is not closed"),
        ("if true; then\necho", "'fi' is missing"),
        ("echo hello", "no training command"),
        ("fi", "closes no block"),
        ("x=$((", "is not closed"),
        ("if x; then " * 70, "nested more than"),
        ("( " * 70, "nested more than"),
        ("ls )", "')' closes no block"),
        ("(ls", "')' is missing"),
        ("ls &&", "line 1: the end is not expected"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_clear_error(text, says, tmp_path):
    (tmp_path / "train.sh").write_text(text)
    with pytest.raises(ConfigError, match="train.sh") as error:
        read_recipe(tmp_path / "train.sh", {})
    assert says in str(error.value)


def test_any_text_ends_as_a_recipe_or_as_an_error_with_its_place(tmp_path):
    script, path = "\n".join(STYLES.values()), tmp_path / "train.sh"
    trainings, errors = [], []
    for cut in range(0, len(script), 37):
        path.write_text(script[cut:] + script[: cut // 2])
        try:
            trainings += read_recipe(path, {})
        except ConfigError as error:
            errors.append(str(error))
    assert trainings and all(assess(training, {}).verdicts for training in trainings)
    place = re.compile(
        rf"{re.escape(str(path))}: (line \d+: .* (is not closed|closes no block|is missing)\.|"
        "no training command in it: )"
    )
    assert errors and all(map(place.match, errors))
