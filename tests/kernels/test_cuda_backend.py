"""The path from a GpuKernel to a GPU, with g++ in place of NVRTC and the emulator in place of the GPU."""

import ctypes
import logging
import shutil
import struct
import threading

import pytest
import torch

from megatron_ds.errors import KernelError
from megatron_ds.extensions.kernels.gpu import (
    cuda_backend,
    gpu_kernel,
    kernel_sources,
    norm_kernels,
)
from megatron_ds.extensions.kernels.gpu.driver import CUDA, HIP
from megatron_ds.extensions.kernels.gpu.gpu_kernel import (
    BACKENDS,
    PLANNED_PROCESSORS,
    GpuKernel,
    launches_recorded,
    processors,
)
from tests.harness.limits import HUNG
from tests.harness.stand_in_gpu import stand_in_gpu

# Writes each of its arguments to its own place, so that a wrong size or place of one shows.
PACKED = """
#include "device.cuh"
#include "scale.cuh"
template <int ADD> __global__ void packed(float* f, int a, int64_t* wide, int64_t b, float c, uint32_t d,
                                          uint64_t e, const float* absent) {
    if (threadIdx.x == 0) {
        f[0] = SCALE * c;
        wide[0] = a + ADD; wide[1] = b; wide[2] = d; wide[3] = int64_t(e); wide[4] = absent == nullptr;
    }
}
"""
KERNEL = GpuKernel("packed.cu", "packed", "ptr i32 ptr i64 f32 u32 u64 ptr")


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder of sources with packed.cu in place of the package's."""
    folder = tmp_path / "sources"
    shutil.copytree(kernel_sources.source_folder(), folder)
    (folder / "packed.cu").write_text(PACKED)
    (folder / "scale.cuh").write_text("#define SCALE 2.0f\n")
    monkeypatch.setattr(kernel_sources, "FOLDERS", (folder,))
    forget_sources()
    yield folder
    monkeypatch.undo()
    forget_sources()


def forget_sources():
    kernel_sources.source_folder.cache_clear()
    kernel_sources.kernel_source.cache_clear()


def pack(add=0, **given):
    f, wide = torch.zeros(1), torch.full((5,), 99, dtype=torch.int64)
    KERNEL(
        (add,),
        given.get("grid", 1),
        given.get("threads", 32),
        f,
        -7,
        wide,
        -(2**40),
        0.75,
        2**32 - 1,
        2**63 + 5,
        given.get("absent"),
    )
    return f, wide


def test_arguments_of_all_types_arrive(sources, tmp_path):
    with stand_in_gpu(tmp_path / "cache"):
        f, wide = pack(add=3)
    assert f.item() == 1.5
    assert wide.tolist() == [-4, -(2**40), 2**32 - 1, 5 - 2**63, 1]


def test_arguments_lie_as_in_a_c_struct():
    types = {
        "Q": ctypes.c_uint64,
        "i": ctypes.c_int32,
        "q": ctypes.c_int64,
        "I": ctypes.c_uint32,
        "f": ctypes.c_float,
        "512s": ctypes.c_uint64 * 64,
    }
    for codes in (
        ["Q", "i", "Q"],
        ["f", "512s", "I", "I", "q"],
        ["i"],
        ["I", "f", "i", "512s"],
    ):
        fields = [(f"f{i}", types[code]) for i, code in enumerate(codes)]
        expected = type("Arguments", (ctypes.Structure,), {"_fields_": fields})
        form, offsets = gpu_kernel._layout(codes)
        assert offsets == [getattr(expected, name).offset for name, _ in fields]
        assert struct.calcsize(form) == offsets[-1] + ctypes.sizeof(fields[-1][1])


@pytest.mark.parametrize("names", [CUDA, HIP], ids=["cuda", "hip"])
def test_an_operation_runs_forward_and_backward_on_the_current_stream(tmp_path, names):
    x, weight = (
        torch.randn(7, 264, requires_grad=True),
        torch.randn(264, requires_grad=True),
    )
    with stand_in_gpu(tmp_path, names=names) as gpu:
        loaded, launched = gpu.driver_counts()
        for stream in (0x5000, 0, 0x7FFF_0000_0000):
            gpu.current_stream = stream
            y = norm_kernels.rms_norm(x, weight, 1e-5)
            assert (gpu.last_stream() or 0) == stream
        y.square().sum().backward()
        assert gpu.driver_counts() == (loaded + 3, launched + 5)
        assert gpu.backend.summary().startswith("kernels: 3 compiled in ")
        assert gpu.backend.summary().endswith("s (sm_90, g++ 1.0)")
    wide = x.detach().double().requires_grad_()
    expected = torch.nn.functional.rms_norm(
        wide, (264,), weight.detach().double(), 1e-5
    )
    expected.square().sum().backward()
    # fp32 sums of 264 terms; the largest value as unit
    assert (y - expected).abs().max() <= 2e-6 * expected.abs().max()
    assert (x.grad - wide.grad).abs().max() <= 4e-6 * wide.grad.abs().max()


@pytest.mark.parametrize("names", [CUDA, HIP], ids=["cuda", "hip"])
def test_a_thread_without_context_and_one_with_another_devices_launch_all_the_same(
    sources, tmp_path, names
):
    """Autograd and loaders have threads that never used the GPU; another device may be current."""
    results, contexts = [], []

    def in_thread(other):
        driver = first.backend._driver
        if other:
            driver._set_current(second.backend._context)
        before = driver.current_context()
        results.append(pack(add=1)[1][0].item())
        contexts.append(driver.current_context() == before)

    with (
        stand_in_gpu(tmp_path, ordinal=1, names=names) as second,
        stand_in_gpu(tmp_path, ordinal=0, names=names) as first,
    ):
        assert second.backend._context != first.backend._context
        for other in (False, True, False):
            thread = threading.Thread(target=in_thread, args=(other,))
            thread.start()
            thread.join()
    assert results == [-6] * 3 and all(contexts)


def test_each_device_has_modules_of_its_own(sources, tmp_path):
    with stand_in_gpu(tmp_path, ordinal=0) as first:
        pack()
        before = first.driver_counts()[0]
        pack()
        assert first.driver_counts()[0] == before
    with stand_in_gpu(tmp_path, ordinal=1) as second:
        pack()
        assert second.driver_counts()[0] == before + 1
        assert second.compiler.compilations == []  # by the first, found on disk


def test_threads_launch_one_kernel_at_the_same_time(monkeypatch):
    """A launch lets other threads run: its arguments must be in memory of its own thread."""

    class Slow:
        """Reads the arguments when all threads have packed theirs."""

        def function(self, file, expression):
            return expression

        def launch(self, function, grid, block, addresses):
            everyone.wait()
            seen.append(ctypes.c_int.from_address(addresses[1]).value)

    backend = Slow()
    monkeypatch.setitem(BACKENDS, "cpu", lambda device: backend)
    kernel, seen, everyone = (
        GpuKernel("any.cu", "any", "ptr i32"),
        [],
        threading.Barrier(3, timeout=HUNG),
    )
    threads = [
        threading.Thread(target=kernel, args=((), 1, 1, torch.zeros(1), n))
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [0, 1, 2]


def test_a_launch_that_the_driver_refuses_names_the_kernel_and_the_error(
    sources, tmp_path
):
    with stand_in_gpu(tmp_path):
        with pytest.raises(
            KernelError,
            match=r"packed<0> with 1 × 1 × 1 blocks of 2048 × 1 × 1 threads was "
            r"not started: CUDA_ERROR_INVALID_VALUE \(1\)\.",
        ):
            pack(threads=2048)


def test_an_error_of_an_earlier_kernel_is_not_blamed_on_the_one_that_reports_it(
    sources, tmp_path
):
    with stand_in_gpu(tmp_path) as gpu:
        gpu.fail_next_launch(700)
        with pytest.raises(
            KernelError,
            match=r"CUDA_ERROR_ILLEGAL_ADDRESS \(700\), an illegal memory .*"
            r"may be that of any kernel before it.*CUDA_LAUNCH_BLOCKING=1",
        ):
            pack()
        gpu.fail_next_launch(4242)
        with pytest.raises(KernelError, match=r"unknown error \(4242\)\.$"):
            pack()


def test_no_kernel_is_loaded_in_the_capture_of_a_graph(sources, tmp_path):
    with stand_in_gpu(tmp_path) as gpu:
        gpu.capturing = True
        with pytest.raises(
            KernelError,
            match="packed<0> is first launched in the capture of a CUDA graph.*"
            "Run the step once before the capture",
        ):
            pack()
        gpu.capturing = False
        pack()
        gpu.capturing = True
        assert pack()[0].item() == 1.5


def test_tensors_on_two_devices_are_refused_before_the_gpu_reads_them(
    sources, tmp_path
):
    with stand_in_gpu(tmp_path):
        with pytest.raises(
            KernelError, match="packed: argument 7 is on meta, the first tensor on cpu"
        ):
            pack(absent=torch.empty(1, device="meta"))
        with pytest.raises(KernelError, match="packed has 8 arguments, not 2"):
            KERNEL((0,), 1, 1, torch.zeros(1), 3)


def test_a_kernel_that_does_not_compile_gives_the_compilers_message(sources, tmp_path):
    (sources / "packed.cu").write_text(PACKED.replace("SCALE * c", "unknown_name"))
    with stand_in_gpu(tmp_path):
        with pytest.raises(KernelError, match="does not compile(?s:.*)unknown_name"):
            pack()


def test_an_edited_header_is_compiled_again(sources, tmp_path):
    with stand_in_gpu(tmp_path / "cache"):
        assert pack()[0].item() == 1.5
    (sources / "scale.cuh").write_text("#define SCALE 4.0f\n")
    kernel_sources.kernel_source.cache_clear()
    with stand_in_gpu(tmp_path / "cache") as gpu:
        assert pack()[0].item() == 3.0
        assert gpu.compiler.compilations == ["packed<0>"]


def test_tensors_without_memory_launch_nothing_and_are_recorded(tmp_path):
    x = torch.empty(7, 264, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with stand_in_gpu(tmp_path) as gpu, launches_recorded() as launches:
        norm_kernels.rms_norm(
            x, torch.empty(264, device="meta", dtype=torch.bfloat16), 1e-5
        ).backward(x)
        norm_kernels.rms_norm(
            x[:0], torch.empty(264, device="meta", dtype=torch.bfloat16), 1e-5
        )
        assert gpu.compiler.compilations == []
    expressions = [kernel.expression(template) for kernel, template in launches]
    assert [e.partition("<")[0] for e in expressions] == [
        "norm_forward",
        "norm_backward",
    ]
    assert all("<bf16, 264, " in e for e in expressions)


def test_recorded_kernels_are_compiled_together(sources, tmp_path):
    with stand_in_gpu(tmp_path) as gpu, launches_recorded() as launches:
        for add in (1, 2, 1):
            KERNEL((add,), 1, 32, torch.empty(1, device="meta"), *[0] * 7)
        gpu.backend.prepare(
            (kernel.file, kernel.expression(template)) for kernel, template in launches
        )
        assert sorted(gpu.compiler.compilations) == ["packed<1>", "packed<2>"]
        pack(add=2)
        assert len(gpu.compiler.compilations) == 2


def test_the_number_of_processors_is_the_devices_or_a_fixed_one_in_plans(tmp_path):
    with stand_in_gpu(tmp_path):
        assert processors(torch.empty(1)) == 3
        assert processors(torch.empty(1, device="meta")) == PLANNED_PROCESSORS


def test_an_error_of_hip_has_the_name_and_meaning_of_its_library(sources, tmp_path):
    with stand_in_gpu(tmp_path, names=HIP) as gpu:
        gpu.fail_next_launch(700)
        with pytest.raises(
            KernelError,
            match=r"hipErrorIllegalAddress \(700\), an illegal memory access",
        ):
            pack()


def test_cuda_tensors_have_the_backend_of_the_driver():
    assert BACKENDS["cuda"] is cuda_backend.cuda_backend


# ------------------------------------------------------------------ availability
class FakeCuda:
    """torch.cuda of a machine with one GPU, as far as availability asks."""

    def __init__(self, capability=(9, 0)):
        self.capability, self.is_available = capability, lambda: True
        self.current_device, self.synchronize = lambda: 0, lambda ordinal: None
        self.get_device_capability = lambda ordinal: self.capability
        self.get_device_properties = lambda ordinal: type(
            "P", (), {"multi_processor_count": 132, "gcnArchName": "gfx90a"}
        )
        self.is_current_stream_capturing = lambda: False


@pytest.fixture
def forgetting():
    """What a process asks once is asked anew in each test."""
    caches = (cuda_backend._backend, cuda_backend._compiler, cuda_backend._logged)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def reason_of(monkeypatch, caplog, cuda, **environment):
    """The reason against GPU kernels on a machine with this torch.cuda; logged once."""
    monkeypatch.setattr(cuda_backend.torch, "cuda", cuda)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        reasons = {cuda_backend.reason_against(torch.device("cuda")) for _ in range(3)}
    assert len(caplog.records) == len(reasons) == 1
    assert (
        next(iter(reasons)) in caplog.text
        and "torch's operations run instead" in caplog.text
    )
    return reasons.pop()


def test_without_a_cuda_device_there_are_no_gpu_kernels(
    monkeypatch, caplog, forgetting
):
    cuda = FakeCuda()
    cuda.is_available = lambda: False
    assert reason_of(monkeypatch, caplog, cuda) == "torch has no CUDA device"


def test_an_old_gpu_has_torchs_operations(monkeypatch, caplog, forgetting):
    assert (
        reason_of(monkeypatch, caplog, FakeCuda((7, 5)))
        == "the GPU is sm_75, they need sm_80 or later"
    )


def test_without_nvrtc_the_reason_lists_where_it_was_looked_for(
    monkeypatch, caplog, forgetting
):
    reason = reason_of(
        monkeypatch, caplog, FakeCuda(), MEGATRON_DS_NVRTC="/nowhere/libnvrtc.so.13"
    )
    assert reason.startswith("NVRTC was not found (/nowhere/libnvrtc.so.13: ")
    assert 'python -m pip install "nvidia-cuda-nvrtc"' in reason


def test_amd_gpus_are_off_until_they_are_asked_for(monkeypatch, caplog, forgetting):
    monkeypatch.setattr(torch.version, "hip", "7.0", raising=False)
    reason = reason_of(monkeypatch, caplog, FakeCuda())
    assert reason == (
        "they have been neither compiled for an AMD GPU nor run on one; "
        "MEGATRON_DS_HIP_KERNELS=1 turns them on"
    )


def test_amd_gpus_that_are_asked_for_need_hiprtc(monkeypatch, caplog, forgetting):
    monkeypatch.setattr(torch.version, "hip", "7.0", raising=False)
    assert "hipRTC was not found" in reason_of(
        monkeypatch, caplog, FakeCuda(), MEGATRON_DS_HIP_KERNELS="1"
    )
