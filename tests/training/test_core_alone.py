"""The core without its wings: a copy of the package from which their folders are removed trains a model."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.limits import HUNG
from tests.harness.pretraining import TINY

pytestmark = pytest.mark.processes

PACKAGE = Path(__file__).parents[2] / "megatron_ds"
WINGS = ("compat", "extensions")
# An editable installation of this checkout has a finder that would find the removed modules.
PROGRAM = """import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
sys.meta_path[:] = BuiltinImporter, FrozenImporter, PathFinder
from megatron_ds.training.pretrain import pretrain
sys.exit(pretrain())"""
# A process for each command line, all of them copies of one that has imported the package.
PROGRAMS = PROGRAM.replace(
    "sys.exit(pretrain())",
    """import json, os
for number, flags in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        os.dup2(os.open(f"{number}.err", os.O_CREAT | os.O_WRONLY), 2)
        sys.exit(pretrain(flags))
    _, status = os.wait()
    print(os.waitstatus_to_exitcode(status), flush=True)""",
)


def without(folder, *wings):
    shutil.copytree(
        PACKAGE,
        folder / "megatron_ds",
        ignore=shutil.ignore_patterns("__pycache__", *wings),
    )
    return folder


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    return without(tmp_path_factory.mktemp("core"), *WINGS)


@pytest.fixture(scope="module")
def without_extensions(tmp_path_factory):
    return without(tmp_path_factory.mktemp("without_extensions"), "extensions")


def start(folder, program, *words):
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HUNG,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
    )


def run_each(folder, lines):
    """(exit code, errors) of each command line."""
    lines = [[*TINY, "--mock-data", "--train-iters", "4", *line] for line in lines]
    done = start(folder, PROGRAMS, json.dumps(lines))
    errors = [(folder / f"{n}.err").read_text() for n in range(len(lines))]
    codes = [int(line) for line in done.stdout.split("\n") if line.isdigit()]
    assert len(codes) == len(lines), done.stderr
    return list(zip(codes, errors))


def test_it_trains_and_saves(core, tmp_path):
    flags = [*TINY, "--mock-data", "--train-iters", 4, "--save", tmp_path / "saved"]
    done = start(core, PROGRAM, *flags)
    assert done.returncode == 0, done.stderr
    assert "the last checkpoint is" in done.stdout + done.stderr


def test_what_needs_a_wing_is_an_error_that_names_it(core):
    """A file of a dialect; a name or a flag that may be one of a wing."""
    (core / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    dialect, *unknown = run_each(
        core,
        [
            ["--deepspeed_config", "ds.json"],
            ["--optimizer", "onebit_adam"],
            ["--optimizer", "adam", "--freeze-step", "3"],
            ["--optimizer", "muon"],
            ["--skip-spikes", "3"],
            ["--flops-profiler"],
            ["--tensorboard-dir", "tb"],
            ["--fim-data"],
            ["--tokenizer-type", "GPT2BPETokenizer"],
            ["--pipeline-schedule", "zb-h1"],
            ["--save", "s3://bucket/run"],
        ],
    )
    assert dialect[0] != 0
    assert "megatron_ds.compat, which is not installed" in dialect[1]
    names = "onebit_adam --freeze-step muon --skip-spikes --flops-profiler --tensorboard-dir --fim-data"
    names += " GPT2BPETokenizer zb-h1 stores"
    for (code, text), name in zip(unknown, names.split(), strict=True):
        assert code != 0
        assert name in text
        assert "Not installed: megatron_ds.compat, megatron_ds.extensions" in text


def test_dialects_need_no_extension(without_extensions):
    """A DeepSpeed JSON trains; its block for a feature that is missing is an error that names the wing."""
    plain = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    lengths = {
        "min_difficulty": 8,
        "max_difficulty": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 2, "difficulty_step": 8},
    }
    curriculum = {"enabled": True, "curriculum_type": "seqlen", **lengths}
    lines = []
    for name, block in (("plain", {}), ("more", {"curriculum_learning": curriculum})):
        path = without_extensions / f"{name}.json"
        path.write_text(json.dumps(plain | block))
        lines.append(["--deepspeed_config", path.name])
    trained, (code, text) = run_each(without_extensions, lines)
    assert trained[0] == 0, trained[1]
    assert code != 0
    assert '"curriculum_learning" is enabled, which this package does not have' in text
    assert "Not installed: megatron_ds.extensions" in text
