"""The compiled parts compile without the vectors of x86, too: what other processors and compilers get."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.plan, pytest.mark.rest]

SOURCES = Path(__file__).parents[2] / "csrc"
WITH_VECTORS = sorted(
    str(path.relative_to(SOURCES))
    for path in SOURCES.glob("*/*.cpp")
    if "bf16_" in path.read_text()
    or "_vectors.h" in path.read_text()
    or "product_kernel.h" in path.read_text()
)


def test_files_with_vectors_are_found():
    assert set(WITH_VECTORS) >= {
        "attention/attention.cpp",
        "elementwise/cross_entropy.cpp",
        "elementwise/gelu.cpp",
        "elementwise/norms.cpp",
        "products/product.cpp",
    }


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("name", WITH_VECTORS)
def test_it_compiles_without_vectors(name):
    folders = (
        sysconfig.get_paths()["include"],
        Path(torch.__file__).parent / "include",
    )  # pybind11's, too
    options = [
        "-std=c++17",
        "-fsyntax-only",
        "-w",
        "-DPORTABLE",
        *(f"-I{folder}" for folder in folders),
    ]
    done = subprocess.run(
        ["g++", *options, SOURCES / name], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
