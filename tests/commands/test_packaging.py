"""What reaches users: the command, and the sources of GPU kernels, in sdists, wheels and installations.

Built offline, in a copy of the checkout, without the extensions: setup.py does without them where pybind11
is missing.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from megatron_ds.extensions.kernels.gpu.kernel_sources import source_folder
from tests.harness.limits import HUNG

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
COPIED = (
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "csrc",
    "megatron_ds",
)
SOURCES = sorted(path.name for path in (ROOT / "csrc/gpu").iterdir())
FIND = (
    "import megatron_ds; from megatron_ds.extensions.kernels.gpu.kernel_sources import kernel_source, source_folder; "
    "print(megatron_ds.__file__, source_folder(), len(kernel_source('norm.cu').headers))"
)


def run(*words, folder, **environment):
    """Standard output of a command; fails with its standard error."""
    done = subprocess.run(
        words,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HUNG,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(kind, folder):
    """Path of what setuptools builds in a folder: "sdist", "wheel", "editable"."""
    without = folder.parent / "without/pybind11"
    without.mkdir(parents=True, exist_ok=True)
    (without / "__init__.py").write_text("raise ImportError('absent in this test')\n")
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}('..'))"
    return (
        folder.parent
        / run(
            sys.executable,
            "-W",
            "ignore",
            "-c",
            code,
            folder=folder,
            PYTHONPATH=str(without.parent),
        ).split()[-1]
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what a build reads of this checkout."""
    folder = tmp_path_factory.mktemp("packaging") / "checkout"
    folder.mkdir()
    unwanted = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    for name in COPIED:
        path = ROOT / name
        shutil.copytree(
            path, folder / name, ignore=unwanted
        ) if path.is_dir() else shutil.copy(path, folder)
    # What an earlier build of a wheel has copied there.
    shutil.rmtree(
        folder / "megatron_ds/extensions/kernels/gpu/sources", ignore_errors=True
    )
    return folder


def test_a_wheel_built_from_the_sdist_installs_the_sources(checkout, tmp_path):
    with tarfile.open(build("sdist", checkout)) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    wheel = build("wheel", unpacked)
    in_package = "megatron_ds/extensions/kernels/gpu/sources/"
    names = zipfile.ZipFile(wheel).namelist()
    assert (
        sorted(n.removeprefix(in_package) for n in names if n.startswith(in_package))
        == SOURCES
    )
    assert {
        f"megatron_ds/extensions/report/page.{kind}" for kind in ("html", "css")
    } <= {*names}
    assert not [n for n in names if n.startswith(("csrc", "tests"))]

    target = tmp_path / "site"
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--target",
        str(target),
        str(wheel),
        folder=tmp_path,
    )
    printed = run(sys.executable, "-c", FIND, folder=tmp_path, PYTHONPATH=str(target))
    imported, found, headers = printed.split()
    assert Path(imported).is_relative_to(target) and int(headers) >= 1
    assert Path(found) == target / in_package
    for name in SOURCES:
        assert (target / in_package / name).read_bytes() == (
            ROOT / "csrc/gpu" / name
        ).read_bytes()


def test_an_editable_installation_reads_the_checkout(checkout):
    before = sorted(checkout.rglob("*.cu"))
    wheel = build("editable", checkout)
    assert not [
        n for n in zipfile.ZipFile(wheel).namelist() if n.endswith((".cu", ".cuh"))
    ]
    assert sorted(checkout.rglob("*.cu")) == before
    if not (
        ROOT / "megatron_ds/extensions/kernels/gpu/sources"
    ).exists():  # this test runs in the checkout
        assert source_folder() == ROOT / "csrc/gpu"


def test_sources_that_an_earlier_build_had_do_not_stay(checkout):
    """setuptools reuses its build folder."""
    stale = checkout / "build/lib/megatron_ds/extensions/kernels/gpu/sources/removed.cu"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    names = zipfile.ZipFile(build("wheel", checkout)).namelist()
    assert not [n for n in names if n.endswith("removed.cu")] and [
        n for n in names if n.endswith("norm.cu")
    ]


@pytest.fixture(scope="module")
def installed(checkout, tmp_path_factory):
    """A virtual environment with the wheel and no checkout; torch is that of this Python."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    site = run(
        str(python),
        "-c",
        "import sysconfig; print(sysconfig.get_path('purelib'))",
        folder=folder,
    )
    Path(site.strip(), "torch_of_the_tests.pth").write_text(
        sysconfig.get_path("purelib") + "\n"
    )
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
        str(build("wheel", checkout)),
        folder=folder,
        PYTHONPATH="",
    )
    return folder


@pytest.mark.skipif(sys.platform == "win32", reason="paths of POSIX")
def test_a_wheel_alone_has_every_command(installed, tmp_path):
    job = (
        "--vocab-size 64 --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
        "--mock-data --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --eval-iters 0 --lr 1e-3"
    ).split()
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 -m megatron_ds train".split()

    def megatron_ds(*words):
        return run(
            str(installed / "bin/megatron-ds"), *words, folder=tmp_path, PYTHONPATH=""
        )

    assert "examples:" in megatron_ds("--help")
    layout = ["--tensor-model-parallel-size", "2", "--save", "run"]
    printed = run(
        str(installed / "bin/python"),
        *torchrun,
        *job,
        *layout,
        folder=tmp_path,
        PYTHONPATH="",
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
    )
    assert "the last checkpoint is run/iter_0000002" in printed
    assert "all files are as they were saved" in megatron_ds("verify", "--load", "run")
    (tmp_path / "train.sh").write_text(f"python pretrain_gpt.py {' '.join(job)}")
    assert "write here" in megatron_ds("check", "train.sh")
    where = run(
        str(installed / "bin/python"),
        "-c",
        "import megatron_ds; print(megatron_ds.__file__)",
        folder=tmp_path,
        PYTHONPATH="",
    )
    assert Path(where.strip()).is_relative_to(installed)
