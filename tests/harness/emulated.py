"""Kernels of csrc/gpu on CPU tensors: compiled by g++ over emulate.h, where each CUDA thread is a fiber.

    with emulated_gpu(seed=1) as gpu:
        y = rms_norm(x, weight, 1e-5)          # x on the CPU; GPU implementations run in the emulator
    gpu.launches                               # ["norm_forward<float, 264, 64, true, false>"]

An instantiation is compiled when it is first launched, in about 0.3 s. `compile_together` compiles all that a
function launches in one call of g++, in a fraction of that time each.
"""

import ctypes
import fcntl
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ds.extensions.kernels.gpu import gpu_kernel

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "csrc/gpu"
CACHE = Path(tempfile.gettempdir()) / f"megatron_ds-emulated-{os.getuid()}"
WORDS = ("g++", "-std=c++20", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w")
LIBRARY = ("-shared", "-fPIC", "-fno-gnu-unique", "-fvisibility=hidden")
MESSAGE_BYTES = 512
SEEDS = (0, 1, 2)

LAUNCHER = """
extern "C" __attribute__((visibility("default")))
int launch_{number}(const unsigned* grid, const unsigned* block, void** arguments, uint64_t seed,
                    char* text, size_t text_size) {{
    return emu::launch({expression}, grid, block, arguments, seed, text, text_size);
}}
"""


class EmulationError(RuntimeError):
    """A launch that is wrong on every GPU: its sizes, or barriers that not all threads reach."""


class EmulatedGpu:
    """A launch backend for CPU tensors; see `emulated_gpu`."""

    def __init__(
        self,
        seed: int = 0,
        processors: int = 3,
        flags: tuple[str, ...] = (),
        sources: Path = SOURCES,
    ):
        self.seed, self.processors, self.flags, self.sources = (
            seed,
            processors,
            flags,
            sources,
        )
        self.launches: list[str] = []

    def function(self, file: str, expression: str) -> tuple[str, str]:
        """Names an instantiation. `GpuKernel` keeps the name for other backends too, so no code is bound to
        it here."""
        return file, expression

    def launch(self, function, grid, block, arguments) -> None:
        """Run the kernel to its end. Raises EmulationError."""
        file, expression = function
        self.launches.append(expression)
        run = compiled(self.sources / file, expression, self.flags)
        three, text = ctypes.c_uint * 3, ctypes.create_string_buffer(MESSAGE_BYTES)
        error = run(
            three(*grid),
            three(*block),
            arguments,
            ctypes.c_uint64(self.seed),
            text,
            ctypes.c_size_t(MESSAGE_BYTES),
        )
        if error:
            reason = (
                text.value.decode()
                if error == 2
                else f"no GPU takes grid {grid}, block {block}"
            )
            raise EmulationError(f"{expression}: {reason}")


class RecordingGpu(EmulatedGpu):
    """Launches nothing and notes what would be launched."""

    def __init__(self):
        super().__init__()
        self.wanted: dict[
            str, dict[str, None]
        ] = {}  # file → expressions, each once, in order

    def launch(self, function, grid, block, arguments) -> None:
        """Note the instantiation."""
        file, expression = function
        self.wanted.setdefault(file, {})[expression] = None


@contextmanager
def emulated_gpu(
    seed: int = 0,
    processors: int = 3,
    flags: tuple[str, ...] = (),
    sources: Path = SOURCES,
) -> Iterator[EmulatedGpu]:
    """CPU tensors are launched into the emulator within the context.

    seed        of the order in which blocks, warps and lanes run
    processors  the number of multiprocessors that wrappers see, for kernels that fill the GPU
    flags       of g++ in addition, for example of a sanitizer
    sources     the folder with the .cu files
    """
    with _backend_for_cpu(EmulatedGpu(seed, processors, flags, sources)) as gpu:
        yield gpu


def wanted_by(run: Callable[[], object]) -> dict[str, list[str]]:
    """Instantiations that `run` launches: {"norm.cu": ["norm_forward<float, 264, 64, true, false>"]}.

    Nothing is computed: `run` must not depend on values of results.
    """
    with _backend_for_cpu(RecordingGpu()) as gpu:
        run()
    return {file: list(expressions) for file, expressions in gpu.wanted.items()}


def compile_together(
    run: Callable[[], object], flags: tuple[str, ...] = (), sources: Path = SOURCES
) -> None:
    """Compile all that `run` launches, in one call of g++ for each file, for emulations in this process."""
    for file, expressions in wanted_by(run).items():
        compile_expressions(sources / file, expressions, flags)


def compile_expressions(
    file: Path, expressions: list[str], flags: tuple[str, ...] = ()
) -> None:
    """Compile instantiations of one file in one call of g++, for emulations in this process."""
    text = f'#include "{file.name}"\n' + "".join(
        LAUNCHER.format(number=i, expression=expression)
        for i, expression in enumerate(expressions)
    )
    library = ctypes.CDLL(str(built(file, text, (*LIBRARY, *flags))))
    for number, expression in enumerate(expressions):
        _COMPILED[file, expression, flags] = library[f"launch_{number}"]


def compiled(
    file: Path, expression: str, flags: tuple[str, ...] = ()
) -> ctypes._CFuncPtr:
    """The launcher of an instantiation."""
    if (file, expression, flags) not in _COMPILED:
        compile_expressions(file, [expression], flags)
    return _COMPILED[file, expression, flags]


_COMPILED: dict[tuple[Path, str, tuple[str, ...]], ctypes._CFuncPtr] = {}


@contextmanager
def _backend_for_cpu(backend: EmulatedGpu) -> Iterator[EmulatedGpu]:
    before = gpu_kernel.BACKENDS.get("cpu")
    gpu_kernel.BACKENDS["cpu"] = lambda device: backend
    try:
        yield backend
    finally:
        del gpu_kernel.BACKENDS["cpu"]
        if before is not None:
            gpu_kernel.BACKENDS["cpu"] = before


def built(file: Path, text: str, flags: tuple[str, ...]) -> Path:
    """What g++ makes of the C++ `text`, which includes `file`, or the result of an earlier time.

    Processes that want the same result wait for the first, which builds it. It gets its name when it is
    complete, so a process that stops early leaves none that is broken.
    """
    folders = [
        f"{option}{folder}{end}"
        for folder in (file.parent, SOURCES, HERE)
        for option, end in (("-I", ""), ("-ffile-prefix-map=", "/="))
    ]
    key = hashlib.sha256(
        "\0".join([*WORDS, *flags, text]).encode()
        + b"".join(_included(text, file.parent))
    )
    result = CACHE / f"{file.stem}-{key.hexdigest()[:24]}"
    CACHE.mkdir(mode=0o700, exist_ok=True)
    if not result.exists():
        with open(f"{result}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not result.exists():
                part = Path(f"{result}.{os.getpid()}")
                subprocess.run(
                    [*WORDS, *flags, *folders, "-x", "c++", "-", "-o", part],
                    input=text.encode(),
                    check=True,
                )
                part.rename(result)
    return result


def _included(text: str, folder: Path) -> list[bytes]:
    """The files that the text includes, and those that they include."""
    found: dict[Path, bytes] = {}
    texts = [text.encode()]
    while texts:
        for name in re.findall(rb'#include "([^"]+)"', texts.pop()):
            path = next(
                path
                for place in (folder, SOURCES, HERE)
                if (path := place / name.decode()).exists()
            )
            if path not in found:
                found[path] = path.read_bytes()
                texts.append(found[path])
    return list(found.values())
