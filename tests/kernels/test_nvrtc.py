"""NVRTC by its C interface, without a GPU: finding it, targets, messages."""

from dataclasses import replace

import pytest
import torch

from megatron_ds.errors import KernelError
from megatron_ds.extensions.kernels.gpu import cuda_backend, driver, norm_kernels, nvrtc
from megatron_ds.extensions.kernels.gpu.kernel_sources import KernelSource
from megatron_ds.extensions.kernels.gpu.nvrtc import RuntimeCompiler, load_nvrtc
from tests.harness.real_nvrtc import nvrtc_or_skip
from tests.harness.stand_in_gpu import libcuda

TOY = KernelSource(
    "toy.cu", "template <int N> __global__ void toy(float* p) { p[N] = 1.0f; }", ()
)


def test_the_compiler_has_a_version_and_the_architectures_of_today():
    assert nvrtc_or_skip().version >= nvrtc.LEAST_NVRTC
    assert nvrtc_or_skip().name == "nvrtc {}.{}".format(*nvrtc_or_skip().version)
    assert {80, 90} <= set(nvrtc_or_skip().architectures)


def test_a_gpu_newer_than_the_compiler_gets_ptx_of_the_newest_architecture_below():
    newest = nvrtc_or_skip().architectures[-1]
    assert nvrtc_or_skip().target((9, 0)) == "sm_90"
    assert nvrtc_or_skip().target((99, 0)) == f"compute_{newest}"
    program = nvrtc_or_skip().compile(TOY, ["toy<3>"], nvrtc_or_skip().target((99, 0)))
    assert f".entry {program.symbols['toy<3>']}".encode() in program.code
    with pytest.raises(KernelError, match="the GPU is sm_20"):
        nvrtc_or_skip().target((2, 0))


def test_a_compile_error_has_the_compilers_message_and_the_line():
    wrong = replace(TOY, text=TOY.text.replace("1.0f", "unknown_name"))
    with pytest.raises(
        KernelError,
        match=r"toy<3> of toy.cu does not compile for sm_90 with nvrtc .*"
        r'(?s:.*)toy.cu\(1\): error: identifier "unknown_name"',
    ):
        nvrtc_or_skip().compile(wrong, ["toy<3>"], "sm_90")


def test_an_expression_that_names_no_kernel_is_an_error():
    with pytest.raises(KernelError, match="absent<1>"):
        nvrtc_or_skip().compile(TOY, ["absent<1>"], "sm_90")


def test_contraction_is_off_where_the_source_says_so():
    text = "__global__ void k(float* p) { p[0] = p[1] * p[2] + p[3]; }"
    ptx = lambda text: (
        nvrtc_or_skip().compile(replace(TOY, text=text), ["k"], "compute_90").code
    )
    assert b"fma.rn.f32" in ptx(text) and b"fma" not in ptx(
        "// contraction: off\n" + text
    )


def test_an_nvrtc_that_is_too_old_is_refused_with_its_version(monkeypatch):
    nvrtc_or_skip()
    monkeypatch.setattr(nvrtc, "LEAST_NVRTC", (99, 0))
    with pytest.raises(
        KernelError,
        match=r"NVRTC was not found \(.* is nvrtc \d+\.\d+, older than 99\.0",
    ):
        load_nvrtc()


def test_a_library_that_is_not_nvrtc_is_a_reason(monkeypatch):
    monkeypatch.setenv("MEGATRON_DS_NVRTC", libcuda())
    with pytest.raises(KernelError, match="NVRTC was not found .*nvrtcGetErrorString"):
        load_nvrtc()


def test_the_compiler_of_torchs_cuda_version_is_tried_first(monkeypatch, tmp_path):
    for inner, major in (("cu13/lib", 13), ("cuda_nvrtc/lib", 12)):
        (tmp_path / inner).mkdir(parents=True)
        (tmp_path / inner / f"libnvrtc.so.{major}").write_text("")
    monkeypatch.delenv("MEGATRON_DS_NVRTC", raising=False)
    monkeypatch.setattr(nvrtc, "_nvidia_folders", lambda: [tmp_path])
    monkeypatch.setattr(nvrtc, "_by_pathfinder", lambda: "/found/libnvrtc.so.13")
    wheels = [
        str(tmp_path / "cu13/lib/libnvrtc.so.13"),
        str(tmp_path / "cuda_nvrtc/lib/libnvrtc.so.12"),
    ]
    for cuda, order in ((None, (0, 1)), ("13.0", (0, 1)), ("12.8", (1, 0))):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        found = list(nvrtc.nvrtc_candidates())
        assert found[:3] == [wheels[i] for i in order] + ["/found/libnvrtc.so.13"]
        assert sorted(found[3:]) == ["libnvrtc.so.12", "libnvrtc.so.13"]


def test_machine_code_that_the_driver_refuses_is_an_error_with_the_kernels_name(
    monkeypatch, tmp_path
):
    """All of a GPU's path but its hardware: the stand-in driver takes no NVIDIA code."""
    monkeypatch.setattr(cuda_backend, "CUDA", replace(driver.CUDA, library=libcuda()))
    monkeypatch.setenv("MEGATRON_DS_CACHE", str(tmp_path))
    device = cuda_backend.GpuDevice(
        0, "sm_90", 132, lambda: 0, lambda: 0, lambda: False
    )
    backend = cuda_backend.CudaBackend(
        device,
        driver.Driver(libcuda()),
        nvrtc_or_skip(),
        cuda_backend.KernelCache(tmp_path),
    )
    kernel = norm_kernels.FORWARD
    with pytest.raises(
        KernelError,
        match=r"norm_forward<.*> for sm_90 by nvrtc .* was not loaded: "
        r"cuModuleLoadData: CUDA_ERROR_INVALID_IMAGE \(200\)",
    ):
        backend.function(kernel.file, kernel.expression(kernel.examples[0]))
    assert len(list(tmp_path.iterdir())) == 1  # compiled and kept


def test_a_name_that_no_loader_knows_is_a_reason():
    with pytest.raises(OSError):
        RuntimeCompiler("libnvrtc-that-is-not-there.so")
