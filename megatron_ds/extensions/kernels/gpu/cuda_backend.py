"""The backend of GPUs: compiles with NVRTC, keeps machine code on disk, launches with the driver.

One backend for each device of the process; a module belongs to the primary context of its device, which is
torch's. With torch's ROCm build: hipRTC and HIP, off unless MEGATRON_DS_HIP_KERNELS=1. The calls of HIP are
tested with a stand-in; the sources have been neither compiled by hipRTC in a test nor run on an AMD GPU.

Kernels are loaded before their first launch, which must not fall into the capture of a CUDA graph: loading
allocates memory, which a capture forbids. `CudaBackend.function` raises KernelError there.
"""

import ctypes
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ....errors import KernelError
from .driver import CUDA, HIP, LATE_ERRORS, Driver
from .kernel_cache import CompiledKernel, KernelCache, cache_folder, cache_key
from .kernel_sources import kernel_source
from .nvrtc import RuntimeCompiler, load_hiprtc, load_nvrtc

logger = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 0)
COMPILING_THREADS = 8


@dataclass(frozen=True)
class LoadedKernel:
    """A function on one device. module: keeps it loaded."""

    handle: ctypes.c_void_p
    module: ctypes.c_void_p
    name: str


@dataclass(frozen=True)
class GpuDevice:
    """What a backend needs of a device beside its driver.

    ordinal       torch's number of the device, which is also the driver's
    target        of the compiler: "sm_90"
    processors    number of streaming multiprocessors
    stream        address of torch's current stream
    current       number of torch's current device
    is_capturing  whether that stream is being captured into a graph
    """

    ordinal: int
    target: str
    processors: int
    stream: Callable[[], int]
    current: Callable[[], int]
    is_capturing: Callable[[], bool]


class _Thread(threading.local):
    has_context = False  # whether the device's context was current in this thread


class CudaBackend:
    """`Backend` of one GPU. A function is compiled, or read from the cache, when it is first asked for."""

    def __init__(
        self,
        device: GpuDevice,
        driver: Driver,
        compiler: RuntimeCompiler,
        cache: KernelCache,
    ):
        self.device = device
        self.compiler = compiler
        self.processors = device.processors
        self._driver = driver
        self._launch = driver.launch
        self._streams: dict[int, ctypes.c_void_p] = {}
        self._here = _Thread()
        self._cache = cache
        self._context = driver.primary_context(device.ordinal)
        self._functions: dict[tuple[str, str], LoadedKernel] = {}
        self._lock = threading.RLock()  # backward runs in threads of autograd's
        self.compiled = 0
        self.found = 0
        self.seconds = 0.0

    def function(self, file: str, expression: str) -> LoadedKernel:
        """Return the loaded instantiation of a template of csrc/gpu/`file`.

        Raises KernelError if it does not compile or load, and during the capture of a CUDA graph.
        """
        with self._lock:
            if (file, expression) not in self._functions:
                self.prepare([(file, expression)])
            return self._functions[file, expression]

    def prepare(self, wanted: Iterable[tuple[str, str]]) -> None:
        """Compile and load those (file, expression) that are not loaded yet, several at a time."""
        with self._lock:
            missing = [
                each for each in dict.fromkeys(wanted) if each not in self._functions
            ]
            if not missing:
                return
            if self.device.is_capturing():
                raise KernelError(
                    f"{missing[0][1]} is first launched in the capture of a CUDA graph, which "
                    "forbids to load it. Run the step once before the capture."
                )
            start = time.perf_counter()
            with ThreadPoolExecutor(min(COMPILING_THREADS, len(missing))) as pool:
                kernels = list(pool.map(lambda each: self._compiled(*each), missing))
            for (file, expression), (kernel, was_found) in zip(missing, kernels):
                self._functions[file, expression] = self._loaded(kernel, expression)
                self.found = self.found + was_found
                self.compiled = self.compiled + (not was_found)
            self.seconds += time.perf_counter() - start

    def launch(
        self,
        function: LoadedKernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: ctypes.Array,
    ) -> None:
        """Start `function` on torch's current stream. Raises KernelError with the driver's reason."""
        number = self.device.stream()
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = ctypes.c_void_p(number)
        # A thread in which the context was current has it still while torch's current device is this one.
        here = self._here
        if here.has_context and self.device.current() == self.device.ordinal:
            code = self._launch(
                function.handle, *grid, *block, 0, stream, arguments, None
            )
        else:
            here.has_context = self._driver.current_context() == self._context
            with self._driver.context(self._context):
                code = self._launch(
                    function.handle, *grid, *block, 0, stream, arguments, None
                )
        if code:
            raise KernelError(self._launch_error(function, grid, block, code))

    def summary(self) -> str:
        """One line for the log: "kernels: 12 compiled in 1.4 s (sm_90, nvrtc 13.0)"."""
        found = f", {self.found} from the cache" if self.found else ""
        return (
            f"kernels: {self.compiled} compiled{found} in {self.seconds:.1f} s ({self.device.target}, "
            f"{self.compiler.name})"
        )

    def _compiled(self, file: str, expression: str) -> tuple[CompiledKernel, bool]:
        """(the kernel, whether it was in the cache). Runs in several threads."""
        source = kernel_source(file)
        target = self.device.target
        compiler = self.compiler
        key = cache_key(
            source, expression, compiler.name, compiler.options(source, target)
        )
        found = self._cache.read(key)
        if found:
            return found, True
        program = compiler.compile(source, [expression], target)
        kernel = CompiledKernel(program.symbols[expression], program.code)
        self._cache.write(key, kernel)
        return kernel, False

    def _loaded(self, kernel: CompiledKernel, expression: str) -> LoadedKernel:
        try:
            with self._driver.context(self._context):
                module = self._driver.load(kernel.code)
                return LoadedKernel(
                    self._driver.function(module, kernel.symbol), module, expression
                )
        except KernelError as error:
            by = f"{self.device.target} by {self.compiler.name}"
            raise KernelError(
                f"{expression} for {by} was not loaded: {error}"
            ) from None

    def _launch_error(
        self, function: LoadedKernel, grid: tuple, block: tuple, code: int
    ) -> str:
        late = ""
        if code in LATE_ERRORS:
            late = (
                ". The fault may be that of any kernel before it: GPUs report errors late. With "
                "CUDA_LAUNCH_BLOCKING=1 the kernel at fault is named"
            )
        return (
            f"{function.name} with {' × '.join(map(str, grid))} blocks of {' × '.join(map(str, block))} "
            f"threads was not started: {self._driver.error_text(code)}{late}."
        )


def cuda_backend(device: torch.device) -> CudaBackend:
    """Return the backend of a device of torch.cuda. Raises KernelError with the reason where there is none."""
    return _backend(
        torch.cuda.current_device() if device.index is None else device.index
    )


def reason_against(device: torch.device) -> str:
    """Return why GPU kernels cannot run on the device, logged once; "" if they can."""
    if not torch.cuda.is_available():
        return _logged("torch has no CUDA device")
    try:
        cuda_backend(device)
        return ""
    except KernelError as error:
        return _logged(str(error))


@functools.cache
def _logged(reason: str) -> str:
    logger.warning("GPU kernels are off, torch's operations run instead: %s", reason)
    return reason


@functools.cache
def _backend(ordinal: int) -> CudaBackend:
    # Refuse cards on which the kernels have not run.
    capability = torch.cuda.get_device_capability(ordinal)
    is_hip = torch.version.hip is not None
    if is_hip and os.environ.get("MEGATRON_DS_HIP_KERNELS") != "1":
        raise KernelError(
            "they have been neither compiled for an AMD GPU nor run on one; "
            "MEGATRON_DS_HIP_KERNELS=1 turns them on"
        )
    if not is_hip and capability < LEAST_CAPABILITY:
        raise KernelError(
            f"the GPU is sm_{capability[0]}{capability[1]}, they need "
            f"sm_{LEAST_CAPABILITY[0]}{LEAST_CAPABILITY[1]} or later"
        )
    # The compiler's target, the device and its driver.
    properties = torch.cuda.get_device_properties(ordinal)
    compiler = _compiler(is_hip)
    target = properties.gcnArchName if is_hip else compiler.target(capability)
    torch.cuda.synchronize(ordinal)  # torch makes the primary context, with its flags
    device = GpuDevice(
        ordinal,
        target,
        properties.multi_processor_count,
        functools.partial(_current_stream, ordinal),
        _current_device,
        torch.cuda.is_current_stream_capturing,
    )
    return CudaBackend(
        device,
        Driver(names=HIP if is_hip else CUDA),
        compiler,
        KernelCache(cache_folder(os.environ)),
    )


@functools.cache
def _compiler(is_hip: bool) -> RuntimeCompiler:
    return load_hiprtc() if is_hip else load_nvrtc()


def _stream_of_torch(ordinal: int) -> int:
    return torch.cuda.current_stream(ordinal).cuda_stream


# The first is what torch's own code generator calls, in a tenth of the time. So is that of the device.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of_torch)
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
