"""A block costs the host few Python calls: on a GPU that computes a small block, they are the time of a step.

Counts do not depend on the machine; benchmarks/host_time.py has the times.
"""

import pytest

from tests.harness.host_blocks import calls_of, gpu_path, own_blocks, torch_path

pytestmark = pytest.mark.plan

FEW = 2
MORE = 6
MOST = {
    ("gpt", "torch"): 88,
    ("gpt", "gpu"): 110,
    ("llama", "gpu"): 152,
    ("gpt, dropout", "gpu"): 325,
}
PATHS = {"torch": torch_path, "gpu": gpu_path}


def calls_of_a_block(style, path, dtype):
    """Without those of a stage, whatever the number of its blocks."""
    calls = {}
    with PATHS[path]():
        kernels = "torch" if path == "torch" else "auto"
        for count in (FEW, MORE):
            run = own_blocks(style, count, dtype, f"--kernels {kernels}")
            for _ in range(2):  # the second finds what the first has chosen
                run()
            calls[count] = calls_of(run).total()
    return (calls[MORE] - calls[FEW]) / (MORE - FEW)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("path", PATHS)
def test_a_block_of_gpt_makes_few_python_calls(path, dtype):
    assert calls_of_a_block("gpt", path, dtype) <= MOST["gpt", path]


@pytest.mark.parametrize("style", ["llama", "gpt, dropout"])
def test_blocks_with_more_kernels_make_few_python_calls(style):
    assert calls_of_a_block(style, "gpu", "bf16") <= MOST[style, "gpu"]


def test_blocks_of_the_gpu_path_launch_kernels():
    """Else the counts above would be those of torch's operations."""
    with gpu_path() as gpu:
        run = own_blocks("gpt", 1, more="--kernels auto")
        before = gpu.driver_counts()[1]
        run()
        assert (
            gpu.driver_counts()[1] - before == 6
        )  # two norms: one forward, two backward
