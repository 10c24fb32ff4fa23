"""One GPU: values of all kernels, and launches from streams, threads and graphs."""

import threading

import pytest
import torch
import torch.nn.functional as F

from megatron_ds.errors import KernelError
from megatron_ds.extensions.kernels.gpu import norm_kernels
from megatron_ds.extensions.kernels.gpu.cuda_backend import cuda_backend, reason_against
from megatron_ds.extensions.kernels.gpu.kernel_check import TOLERANCES, largest_error
from megatron_ds.extensions.kernels.gpu.self_check import ROWS, failure
from tests.kernels.test_contract import OPERATIONS, SIZES
from tests.kernels.test_self_check import WIDTHS

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a GPU: torch.cuda.is_available() is False",
)
DEVICE = torch.device("cuda", 0)
KERNELS = [
    pytest.param(operation, entry, id=operation.name)
    for operation in OPERATIONS.values()
    for entry in operation.implementations
    if entry.name == "cuda"
]


def normalized(x):
    return norm_kernels.rms_norm(x, torch.ones(x.shape[-1], device=DEVICE), 1e-5)


def is_normalized(x, y):
    expected = F.rms_norm(x.double(), (x.shape[-1],), None, 1e-5)
    return (y - expected).abs().max().item() <= 4e-6 * expected.abs().max().item()


def random_rows(cols):
    return torch.randn(64, cols, device=DEVICE)


def test_kernels_run_on_this_gpu():
    assert reason_against(DEVICE) == ""


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("operation, entry", KERNELS)
def test_a_kernel_equals_torchs_operations_in_double_precision(operation, entry, dtype):
    if entry.dtypes and dtype not in entry.dtypes:
        pytest.skip(f"not for {dtype}")
    assert failure(operation, entry, dtype, DEVICE) == ""
    for rows, width in SIZES:
        arguments = operation.make_example(rows, width, dtype, DEVICE)
        if entry.suits(*arguments) and not entry.fits(*arguments):
            assert largest_error(operation, entry, rows, width, dtype, DEVICE) <= 1, (
                rows,
                width,
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", WIDTHS)
def test_a_kernel_is_right_in_the_widths_of_models(name, dtype):
    operation = OPERATIONS[name]
    entry = next(entry for entry in operation.implementations if entry.name == "cuda")
    for width in WIDTHS[name]:
        assert failure(operation, entry, dtype, DEVICE, [(ROWS, width)]) == ""


def test_a_launch_is_on_the_current_stream():
    x, stream = random_rows(1024), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)  # about 50 ms: another stream would not wait for it
        x.mul_(3).add_(1)
        y = normalized(x)
    stream.synchronize()
    assert is_normalized(x, y)


def test_a_thread_that_has_not_used_the_gpu_launches():
    x, made = random_rows(1024), []
    out = normalized(x)  # what the thread needs of torch is loaded
    thread = threading.Thread(target=lambda: made.append(normalized(x)))
    thread.start()
    thread.join()
    assert torch.equal(made[0], out)


def test_launches_are_captured_into_a_graph():
    x, graph = random_rows(1024), torch.cuda.CUDAGraph()
    normalized(x)
    weight = torch.ones(1024, device=DEVICE)
    with torch.cuda.graph(graph):
        y = norm_kernels.rms_norm(x, weight, 1e-5)
    x.copy_(random_rows(1024))
    graph.replay()
    assert is_normalized(x, y)


def test_a_kernel_is_not_loaded_in_a_capture():
    x, weight = (
        random_rows(1048),
        torch.ones(1048, device=DEVICE),
    )  # columns of no other test
    with pytest.raises(KernelError, match="in the capture of a CUDA graph"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            norm_kernels.rms_norm(x, weight, 1e-5)
    assert is_normalized(x, norm_kernels.rms_norm(x, weight, 1e-5))


def test_a_launch_that_the_driver_refuses_has_its_reason():
    backend, x = cuda_backend(DEVICE), random_rows(1024)
    normalized(x)
    function = next(iter(backend._functions.values()))
    with pytest.raises(KernelError, match=r"CUDA_ERROR_INVALID_VALUE \(1\)"):
        backend.launch(
            function, (1, 1, 1), (4096, 1, 1), norm_kernels.FORWARD._arguments.addresses
        )
    assert is_normalized(x, normalized(x))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_launches_its_own_kernels_whichever_is_current():
    x = random_rows(1024)
    there = x.to("cuda:1")
    with torch.cuda.device(0):
        y = norm_kernels.rms_norm(there, torch.ones(1024, device="cuda:1"), 1e-5)
    with torch.cuda.device(1):
        z = normalized(x)
    assert torch.equal(y.to(DEVICE), z) and is_normalized(x, z)
