"""Every kernel of csrc/gpu under the sanitizers of g++: no races between threads or blocks, no access out of
bounds, no misaligned packet, no undefined arithmetic. And planted faults, which sanitizers must report.
"""

import re
from pathlib import Path

import pytest
import torch

from megatron_ds.extensions.kernels.gpu.gpu_kernel import GpuKernel
from tests.harness.emulated import SOURCES, wanted_by
from tests.harness.sanitized import FLAGS, missing, sanitize
from tests.harness.small_launches import small_launches

FILES = sorted(path.name for path in SOURCES.glob("*.cu"))
PLANTED = Path(__file__).parent / "planted.cu"
LINES = {
    line.partition("// @")[2]: number
    for number, line in enumerate(PLANTED.read_text().splitlines(), 1)
    if "// @" in line
}


def skip_if_missing(kind):
    if reason := missing(kind):
        pytest.skip(reason)


@pytest.mark.parametrize("file", FILES)
def test_every_kernel_has_a_small_launch(file):
    kernels = re.findall(
        r"__global__.*?\bvoid\s+(\w+)\s*\(", (SOURCES / file).read_text(), re.DOTALL
    )
    launched = wanted_by(small_launches()[file]).get(file, [])
    assert kernels and set(kernels) == {
        expression.partition("<")[0] for expression in launched
    }


@pytest.mark.parametrize("kind", FLAGS)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.rest
def test_sanitizers_find_nothing(file, kind):
    skip_if_missing(kind)
    torch.manual_seed(0)
    assert sanitize(kind, small_launches()[file]) == ""


def launch_planted(*names):
    for name in names:
        GpuKernel(PLANTED.name, name, "ptr")((), 2, 64, torch.zeros(64))


@pytest.mark.rest
def test_thread_sanitizer_reports_races_within_a_block_and_between_blocks():
    skip_if_missing("thread")
    report = sanitize(
        "thread",
        lambda: launch_planted("missing_barrier", "blocks_that_share_an_address"),
        PLANTED.parent,
    )
    for line in ("written", "read", "blocks"):
        assert f"planted.cu:{LINES[line]} " in report, line


@pytest.mark.rest
def test_address_sanitizer_reports_bounds_and_alignment():
    skip_if_missing("address")
    report = sanitize(
        "address",
        lambda: launch_planted(
            "misaligned_packet", "shared_memory_overrun", "tensor_overrun"
        ),
        PLANTED.parent,
    )
    for finding in (
        "runtime error: .* misaligned address",
        rf"planted.cu:{LINES['shared']}:.* out of bounds",
        "heap-buffer-overflow",
        rf"in tensor_overrun.*planted.cu:{LINES['tensor']}\b",
    ):
        assert re.search(finding, report), finding


@pytest.mark.rest
@pytest.mark.parametrize("removed", [0, 1])
def test_thread_sanitizer_reports_each_removed_barrier_of_over_block(tmp_path, removed):
    """The first keeps a warp from writing results that another still reads from the call before; the second
    keeps a warp from reading results that another has not written yet."""
    skip_if_missing("thread")
    before, *after = (SOURCES / "device.cuh").read_text().split("    __syncthreads();")
    assert len(after) == 2
    calls = ["    __syncthreads();"] * 2
    calls[removed] = "    ;"
    text = before + calls[0] + after[0] + calls[1] + after[1]
    (tmp_path / "device.cuh").write_text(text)
    (tmp_path / PLANTED.name).write_text(PLANTED.read_text())
    report = sanitize(
        "thread",
        lambda: GpuKernel(PLANTED.name, "two_reductions", "ptr")(
            (), 1, 64, torch.ones(64)
        ),
        tmp_path,
    )
    written, read = (
        1 + text[: text.index(part)].count("\n")
        for part in ("of_warp[threadIdx.x / 32] = v", "v = threadIdx.x % 32 <")
    )
    assert f"device.cuh:{written}" in report and f"device.cuh:{read}" in report
