"""The core without its wings: a copy of the package from which their folders are removed trains a model."""

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


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(
        PACKAGE,
        folder / "megatron_ds",
        ignore=shutil.ignore_patterns("__pycache__", *WINGS),
    )
    return folder


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
