"""The recipes in examples/ are shell that parses, start ranks that would train, and, in small, do so."""

import json
import math
import os
import re
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest

from megatron_ds.config import parse
from megatron_ds.data.tokenizers import TOKENIZERS
from megatron_ds.extensions.data_efficiency.curricula import length_difficulty
from megatron_ds.extensions.data_efficiency.options import CurriculumConfig
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.models.identity import model_identity, with_positions_of
from tests.harness.documents import ROOT, blocks_of, check_printed, environment
from tests.harness.launches import sbatch_environment, started_by, trainings
from tests.harness.limits import HUNG
from tests.harness.warm import warm_environment

pytestmark = pytest.mark.processes

EXAMPLES = sorted(
    path for path in (ROOT / "examples").iterdir() if path.suffix in (".sh", ".sbatch")
)
TORCHRUN, SBATCH, BERT, MIXTRAL, MOE = (
    ROOT / "examples" / name
    for name in (
        "gpt3_torchrun.sh",
        "llama_7b.sbatch",
        "bert_tiny_cpu.sh",
        "mixtral_8x7b.sbatch",
        "moe_tiny_cpu.sh",
    )
)


def started(recipe, folder, *arguments, **env):
    script = recipe.read_text(encoding="utf-8")
    commands = started_by(script, folder, env, arguments)
    found = trainings(commands, sbatch_environment(script))
    with chdir(ROOT):
        return [(s, s.config()) for s in found], commands


@pytest.mark.parametrize("recipe", EXAMPLES, ids=lambda path: path.name)
def test_a_recipe_is_shell(recipe):
    checked = subprocess.run(
        ["bash", "-n", str(recipe)], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    "size, nodes, parameters", [("125m", 1, 124e6), ("345m", 2, 354e6)]
)
def test_gpt3_by_torchrun_is_of_its_size_and_waits_for_a_save(
    tmp_path, size, nodes, parameters
):
    [(one, config)], [command] = started(
        TORCHRUN, tmp_path, size, NNODES=str(nodes), HEAD="node1"
    )
    assert one.world_size == 8 * nodes == config.data_parallel_size
    m = config.model
    assert (
        12 * m.num_layers * m.hidden_size** 2 + 50257 * m.hidden_size
        == pytest.approx(parameters, rel=0.01)
    )
    assert config.train.train_samples * m.seq_length == pytest.approx(300e9, rel=1e-6)
    assert config.data.tokenizer_type in TOKENIZERS
    assert int(
        command[command.index("--shutdown-timeout") + 1]
    ) >= 300 and "SIGUSR1" in " ".join(command)


@pytest.mark.parametrize(
    "before, after, again",
    [(None, 2000, True), (2000, 3000, True), (2000, 2000, False), (4000, 5000, False)],
)
def test_a_slurm_job_is_queued_again_while_it_gets_on_and_is_not_done(
    tmp_path, before, after, again
):
    save = tmp_path / "run"
    save.mkdir()
    tracker = save / "latest_checkpointed_iteration.txt"
    if before is not None:
        tracker.write_text(str(before))
    moved = SBATCH.read_text().replace(
        '\nafter="$(steps_done)"', f'\necho {after} > {tracker}\nafter="$(steps_done)"'
    )
    recipe = tmp_path / "moved.sbatch"
    recipe.write_text(moved)
    [(one, config)], commands = started(recipe, tmp_path, SAVE=str(save), STEPS="5000")
    assert (["scontrol", "requeue", "7"] in commands) is again
    p = config.parallel
    assert one.world_size == 16 and (
        p.tensor_model_parallel_size,
        p.pipeline_model_parallel_size,
    ) == (4, 2)
    assert (
        config.checkpoint.save == config.checkpoint.load == str(save)
        and config.train.train_iters == 5000
    )


@pytest.mark.parametrize("recipe", [SBATCH, MIXTRAL], ids=lambda path: path.name)
def test_a_slurm_job_is_told_of_its_time_limit_through_its_ranks(recipe):
    """`--signal=B:…` would reach this shell alone, which has nothing to save."""
    (signal,) = re.findall(
        r"^#SBATCH --signal=(\S+)$", recipe.read_text(), re.MULTILINE
    )
    assert re.fullmatch(r"USR1@\d{3,}", signal)


def test_mixtral_has_its_published_number_of_parameters_and_fits_its_gpus(tmp_path):
    [(one, config)], _ = started(MIXTRAL, tmp_path)
    assert one.world_size == 32 and config.parallel.expert_model_parallel_size == 8
    plan = plan_world(config)
    h = 4096
    f = 14336
    layers = 32
    experts = 8
    vocab = 32000
    attention = 2 * h * h + 2 * h * h // 4  # 8 key-value heads for 32 queries
    block = attention + experts * (3 * h * f + h) + 2 * h
    assert plan.parameters == layers * block + 2 * vocab * h + h == 46_702_792_704
    assert plan.rank_plan(0).parameters < plan.parameters / 16


def launched_by(recipe, tmp_path, **env):
    """The commands that start ranks. A stand-in of Python receives them and makes the metrics that a run
    leaves behind."""
    python = tmp_path / "python"
    python.write_text(f"""#!{sys.executable}
import json, pathlib, sys
with open({str(tmp_path / "log")!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if "--metrics-path" in sys.argv:
    pathlib.Path(sys.argv[sys.argv.index("--metrics-path") + 1]).touch()
""")
    python.chmod(0o755)
    subprocess.run(
        ["bash", str(ROOT / "examples" / recipe), "out"],
        cwd=tmp_path,
        check=True,
        env=environment() | env | {"PYTHON": str(python)},
        timeout=HUNG,
        stdout=subprocess.DEVNULL,
    )
    commands = [
        json.loads(line) for line in (tmp_path / "log").read_text().splitlines()
    ]
    return [
        words
        for words in commands
        if any(word.endswith("pretrain_gpt.py") for word in words)
    ]


def test_the_recipe_of_data_efficiency_trains_plainly_and_then_with_short_sequences_and_dropped_tokens(
    tmp_path,
):
    launches = launched_by("data_efficiency_cpu.sh", tmp_path, STEPS="60")
    with chdir(tmp_path):
        plain, efficient = (
            parse(words[words.index(str(ROOT / "pretrain_gpt.py")) + 1 :], world_size=2)
            for words in launches
        )
    assert (
        plain.kept_tokens is None and plain.of(CurriculumConfig).curriculum_type is None
    )
    drop = efficient.kept_tokens
    assert drop.blocks == (1, 2, 3, 4) and [
        drop.kept_at(t) for t in (0, 20, 40, 59)
    ] == [64, 160, 256, 256]
    lengths = length_difficulty(
        efficient.of(CurriculumConfig), efficient.model.seq_length
    )
    assert [lengths.at(t) for t in (1, 15, 30, 60)] == [32, 128, 256, 256]
    assert efficient.train == plain.train and efficient.optimizer == plain.optimizer


def test_the_recipe_that_lengthens_a_model_trains_short_evaluates_and_trains_long(
    tmp_path,
):
    """A stand-in of Python receives its commands; the tokens of each run are those of its length."""
    launches = launched_by("lengthen_context_cpu.sh", tmp_path, STEPS="40")
    with chdir(tmp_path):
        short, as_it_is, scaled, trained = (
            parse(words[words.index(str(ROOT / "pretrain_gpt.py")) + 1 :], world_size=2)
            for words in launches
        )
    assert (
        short.checkpoint.save == trained.checkpoint.load == "out/short"
        and short.model.seq_length == 512
    )
    for run, kind, steps in (
        (as_it_is, "rope", 0),
        (scaled, "yarn", 0),
        (trained, "yarn", 4),
    ):
        model = run.model
        assert (
            run.checkpoint.finetune
            and run.train.train_iters == steps
            and model.seq_length == 4096
        )
        assert model.position_embedding_type == kind and model.positions == 4096
        assert (
            run.train.global_batch_size * 4096
            == short.train.global_batch_size * 512 * 2
        )
        fitting = with_positions_of(model_identity(model), model_identity(short.model))
        assert fitting == model_identity(model)
    assert trained.model.yarn_factor == 8.0


def test_the_bert_recipe_makes_sentences_and_trains_at_two_layouts(tmp_path):
    """Its commands for data are those of docs/use/bert.md, which a test runs; here they find their work
    done."""
    out = tmp_path / "out"
    for name in ("corpus.jsonl", "tokenizer/vocab.txt", "corpus_text_sentence.idx"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    script = (
        BERT.read_text()
        .replace('"$PYTHON" -m torch.distributed.run', "command torchrun")
        .replace('"$PYTHON" "$here/tools/plot_loss.py"', "true")
    )
    found = trainings(started_by(script, tmp_path, {"STEPS": "40"}, ("out",)))
    split, piped = (started.config() for started in found)
    assert {s.script for s in found} == {"pretrain_bert.py"} and {
        s.world_size for s in found
    } == {2}
    assert (
        split.parallel.tensor_model_parallel_size == 2
        and split.parallel.sequence_parallel
    )
    assert (
        piped.parallel.pipeline_model_parallel_size == 2
        and split.train.exit_interval == 20
    )
    assert (
        split.model == piped.model
        and split.model.model == "bert"
        and split.checkpoint == piped.checkpoint
    )


def test_the_quickstart_in_small_ends_with_a_curve_and_a_text(tmp_path):
    command = ["bash", str(ROOT / "examples" / "gpt_tiny_cpu.sh"), "out"]
    where = warm_environment(environment()) | {"STEPS": "20"}
    done = subprocess.run(
        command, cwd=tmp_path, env=where, capture_output=True, text=True, timeout=HUNG
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = [
        json.loads(line)
        for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    trained = [r for r in records if r["kind"] == "train"]
    assert trained[-1]["step"] == 20 and trained[-1]["loss"] < math.log(2048) - 0.2
    (printed,) = [
        block
        for block in blocks_of("docs/start/quickstart.md")
        if block.mark == "printed by: examples/gpt_tiny_cpu.sh"
    ]
    check_printed(printed, done.stdout)
    assert "tp 1 × pp 2 × dp 2" in done.stdout
    assert "loaded out/checkpoints, iteration 4" in done.stdout
    assert (tmp_path / "out" / "loss.png").stat().st_size > 10_000
    text = done.stdout.partition("Sample text from the trained model:")[2].partition(
        "loss curve:"
    )[0]
    assert text.strip().startswith("If the file") and len(text) > 100
    run_in_a_new_shell(
        re.findall(
            r"^    (\S.*)$",
            done.stdout.partition("Commands to try next:")[2],
            re.MULTILINE,
        ),
        tmp_path,
    )


def test_the_recipe_with_experts_in_small_continues_with_other_sizes_and_ends_with_a_text(
    tmp_path,
):
    command = ["bash", str(MOE), "out"]
    where = warm_environment(environment()) | {"STEPS": "9"}
    done = subprocess.run(
        command, cwd=tmp_path, env=where, capture_output=True, text=True, timeout=HUNG
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    first, second = done.stdout.split("== 3. continue")
    assert "grid: 4 ranks = tp 2 × ep 2 × pp 1 × dp 2" in first
    assert "grid: 4 ranks = tp 1 × ep 4 × pp 1 × dp 4" in second
    assert "loaded out/checkpoints, iteration 3" in second and "loaded" not in first
    assert (
        done.stdout.count("experts: 8 in layers 1 to 3; of width 176; 2 for a token")
        == 2
    )
    out = tmp_path / "out"
    records = [
        json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()
    ]
    trained = [r for r in records if r["kind"] == "train"]
    assert [r["step"] for r in trained] == list(range(1, 10))
    assert trained[-1]["loss"] < math.log(2048) - 0.2
    assert all(
        1 <= r[f"decoder.layers.{layer}_max_load"] <= 4
        for r in trained
        for layer in (1, 2, 3)
    )
    assert (
        min((out / f"{name}.png").stat().st_size for name in ("loss", "expert_load"))
        > 10_000
    )
    text = second.partition("Sample text from the trained model:")[2].partition(
        "loss curve:"
    )[0]
    assert text.strip().startswith("If the file") and len(text) > 80


def test_the_recipe_of_long_sequences_in_small_continues_on_one_rank(tmp_path):
    (tmp_path / "out").mkdir()
    words = [
        " ".join(f"word{i * k % 997}" for i in range(1, 300)) for k in range(1, 60)
    ]
    (tmp_path / "out" / "corpus.jsonl").write_text(
        "\n".join(json.dumps({"text": text}) for text in words)
    )
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "long_context_cpu.sh"), "out"],
        cwd=tmp_path,
        env=warm_environment(environment())
        | {"STEPS": "4", "LENGTH": "512", "COMM": "p2p"},
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    planned, first, second = re.split("== [34]. .*", done.stdout)
    assert (
        "context: each of 4 ranks holds 128 of the 512 tokens of a sequence, in two chunks"
        in planned
    )
    assert (
        "a2a cannot divide" not in planned
        and "grid: 4 ranks = tp 1 × cp 4 × pp 1 × dp 1" in first
    )
    assert (
        "grid: 1 rank = tp 1 × pp 1 × dp 1" in second
        and "loaded out/checkpoints, iteration 2" in second
    )
    records = [
        json.loads(line)
        for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    trained = [r for r in records if r["kind"] == "train"]
    assert [r["step"] for r in trained] == [1, 2, 3, 4] and trained[-1][
        "loss"
    ] < trained[0]["loss"]
    assert [r["tokens"] for r in trained] == [512, 1024, 1536, 2048]  # ranks share them
    flops = [
        r["tflops_per_rank"] * ranks * r["step_seconds"]
        for r, ranks in zip(trained, (4, 4, 1, 1))
    ]
    assert flops == pytest.approx([flops[0]] * 4, rel=1e-3)
    assert {r["step"] for r in records if r["kind"] == "validation"} >= {2, 4}
    assert (tmp_path / "out" / "loss.png").stat().st_size > 10_000


def test_the_recipe_of_conversations_trains_on_answers_and_asks_both_models(tmp_path):
    (tmp_path / "out").mkdir()
    texts = [
        {"text": f"the theory of thing number {i} and its words"} for i in range(400)
    ]
    lines = "\n".join(map(json.dumps, texts))
    (tmp_path / "out" / "corpus.jsonl").write_text(lines)
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "finetune_cpu.sh"), "out"],
        cwd=tmp_path,
        env=warm_environment(environment()) | {"BASE_STEPS": "2", "STEPS": "2"},
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"Question: .*\nAnswer:\s*⟦.*<\|endoftext\|>⟧", done.stdout)
    assert "sft true" in done.stdout and "loaded out/base" in done.stdout
    before, after = done.stdout.partition("before:")[2].split("after:")
    assert "math.sqrt" in before and "math.sqrt" in after


def test_the_recipe_of_llama_fine_tunes_a_folder_of_hugging_face_and_writes_one(
    tmp_path,
):
    texts = [
        {"text": f"the theory of the thing number {i} and its other words"}
        for i in range(400)
    ]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "finetune_llama.sh"), "out"],
        cwd=tmp_path,
        env=warm_environment(environment())
        | {"STEPS": "2", "VERIFY": "", "CORPUS": "texts.jsonl"},
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "loaded out/llama, a folder of Hugging Face, weights only" in done.stdout
    config = json.loads((tmp_path / "out/finetuned/config.json").read_text())
    tokenizer = json.loads(
        (tmp_path / "out/finetuned/tokenizer_config.json").read_text()
    )
    assert config["model_type"] == "llama" and isinstance(config["eos_token_id"], int)
    assert tokenizer["eos_token"] == "<|endoftext|>"


@pytest.mark.parametrize("depths", [0, 1])
def test_deepseek_v3_is_planned(depths, tmp_path):
    script = str(ROOT / "examples" / "deepseek_v3_dry_run.sh")
    done = subprocess.run(
        ["bash", script, *["--mtp-num-layers", "1"][: 2 * depths]],
        cwd=tmp_path,
        env=warm_environment(environment()),
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    h = 7168
    f = 2048
    queries = h * 1536 + 1536 + 1536 * 128 * (128 + 64)
    keys_values = h * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    attention = queries + keys_values + 128 * 128 * h
    dense, expert = 3 * h * 18432, 3 * h * f
    # A depth has a block with experts, three norms and a projection; its embedding and head are the model's.
    blocks = 61 + depths
    others = (
        2 * 129280 * h
        + blocks * (attention + 2 * h)
        + h
        + 3 * dense
        + (blocks - 3) * (expert + 256 * h)
        + depths * (3 * h + 2 * h * h)
    )
    whole = others + (blocks - 3) * 256 * expert
    active = others + (blocks - 3) * 8 * expert
    billions = f"{whole / 1e9:.1f} G"
    assert f"the model has {whole:,} parameters ({billions})" in done.stdout
    assert f"a token uses {active:,} of the parameters, " in done.stdout
    if depths:
        assert whole - 671_026_404_352 == 11_610_067_968
        return
    assert (whole, active) == (671_026_404_352, 37_552_282_624)
    (printed,) = [
        block
        for block in blocks_of("docs/scale/planning.md")
        if block.mark == "printed by: examples/deepseek_v3_dry_run.sh"
    ]
    check_printed(printed, done.stdout)


def run_in_a_new_shell(commands, folder):
    """The printed commands run from the folder of the recipe, in a shell whose PATH has no virtual
    environment."""
    *before, generate, dashboard = commands
    assert before if Path(sys.prefix, "bin", "activate").exists() else not before
    assert dashboard == "tensorboard --logdir out/tensorboard"
    plain = {
        "HOME": str(folder),
        "PATH": "/usr/bin:/bin" if before else os.environ["PATH"],
    }
    done = subprocess.run(
        [
            "bash",
            "-euc",
            "\n".join(
                [*before, "command -v tensorboard", generate + " --max-new-tokens 4"]
            ),
        ],
        cwd=folder,
        env=plain,
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0 and "The value" in done.stdout, (
        done.stdout + done.stderr
    )
