"""`megatron-ds as-deepspeed`, `launch --as-deepspeed` and a folder on PYTHONPATH: programs that are not changed.

A DeepSpeed that is installed is a folder of this test: importing it is an error.
"""

import os
import subprocess
import sys
from importlib.metadata import PathDistribution

import pytest

from megatron_ds.compat.deepspeed.installation import DISTRIBUTION, VERSION
from megatron_ds.compat.deepspeed.program_environment import (
    FOLDER,
    environment_with_name,
    python_flags,
)
from megatron_ds.extensions.launch.command import main
from tests.harness.limits import HUNG

pytestmark = pytest.mark.processes

PROGRAM = """
import importlib.metadata, importlib.util, sys
assert importlib.util.find_spec("deepspeed") is not None
assert importlib.metadata.version("deepspeed") == "0.19.8"
assert "deepspeed" in importlib.metadata.packages_distributions()["deepspeed"]
import deepspeed, deepspeed.utils.logging
from deepspeed.runtime.zero.config import ZeroStageEnum
import megatron_ds
assert deepspeed.DeepSpeedEngine is megatron_ds.compat.engine.Engine
print(__name__, *sys.argv[1:], deepspeed.__version__)
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with a program, and another one with an installed DeepSpeed, which is on PYTHONPATH."""
    (tmp_path / "program.py").write_text(PROGRAM)
    real = tmp_path / "installed" / "deepspeed"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("raise ImportError('DeepSpeed itself')")
    about = tmp_path / "installed" / "deepspeed-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.1\n"
    )
    return tmp_path


def run(folder, *words, **variables):
    environment = os.environ | {"PYTHONPATH": str(folder / "installed")} | variables
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HUNG,
    )


@pytest.mark.parametrize("program", [["program.py"], ["-m", "program"]])
def test_a_program_that_is_not_changed_imports_this_package(folder, program):
    done = run(folder, "-m", "megatron_ds.as_deepspeed", *program, "-x", "--y")
    assert done.stdout.split() == ["__main__", "-x", "--y", VERSION], done.stderr
    assert "DeepSpeed itself" in run(folder, "-c", "import deepspeed").stderr


def test_the_folder_of_the_command_is_enough_for_other_launchers(folder):
    printed = run(folder, "-m", "megatron_ds", "as-deepspeed").stdout
    assert printed == f"{FOLDER}\n"
    path = os.pathsep.join([printed.strip(), str(folder / "installed")])
    done = run(folder, "program.py", PYTHONPATH=path)
    assert done.stdout.split() == ["__main__", VERSION], done.stderr


def test_a_checkout_that_is_not_installed_is_found_behind_the_folder(folder):
    """-S: no installed packages, so that neither torch nor this package is found on the usual path."""
    program = "import sys\ntry: import deepspeed\nexcept ModuleNotFoundError as e: print(e.name)"
    done = run(folder, "-S", "-c", program, PYTHONPATH=str(FOLDER))
    assert done.stdout == "torch\n", done.stderr


def test_the_launcher_gives_the_name_to_its_ranks(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder / "installed"))
    words = ["--num_gpus", "2", "--no_local_rank"]
    assert main(["--as-deepspeed", *words, "program.py", "--y"]) == 0
    assert capfd.readouterr().out.count(f"__main__ --y {VERSION}") == 2


def test_python_without_its_variables_is_refused(folder):
    done = run(folder, "-E", "-m", "megatron_ds.as_deepspeed", "program.py")
    assert done.returncode == 2 and "started with -E or -I" in done.stderr


def test_the_folder_comes_first_and_once():
    others = os.pathsep.join(["/a", str(FOLDER), "", "/b"])
    found = environment_with_name({"PYTHONPATH": others, "HOME": "/h"})
    assert found == {
        "PYTHONPATH": os.pathsep.join([str(FOLDER), "/a", "/b"]),
        "HOME": "/h",
    }


@pytest.mark.parametrize(
    "line, flags",
    [
        ("-m megatron_ds.as_deepspeed x.py", ""),
        ("-u -X dev -Wignore -m megatron_ds.as_deepspeed -m x", "-u -X dev -Wignore"),
        ("-um megatron_ds.as_deepspeed -O x.py", "-u"),
        ("-Ximporttime -mmegatron_ds.as_deepspeed x.py", "-Ximporttime"),
        ("-O /usr/bin/megatron-ds as-deepspeed -u x.py", "-O"),
    ],
)
def test_flags_of_python_are_kept(line, flags):
    assert python_flags(line.split()) == flags.split()


def test_the_distribution_has_the_version_of_the_module():
    assert isinstance(DISTRIBUTION, PathDistribution)
    assert (DISTRIBUTION.name, DISTRIBUTION.version) == ("deepspeed", VERSION)
