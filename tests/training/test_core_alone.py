"""The core without its wings: a copy of the package from which their folders are removed trains a model."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def run(folder, *flags):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, flags)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
    )


def test_it_trains_and_saves(core, tmp_path):
    done = run(
        core, *TINY, "--mock-data", "--train-iters", 4, "--save", tmp_path / "saved"
    )
    assert done.returncode == 0, done.stderr
    assert "the last checkpoint is" in done.stdout + done.stderr


def test_what_needs_a_wing_is_an_error_that_names_it(core, tmp_path):
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    done = run(
        core,
        *TINY,
        "--mock-data",
        "--train-iters",
        2,
        "--deepspeed_config",
        tmp_path / "ds.json",
    )
    assert done.returncode != 0
    assert "megatron_ds.compat, which is not installed" in done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ["--optimizer", "onebit_adam"],
        ["--optimizer", "adam", "--freeze-step", "3"],
    ],
)
def test_an_unknown_name_may_be_one_of_a_wing(core, flags):
    done = run(core, *TINY, "--mock-data", "--train-iters", 2, *flags)
    assert done.returncode != 0
    assert f"{flags[-2 if len(flags) > 2 else 1]}" in done.stderr
    assert "Not installed: megatron_ds.compat, megatron_ds.extensions" in done.stderr


def test_dialects_need_no_extension(without_extensions, tmp_path):
    """A DeepSpeed JSON trains; its block for a feature that is missing is an error that names the wing."""
    plain = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    lengths = {
        "min_difficulty": 8,
        "max_difficulty": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 2, "difficulty_step": 8},
    }
    curriculum = {"enabled": True, "curriculum_type": "seqlen", **lengths}
    errors = []
    for block in ({}, {"curriculum_learning": curriculum}):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(plain | block))
        flags = ["--mock-data", "--train-iters", 4, "--deepspeed_config", path]
        done = run(without_extensions, *TINY, *flags)
        errors.append(done.stderr)
        assert (done.returncode == 0) == (not block), done.stderr
    assert (
        '"curriculum_learning" is enabled, which this package does not have'
        in errors[1]
    )
    assert "Not installed: megatron_ds.extensions" in errors[1]
