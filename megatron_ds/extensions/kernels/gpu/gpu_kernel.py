"""Launches of kernels: `GpuKernel` packs arguments and calls the backend of the tensors' device.

    FORWARD = GpuKernel("norm.cu", "norm_forward", "ptr ptr ptr i64 f32", examples=[("bf16", 4096, 256)])
    FORWARD((type_name(x), 4096, 256), rows, 256, x, weight, y, rows, 1e-5)

The backend of a device compiles templates and launches functions: that of CUDA is in cuda_backend.py. Tests
put an emulator in its place (tests/harness/emulated.py), so that the same wrappers run on CPU tensors.
Tensors without memory launch nothing, so that plans run the wrappers, too; `launches_recorded` collects what
would have been launched, for `compile_kernels` to compile at the start of a run.
"""

import ctypes
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ....errors import KernelError
from ....ops.meta_tensors import has_memory
from .cuda_backend import cuda_backend

# Of the struct module.
FORMATS = {
    "ptr": "Q",
    "i32": "i",
    "i64": "q",
    "u32": "I",
    "u64": "Q",
    "f32": "f",
}
TYPE_NAMES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
PLANNED_PROCESSORS = 132  # of an H100 or H200: what plans without a GPU count with


def type_name(t: torch.Tensor) -> str:
    """Return the C++ type of the elements of t in csrc/gpu/device.cuh."""
    return TYPE_NAMES[t.dtype]


class Backend(Protocol):
    """Compiles and launches kernels on one device."""

    def function(self, file: str, expression: str) -> Any:
        """Return the compiled instantiation of a template of csrc/gpu/`file`: "norm_forward<bf16, 4096, 256>"."""

    def launch(
        self,
        function: Any,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: ctypes.Array,
    ) -> None:
        """Start `function` on the device's current stream. arguments: addresses of the arguments."""

    @property
    def processors(self) -> int:
        """Number of streaming multiprocessors, for kernels that start as many blocks as fit."""


BACKENDS: dict[str, Callable[[torch.device], Backend]] = {"cuda": cuda_backend}


def processors(t: torch.Tensor) -> int:
    """Number of streaming multiprocessors of the device of t; for tensors without memory that of an H100."""
    return (
        BACKENDS[t.device.type](t.device).processors
        if has_memory(t)
        else PLANNED_PROCESSORS
    )


class GpuKernel:
    """A kernel template, compiled for its template arguments when it is first launched with them.

    file       in csrc/gpu, or an absolute path
    name       of the __global__ function template
    arguments  types of its arguments: ptr (a tensor or None), i32, i64, u32, u64, f32
    examples   template arguments of typical uses, for which tests look at the machine code
    """

    def __init__(
        self, file: str, name: str, arguments: str, examples: Sequence[tuple] = ()
    ):
        self.file = file
        self.name = name
        self.examples = tuple(examples)
        self.types = arguments.split()
        form, offsets = _layout([FORMATS[a] for a in self.types])
        self._pointers = [i for i, a in enumerate(self.types) if a == "ptr"]
        self._first = self._pointers[0]  # a tensor, never None
        self._pack = struct.Struct(form)
        self._arguments = _Arguments(self._pack.size, offsets)
        self._ways: dict[tuple, tuple[Callable[..., None] | None, Any]] = {}

    def expression(self, template: Sequence[Any]) -> str:
        """C++ of the instantiation for these template arguments."""
        return (
            f"{self.name}<{', '.join(_cpp(t) for t in template)}>"
            if template
            else self.name
        )

    def __call__(
        self,
        template: tuple,
        grid: int | tuple[int, ...],
        threads: int,
        *arguments: Any,
    ) -> None:
        """Launch `grid` blocks of `threads` threads. Nothing is launched where tensors have no memory, or for
        an empty grid.

        Raises KernelError if the kernel does not compile or start, and at the first launch if the tensors are
        on different devices.
        """
        grid = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
        if 0 in grid:
            return
        for launches in _RECORDS:
            launches[self, template] = None
        # The way to launch is found at the first launch of an instantiation on a device.
        first = arguments[self._first]
        device = first.device
        key = template, device, type(first), BACKENDS.get(device.type)
        way = self._ways.get(key)
        if way is None:
            way = self._ways[key] = self._way(template, device, arguments)
        launch, function = way
        if launch is None:
            return
        # Arguments go into memory that the driver reads.
        values = list(arguments)
        for place in self._pointers:
            value = values[place]
            values[place] = 0 if value is None else value.data_ptr()
        packed = self._arguments
        self._pack.pack_into(packed.memory, 0, *values)
        launch(function, grid, (threads, 1, 1), packed.addresses)

    def _way(
        self, template: tuple, device: torch.device, arguments: Sequence[Any]
    ) -> tuple[Callable[..., None] | None, Any]:
        """(`Backend.launch`, the compiled function); (None, None) for tensors without memory, as in plans."""
        self._check(arguments, device)
        if not has_memory(arguments[self._first]):
            return None, None
        backend = BACKENDS[device.type](device)
        return backend.launch, backend.function(self.file, self.expression(template))

    def _check(self, arguments: Sequence[Any], device: torch.device) -> None:
        """A kernel that reads the memory of another device ends the process's use of the GPU."""
        if len(arguments) != len(self.types):
            raise KernelError(
                f"{self.name} has {len(self.types)} arguments, not {len(arguments)}."
            )
        for place, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor) and argument.device != device:
                raise KernelError(
                    f"{self.name}: argument {place} is on {argument.device}, the first tensor "
                    f"on {device}. All tensors of a kernel must be on one device."
                )


Launches = dict[tuple[GpuKernel, tuple], None]
_RECORDS: list[Launches] = []


@contextmanager
def launches_recorded() -> Iterator[Launches]:
    """Collects {(kernel, template arguments)} of all launches within the context, in their order. Those of
    tensors without memory count too."""
    launches: Launches = {}
    _RECORDS.append(launches)
    try:
        yield launches
    finally:
        _RECORDS[:] = [other for other in _RECORDS if other is not launches]


def compile_kernels(
    launches: Iterable[tuple[GpuKernel, tuple]], device: torch.device
) -> str:
    """Compile what was recorded for a CUDA device, several kernels at a time; returns a line for the log.

    Raises KernelError if a kernel does not compile.
    """
    backend = cuda_backend(device)
    backend.prepare(
        (kernel.file, kernel.expression(template)) for kernel, template in launches
    )
    return backend.summary()


class _Arguments(threading.local):
    # Memory for the arguments of one launch, in each thread: backward launches in threads of autograd's, and
    # a launch lets other threads run. The driver copies the arguments before it returns.

    def __init__(self, size: int, offsets: Sequence[int]):
        self.memory = ctypes.create_string_buffer(size)
        base = ctypes.addressof(self.memory)
        self.addresses = (ctypes.c_void_p * len(offsets))(
            *(base + offset for offset in offsets)
        )


def _cpp(argument: Any) -> str:
    return str(argument).lower() if isinstance(argument, bool) else str(argument)


def _layout(formats: Sequence[str]) -> tuple[str, list[int]]:
    """(one format for all values with the padding of C, place of each value)."""
    form = "="
    offsets = []
    end = 0
    for code in formats:
        size = struct.calcsize("=" + code)
        alignment = min(size, 8)
        padding = -end % alignment
        form += f"{padding}x{code}"
        offsets.append(end + padding)
        end += padding + size
    return form, offsets
