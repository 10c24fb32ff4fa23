"""`megatron-ds` and `python -m megatron_ds`: the list, the flags, and what a mistyped command gets."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ds.commands import COMMANDS, PRETRAIN, main, overview
from tests.harness.limits import HUNG
from tests.harness.warm import warm_python

pytestmark = pytest.mark.plan

ROOT = Path(__file__).parents[2]
SMALL = (
    "--mock-data --vocab-size 64 --num-layers 1 --hidden-size 32 --num-attention-heads 2 "
    "--seq-length 16 --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3"
).split()


def ended(*words):
    """The exit code of a command in this process."""
    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code


@pytest.fixture(autouse=True)
def same_process(monkeypatch):
    """A command replaces sys.argv, and ignores stop signals once its exit code is known."""
    monkeypatch.setattr("sys.argv", ["megatron-ds"])
    monkeypatch.setattr("megatron_ds.cli.ignore_stop_signals", lambda: None)
    monkeypatch.setattr("megatron_ds.cli.StopRequest.install", lambda self: None)


def test_the_list_has_a_line_and_an_example_of_use_for_newcomers(capsys):
    assert ended("--help") == 0
    page = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert re.search(
            rf"^  {name} +{re.escape(command.summary.split()[0])}", page, re.MULTILINE
        )
    assert "-m megatron_ds train" in page and page.strip() == overview().strip()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_its_flags(name, capsys):
    assert ended(name, "--help") == 0
    page = capsys.readouterr().out
    assert "--" in page and "tools/" not in page
    if COMMANDS[name].module != PRETRAIN:
        assert page.startswith(f"usage: megatron-ds {name} ")


@pytest.mark.parametrize(
    "typed, found",
    [
        ("plann", "did you mean 'plan'"),
        ("preprocess_data", "it is 'preprocess' here"),
        ("tools/convert_checkpoint.py", "it is 'convert' here"),
        ("zero_to_fp32", "did you mean 'zero-to-fp32'"),
    ],
)
def test_a_mistyped_command_gets_the_nearest_one(typed, found, capsys):
    assert ended(typed) == 2
    assert found in capsys.readouterr().err


def test_a_plan_is_a_training_that_does_not_run(capsys):
    assert ended("plan", *SMALL, "--world-size", "2") == 0
    planned = capsys.readouterr().out
    assert ended("train", "--dry-run", *SMALL, "--world-size", "2") == 0
    assert capsys.readouterr().out == planned and "peak" in planned


def test_every_tool_of_the_checkout_is_a_command():
    """Tools that only this project's upkeep and tests use are left out."""
    of_the_project = {
        "compare_layouts",
        "layout_comparison",
        "free_port",
        "write_flags_doc",
        "measure_device",
        "browser",
        "build_site",
        "check_site",
        "draw_tutorial",
        "look_at_site",
        "write_notebook",
        "draw_layouts",
        "draw_results",
        "run_deepspeed_tests",
        "deepspeed_tests_plugin",
    }
    names = []
    for path in ROOT.glob("tools/*.py"):
        if path.stem not in of_the_project:
            [name] = re.findall(r'run\("([\w-]+)"\)', path.read_text())
            assert COMMANDS[name].module.rpartition(".")[2] in (
                path.stem,
                "check",
                "find_longest_sequence",
                "weights_of_zero",
            )
            names.append(name)
    with_script = {
        command.module
        for name, command in COMMANDS.items()
        if name not in WITHOUT_SCRIPT
    }
    assert {COMMANDS[name].module for name in names} | {PRETRAIN} == with_script


def test_python_m_and_the_script_of_the_checkout_are_the_same():
    outputs = []
    for start in (["-m", "megatron_ds", "schedule"], [ROOT / "tools/show_schedule.py"]):
        words = [
            warm_python(),
            *start,
            *"--schedule 1f1b --pipeline-size 2 --microbatches 3".split(),
        ]
        outputs.append(
            subprocess.run(
                words,
                cwd=ROOT,
                check=True,
                capture_output=True,
                text=True,
                timeout=HUNG,
            )
        )
    assert outputs[0].stdout == outputs[1].stdout and "bubble" in outputs[0].stdout


def test_the_list_is_printed_where_torch_is_not_installed(tmp_path):
    (tmp_path / "torch.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    )
    done = subprocess.run(
        [sys.executable, "-m", "megatron_ds", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        timeout=HUNG,
    )
    assert done.returncode == 0 and "usage: megatron-ds" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "megatron_ds", "verify", "--load", "x"],
        cwd=ROOT,
        text=True,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        timeout=HUNG,
    )
    assert done.returncode == 2 and done.stderr.startswith(
        "error: torch is not installed"
    )


def test_summaries_fit_a_line():
    assert all(len(command.summary) <= 80 for command in COMMANDS.values())


SCRIPTS = {
    "train": "pretrain_gpt.py",
    "train-bert": "pretrain_bert.py",
    "plan": "pretrain_gpt.py --dry-run",
    "check": "tools/check_recipe.py",
    "engine-check": "tools/check_recipe.py --for engine",
    "longest-sequence": "tools/longest_sequence.py",
    "zero-to-fp32": "tools/zero_to_fp32.py",
}


WITHOUT_SCRIPT = ("launch", "as-deepspeed", "env", "report", "watch")


def page_row(name):
    command = COMMANDS[name]
    if name in WITHOUT_SCRIPT:
        return f"| `{name}` | – | {command.summary} |"
    script = SCRIPTS.get(name, f"tools/{command.module.rpartition('.')[2]}.py")
    assert (ROOT / script.split()[0]).exists()
    return f"| `{name}` | `{script}` | {command.summary} |"


def test_the_page_has_every_command():
    page = (ROOT / "docs/use/commands.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line.startswith("| `")] == [
        page_row(name) for name in COMMANDS
    ]


def test_the_short_page_has_the_flags_that_most_runs_set(capsys):
    assert ended("train", "--help-short") == 0
    page = capsys.readouterr().out
    for flag in (
        "--num-layers",
        "--lr",
        "--tensor-model-parallel-size",
        "--zero-stage",
        "--data-path",
        "--save",
        "--dry-run",
        "--config",
    ):
        assert f"  {flag} " in page
    assert len(page.splitlines()) <= 80 and "--help." in page.splitlines()[0]
    assert ended("train", "--help") == 0
    assert "--help-short" in capsys.readouterr().out[:600]
