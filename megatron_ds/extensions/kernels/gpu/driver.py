"""The driver by its C interface: modules, functions, launches, and the context in which they are valid.

torch works in the primary context of each device; so does this file. A thread in which neither torch nor
another library has used the device has no current context, and a process with several GPUs may have another
device's: `Driver.context` makes the right one current around a load, and `CudaBackend` around a launch.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ....errors import KernelError


@dataclass(frozen=True)
class DriverNames:
    """How the drivers of two vendors differ: names of functions that are otherwise alike.

    get_current, set_current  of the calling thread: its context, or with HIP, which has no contexts, its
                              device
    retain                    "" where a place is the number of a device
    """

    library: str
    load: str
    get_function: str
    launch: str
    get_current: str
    set_current: str
    device: str
    retain: str
    error_name: str
    error_text: str


CUDA = DriverNames(
    "libcuda.so.1",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuLaunchKernel",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuGetErrorName",
    "cuGetErrorString",
)
HIP = DriverNames(
    "libamdhip64.so",
    "hipModuleLoadData",
    "hipModuleGetFunction",
    "hipModuleLaunchKernel",
    "hipGetDevice",
    "hipSetDevice",
    "",
    "",
    "hipGetErrorName",
    "hipGetErrorString",
)

# Errors of a kernel that ran earlier; the driver reports them at whatever call comes next.
LATE_ERRORS = frozenset((700, 701, 702, 710, 713, 714, 715, 716, 717, 718, 719, 999))


class Driver:
    """libcuda, or HIP's library. library: path or name. KernelError if it cannot be loaded.

    launch  the C function: (function, 3 sizes of the grid, 3 of a block, bytes of dynamic shared memory,
            stream, addresses of the arguments, None) → error code. Pointers are c_void_p or arrays: it has no
            argtypes, whose conversions would take longer than the launch
    """

    def __init__(self, library: str | None = None, names: DriverNames = CUDA):
        self.names = names
        try:
            self._library = ctypes.CDLL(library or names.library)
        except OSError as error:
            raise KernelError(f"the GPU driver cannot be loaded: {error}") from None
        self.launch = getattr(self._library, names.launch)
        self._get_current = getattr(self._library, names.get_current)
        self._set_current = getattr(self._library, names.set_current)
        self._place_type = ctypes.c_void_p if names.retain else ctypes.c_int
        self._set_current.argtypes = [self._place_type]

    def primary_context(self, ordinal: int) -> int:
        """Return the context of torch on the device, initialised if it was not. HIP: the device's number."""
        if not self.names.retain:
            return ordinal
        device = ctypes.c_int()
        context = ctypes.c_void_p()
        self._call(self.names.device, ctypes.byref(device), ctypes.c_int(ordinal))
        self._call(self.names.retain, ctypes.byref(context), device)
        return context.value or 0

    def current_context(self) -> int:
        """Return the context of this thread; 0 if it has none."""
        place = self._place_type()
        if failed := self._get_current(ctypes.byref(place)):
            self._check(self.names.get_current, failed)
        return place.value or 0

    @contextmanager
    def context(self, context: int) -> Iterator[None]:
        """`context` is current in this thread within the context, and the one before it afterwards."""
        before = self.current_context()
        if before == context:
            yield
            return
        self._check(self.names.set_current, self._set_current(context))
        try:
            yield
        finally:
            self._check(self.names.set_current, self._set_current(before))

    def load(self, code: bytes) -> ctypes.c_void_p:
        """Return a module in the current context, of machine code or PTX."""
        module = ctypes.c_void_p()
        self._call(self.names.load, ctypes.byref(module), ctypes.c_char_p(code))
        return module

    def function(self, module: ctypes.c_void_p, symbol: str) -> ctypes.c_void_p:
        """Return a function of a module. It is loaded here, not at its first launch, where lazy loading is on."""
        function = ctypes.c_void_p()
        self._call(
            self.names.get_function, ctypes.byref(function), module, symbol.encode()
        )
        return function

    def error_text(self, code: int) -> str:
        """Name, number and meaning: "CUDA_ERROR_ILLEGAL_ADDRESS (700), an illegal memory access …"."""
        name = self._describe(self.names.error_name, code)
        meaning = self._describe(self.names.error_text, code)
        return f"{name or 'unknown error'} ({code}){', ' + meaning if meaning else ''}"

    def _describe(self, function: str, code: int) -> str:
        ask = getattr(self._library, function)
        if not self.names.retain:  # HIP returns the text, CUDA writes its address
            ask.restype = ctypes.c_char_p
            return (ask(code) or b"").decode()
        text = ctypes.c_char_p()
        ask(code, ctypes.byref(text))
        return (text.value or b"").decode()

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code:
            raise KernelError(f"{name}: {self.error_text(code)}")
