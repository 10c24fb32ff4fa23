"""The path from a `GpuKernel` to a GPU without a GPU: a compiler and a driver in place of NVIDIA's, the rest
is the code that runs on GPUs.

    with stand_in_gpu(tmp_path) as gpu:
        y = norm_kernels.rms_norm(x, weight, 1e-5)         # x on the CPU
    gpu.driver_counts()                                    # modules loaded, kernels launched

The compiler is g++ with the emulator, and its machine code a shared library; the driver,
stand_in_libcuda.cpp, loads that from memory.
"""

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ds.errors import KernelError
from megatron_ds.extensions.kernels.gpu import gpu_kernel, kernel_sources
from megatron_ds.extensions.kernels.gpu.cuda_backend import CudaBackend, GpuDevice
from megatron_ds.extensions.kernels.gpu.driver import CUDA, Driver, DriverNames
from megatron_ds.extensions.kernels.gpu.kernel_cache import KernelCache
from megatron_ds.extensions.kernels.gpu.nvrtc import Program

HERE = Path(__file__).parent
BUILT = Path(tempfile.gettempdir()) / f"megatron_ds-stand-in-{os.getuid()}"
WORDS = ("g++", "-std=c++20", "-shared", "-fPIC", "-O1", "-w")
OF_KERNELS = (
    "-fno-gnu-unique",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
)
SYMBOL = "emulated_kernel"
LAUNCHER = """#include "{file}"
extern "C" __attribute__((visibility("default")))
int {symbol}(const unsigned* grid, const unsigned* block, void** arguments) {{
    char text[512];
    return emu::launch({expression}, grid, block, arguments, 1, text, sizeof text);
}}
"""


# A kernel that computes nothing.
HOLLOW = """extern "C" int {symbol}(const unsigned*, const unsigned*, void**) {{ return 0; }}"""


class StandInCompiler:
    """Has the interface of `nvrtc.RuntimeCompiler` as far as a backend uses it.

    hollow: all kernels compute nothing, which takes no time to compile
    """

    name = "g++ 1.0"

    def __init__(self, hollow: bool = False):
        self.compilations: list[str] = []
        self.hollow = hollow

    def options(self, source, target):
        """The options of a compiler that has two targets."""
        return (target, "contracts" if source.contracts else "does not")

    def compile(self, source, expressions, target, extra=()):
        """A shared library as machine code. Raises KernelError with the messages of g++."""
        (expression,) = expressions
        self.compilations.append(expression)
        if self.hollow:
            library = _built(HOLLOW.format(symbol=SYMBOL), "")
            return Program(library.read_bytes(), {expression: SYMBOL}, "")
        text = LAUNCHER.format(file=source.name, expression=expression, symbol=SYMBOL)
        folder = kernel_sources.source_folder()
        key = repr((source, [p.read_bytes() for p in sorted(HERE.glob("*.h"))]))
        library = _built(text, key, *OF_KERNELS, f"-I{folder}", f"-I{HERE}")
        return Program(library.read_bytes(), {expression: SYMBOL}, "")


class StandInGpu:
    """A backend on the stand-in driver.

    cache: folder of compiled kernels, or None. names: of the driver's functions, CUDA's or HIP's
    """

    def __init__(
        self,
        cache: Path | None,
        ordinal: int = 0,
        hollow: bool = False,
        names: DriverNames = CUDA,
    ):
        self.compiler, self.capturing, self.current_stream = (
            StandInCompiler(hollow),
            False,
            0x5000,
        )
        self._driver = ctypes.CDLL(libcuda())
        device = GpuDevice(
            ordinal,
            "sm_90",
            3,
            lambda: self.current_stream,
            lambda: ordinal,
            lambda: self.capturing,
        )
        self.backend = CudaBackend(
            device, Driver(libcuda(), names), self.compiler, KernelCache(cache)
        )

    def driver_counts(self) -> tuple[int, int]:
        """(modules loaded, kernels launched) in this process."""
        return self._driver.stand_in_loads(), self._driver.stand_in_launches()

    def last_stream(self) -> int:
        """The stream of the last launch."""
        self._driver.stand_in_last_stream.restype = ctypes.c_void_p
        return self._driver.stand_in_last_stream()

    def fail_next_launch(self, error: int) -> None:
        """The next launch returns this error and runs nothing."""
        self._driver.stand_in_fail_next_launch(error)


@contextmanager
def stand_in_gpu(
    cache: Path | None,
    ordinal: int = 0,
    hollow: bool = False,
    names: DriverNames = CUDA,
) -> Iterator[StandInGpu]:
    """CPU tensors are launched by the stand-in driver within the context."""
    gpu, before = StandInGpu(cache, ordinal, hollow, names), dict(gpu_kernel.BACKENDS)
    gpu_kernel.BACKENDS["cpu"] = lambda device: gpu.backend
    try:
        yield gpu
    finally:
        gpu_kernel.BACKENDS.clear()
        gpu_kernel.BACKENDS.update(before)


@functools.cache
def libcuda() -> str:
    """Path of the stand-in driver."""
    return str(_built((HERE / "stand_in_libcuda.cpp").read_text(), "", "-ldl"))


def _built(text: str, key: str, *flags: str) -> Path:
    """A shared library of this C++ text, compiled unless an equal one was. key: what else it depends on."""
    words = [*WORDS, *flags]
    digest = hashlib.sha256("\0".join([*words, text, key]).encode()).hexdigest()[:24]
    library = BUILT / f"{digest}.so"
    if not library.exists():
        BUILT.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=BUILT, suffix=".so", delete=False) as f:
            done = subprocess.run(
                [*words, "-x", "c++", "-", "-o", f.name],
                input=text.encode(),
                capture_output=True,
            )
        if done.returncode:
            os.unlink(f.name)
            raise KernelError(f"does not compile:\n{done.stderr.decode()}")
        os.replace(f.name, library)
    return library
