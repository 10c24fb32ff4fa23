"""Kernels of csrc/gpu on CPU tensors: compiled by g++ over emulate.h, where each CUDA thread is a fiber.

    with emulated_gpu():
        y = rms_norm(x, weight, 1e-5)          # x on the CPU; GPU implementations run in the emulator
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

from megatron_ds.ops.gpu import gpu_kernel

SOURCES = Path(__file__).parents[2] / "csrc/gpu"
HERE = Path(__file__).parent
CACHE = Path(tempfile.gettempdir()) / f"megatron_ds-emulated-{os.getuid()}"
WORDS = ["g++", "-std=c++20", "-shared", "-fPIC", "-O2", "-fno-gnu-unique", "-fvisibility=hidden",
         "-ffp-contract=off", "-fno-strict-aliasing", "-w", f"-I{SOURCES}", f"-I{HERE}"]


@functools.cache
def compiled(file: str, expression: str, flags: tuple[str, ...] = ()) -> ctypes._CFuncPtr:
    """The launcher of an instantiation, compiled by g++ or found in the cache."""
    text = (f'#include "{file}"\n'
            'extern "C" __attribute__((visibility("default")))\n'
            "int launch(const unsigned* grid, const unsigned* block, void** arguments, uint64_t seed) {\n"
            f"    return emu::launch({expression}, grid, block, arguments, seed);\n}}\n")
    sources = [*sorted(SOURCES.iterdir()), HERE / "emulate.h"]
    words = [*WORDS, *flags]
    key = hashlib.sha256("\0".join([*words, text]).encode() + b"".join(p.read_bytes() for p in sources))
    library = CACHE / f"{key.hexdigest()[:24]}.so"
    if not library.exists():
        CACHE.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=CACHE, suffix=".so", delete=False) as f:
            subprocess.run([*words, "-x", "c++", "-", "-o", f.name], input=text.encode(), check=True)
        os.replace(f.name, library)
    return ctypes.CDLL(str(library)).launch


class EmulatedGpu:
    """A launch backend for CPU tensors. seed: the order in which warps and lanes run."""

    processors = 3

    def __init__(self, seed: int = 0, flags: tuple[str, ...] = ()):
        self.seed, self.flags = seed, flags
        self.launches: list[str] = []

    def function(self, file, expression):
        return expression, compiled(file, expression, self.flags)

    def launch(self, function, grid, block, arguments):
        expression, run = function
        self.launches.append(expression)
        three = ctypes.c_uint * 3
        assert run(three(*grid), three(*block), arguments, ctypes.c_uint64(self.seed)) == 0


@contextmanager
def emulated_gpu(seed: int = 0, flags: tuple[str, ...] = ()) -> Iterator[EmulatedGpu]:
    """CPU tensors are launched into the emulator within the context."""
    backend = EmulatedGpu(seed, flags)
    before = gpu_kernel.BACKENDS.get("cpu")
    gpu_kernel.BACKENDS["cpu"] = lambda device: backend
    try:
        yield backend
    finally:
        gpu_kernel.BACKENDS.pop("cpu")
        if before is not None:
            gpu_kernel.BACKENDS["cpu"] = before
