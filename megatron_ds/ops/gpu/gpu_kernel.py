"""Launches of kernels: `GpuKernel` packs arguments and calls a backend of the tensors' device.

    FORWARD = GpuKernel("norm.cu", "norm_forward", "ptr ptr ptr i64 f32")
    FORWARD((dtype_name(x), 4096, 256), rows, 256, x, weight, y, rows, 1e-5)

The backend of a device compiles templates and launches functions. "cuda": NVRTC and the driver. Tests put an
emulator in its place (tests/harness/emulated.py), so that the same wrappers run on CPU tensors.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..product import has_memory

FORMATS = {"ptr": "Q", "i32": "i", "i64": "q", "u32": "I", "u64": "Q", "f32": "f",
           "u64x64": "512s"}                  # up to 64 numbers of 64 bits as bytes, in a struct of 64
TYPE_NAMES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}


def type_name(t: torch.Tensor) -> str:
    """The C++ type of the elements of t in csrc/gpu/device.cuh."""
    return TYPE_NAMES[t.dtype]


class Backend(Protocol):
    """Compiles and launches kernels on one device."""

    def function(self, file: str, expression: str) -> Any:
        """The compiled instantiation of a template of csrc/gpu/`file`: "norm_forward<bf16, 4096, 256>"."""

    def launch(self, function: Any, grid: tuple[int, int, int], block: tuple[int, int, int],
               arguments: ctypes.Array) -> None:
        """Start `function` on the device's current stream. arguments: addresses of the arguments."""

    @property
    def processors(self) -> int:
        """Number of streaming multiprocessors, for kernels that start as many blocks as fit."""


BACKENDS: dict[str, Callable[[torch.device], Backend]] = {}


class GpuKernel:
    """A kernel template, compiled for its template arguments when it is first launched with them.

    file       in csrc/gpu
    name       of the __global__ function template
    arguments  types of its arguments: ptr (a tensor or None), i32, i64, u32, u64, f32; u64x64 only
               as the first
    """

    def __init__(self, file: str, name: str, arguments: str):
        self.file, self.name = file, name
        self._pack = struct.Struct("@" + "".join(FORMATS[a] for a in arguments.split()))
        self._offsets = _offsets([FORMATS[a] for a in arguments.split()])
        self._functions: dict[tuple, Any] = {}

    def expression(self, template: Sequence[Any]) -> str:
        """C++ of the instantiation for these template arguments."""
        return f"{self.name}<{', '.join(_cpp(t) for t in template)}>" if template else self.name

    def __call__(self, template: tuple, grid: int | tuple[int, ...], threads: int, *arguments: Any) -> None:
        """Launch `grid` blocks of `threads` threads. Nothing is launched where tensors have no memory, or for
        an empty grid."""
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        grid = (grid,) if isinstance(grid, int) else grid
        if not all(grid) or not all(has_memory(t) for t in tensors):
            return
        device = tensors[0].device
        backend = BACKENDS[device.type](device)
        key = (template, device)
        if key not in self._functions:
            self._functions[key] = backend.function(self.file, self.expression(template))
        values = [_value(a) for a in arguments]
        memory = ctypes.create_string_buffer(self._pack.pack(*values))
        base = ctypes.addressof(memory)
        addresses = (ctypes.c_void_p * len(values))(*(base + offset for offset in self._offsets))
        backend.launch(self._functions[key], (*grid, 1, 1)[:3], (threads, 1, 1), addresses)


def _value(argument: Any) -> Any:
    if argument is None:
        return 0
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def _cpp(argument: Any) -> str:
    return str(argument).lower() if isinstance(argument, bool) else str(argument)


def _offsets(formats: Sequence[str]) -> list[int]:
    """Place of each value in native alignment."""
    offsets, end = [], 0
    for code in formats:
        size = struct.calcsize(code)
        end = -(-end // size) * size
        offsets.append(end)
        end += size
    return offsets
