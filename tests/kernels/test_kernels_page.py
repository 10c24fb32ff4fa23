"""docs/reference/kernels.md describes every source of kernels, and what it states about the environment is
true."""

import re
from pathlib import Path

from megatron_ds.extensions.kernels.gpu import cuda_backend, kernel_cache, nvrtc
from megatron_ds.extensions.kernels.gpu.kernel_sources import source_folder

PAGE = (Path(__file__).parents[2] / "docs/reference/kernels.md").read_text(
    encoding="utf-8"
)


def test_every_source_has_a_row():
    rows = set(re.findall(r"^\| `(\w+\.cu)` \|", PAGE, re.MULTILINE))
    assert rows == {path.name for path in source_folder().glob("*.cu")}


def test_every_variable_of_the_environment_is_described():
    code = "".join(
        Path(module.__file__).read_text()
        for module in (cuda_backend, kernel_cache, nvrtc)
    )
    read = set(re.findall(r'"(MEGATRON_DS_\w+|XDG_\w+)"', code))
    assert read and read <= set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))


def test_versions_are_those_of_the_code():
    assert "NVRTC {}.{} or later".format(*nvrtc.LEAST_NVRTC) in PAGE
    assert (
        "compute capability {}.{} or later".format(*cuda_backend.LEAST_CAPABILITY)
        in PAGE
    )
