"""Compilers in the process, by their C interfaces: NVRTC, and hipRTC, whose functions differ in their prefix.

    compiler, expression = load_nvrtc(), "norm_forward<bf16, 4096, 256>"
    program = compiler.compile(kernel_source("norm.cu"), [expression], "sm_90")
    program.code, program.symbols[expression]

A target is "sm_90" (machine code), "compute_90" (PTX, which the driver translates) or "gfx90a". No GPU and no
driver is needed to compile. The library is looked for in $MEGATRON_DS_NVRTC (a path, nothing else is tried),
among the nvidia-* wheels that CUDA builds of torch install, by cuda-pathfinder, and by the system's loader.
"""

import ctypes
import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ....errors import KernelError
from ....host.packages import install_command
from .kernel_sources import KernelSource

LEAST_NVRTC = (12, 0)  # the first with sm_90 and C++17 by name expressions
MAJORS = ("13", "12")  # of NVRTC's file names, newest first


@dataclass(frozen=True)
class CompilerNames:
    """How two compilers of one interface differ.

    prefix          of the functions
    architecture    the option that selects the target
    no_contraction  the option that keeps multiplications and additions apart
    options         of every compilation
    """

    prefix: str
    architecture: str
    no_contraction: str
    options: tuple[str, ...]


NVRTC = CompilerNames(
    "nvrtc",
    "--gpu-architecture=",
    "--fmad=false",
    ("-std=c++17", "--generate-line-info"),
)
HIPRTC = CompilerNames(
    "hiprtc", "--offload-arch=", "-ffp-contract=off", ("-std=c++17",)
)


@dataclass(frozen=True)
class Program:
    """Machine code or PTX of some instantiations. symbols: expression → name of its function in the code."""

    code: bytes
    symbols: Mapping[str, str]
    log: str


class RuntimeCompiler:
    """NVRTC or hipRTC. library: path or name for the system's loader; OSError if it cannot be loaded."""

    def __init__(self, library: str, names: CompilerNames = NVRTC):
        # NVRTC 13.0 does not find its builtins, though they are beside it; loaded before, they are found.
        beside = (
            Path(library).parent.glob(f"lib{names.prefix}-builtins.so*")
            if os.sep in library
            else ()
        )
        for builtins in sorted(beside):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self.path = library
        self.names = names
        self._library = ctypes.CDLL(library)
        self._function("GetErrorString").restype = ctypes.c_char_p

    @functools.cached_property
    def version(self) -> tuple[int, int]:
        """(major, minor)."""
        major = ctypes.c_int()
        minor = ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    @property
    def name(self) -> str:
        """Name and version for the log and for keys of the cache: "nvrtc 13.0"."""
        return f"{self.names.prefix} {self.version[0]}.{self.version[1]}"

    @functools.cached_property
    def architectures(self) -> tuple[int, ...]:
        """NVRTC: the architectures that it compiles for, in ascending order: 80 for sm_80."""
        count = ctypes.c_int()
        self._call("GetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("GetSupportedArchs", found)
        return tuple(sorted(found))

    def target(self, capability: tuple[int, int]) -> str:
        """Return the target for an NVIDIA GPU. PTX of the newest architecture if the GPU is newer than NVRTC."""
        wanted = capability[0] * 10 + capability[1]
        if wanted in self.architectures:
            return f"sm_{wanted}"
        older = [arch for arch in self.architectures if arch < wanted]
        if not older:
            raise KernelError(
                f"{self.name} compiles for sm_{self.architectures[0]} and later, the GPU is "
                f"sm_{wanted}"
            )
        return f"compute_{older[-1]}"

    def options(self, source: KernelSource, target: str) -> tuple[str, ...]:
        """Return the options of a compilation."""
        contraction = () if source.contracts else (self.names.no_contraction,)
        return (self.names.architecture + target, *self.names.options, *contraction)

    def compile(
        self,
        source: KernelSource,
        expressions: Sequence[str],
        target: str,
        extra: Sequence[str] = (),
    ) -> Program:
        """Return the instantiations that C++ expressions name. extra: more options.

        Raises KernelError with the compiler's messages.
        """
        # The program with its headers, which are passed as text.
        program = ctypes.c_void_p()
        names, texts = zip(*source.headers) if source.headers else ((), ())
        self._call(
            "CreateProgram",
            ctypes.byref(program),
            source.text.encode(),
            source.name.encode(),
            len(names),
            _strings(texts),
            _strings(names),
        )
        # Name the instantiations, compile, and read what their symbols are called.
        try:
            for expression in expressions:
                self._call("AddNameExpression", program, expression.encode())
            options = (*self.options(source, target), *extra)
            failed = self._function("CompileProgram")(
                program, len(options), _strings(options)
            )
            log = (
                self._read(program, "ProgramLog")
                .rstrip(b"\0")
                .decode(errors="replace")
                .strip()
            )
            if failed:
                raise KernelError(
                    f"{', '.join(expressions)} of {source.name} does not compile for {target} "
                    f"with {self.name} ({self._error(failed)}):\n{log}"
                )
            symbols = {
                expression: self._symbol(program, expression)
                for expression in expressions
            }
            return Program(self._read(program, self._output(target)), symbols, log)
        finally:
            self._function("DestroyProgram")(ctypes.byref(program))

    def _symbol(self, program: ctypes.c_void_p, expression: str) -> str:
        symbol = ctypes.c_char_p()
        self._call("GetLoweredName", program, expression.encode(), ctypes.byref(symbol))
        assert symbol.value is not None, "the call has written the name"
        return symbol.value.decode()

    def _output(self, target: str) -> str:
        if self.names is HIPRTC:
            return "Code"
        return "PTX" if target.startswith("compute_") else "CUBIN"

    def _function(self, name: str) -> Any:
        """Return a function of the library, of the type that ctypes makes for it."""
        return getattr(self._library, self.names.prefix + name)

    def _call(self, name: str, *arguments: object) -> None:
        if failed := self._function(name)(*arguments):
            raise KernelError(f"{self.names.prefix}{name}: {self._error(failed)}")

    def _error(self, code: int) -> str:
        return self._function("GetErrorString")(code).decode()

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, content)
        return content.raw[: size.value]


def load_nvrtc() -> RuntimeCompiler:
    """Return the first NVRTC found. Raises KernelError where there is none, or none new enough."""
    reasons = []
    for library in nvrtc_candidates():
        try:
            compiler = RuntimeCompiler(library)
            if compiler.version >= LEAST_NVRTC:
                return compiler
            reasons.append(
                f"{library} is {compiler.name}, older than {LEAST_NVRTC[0]}.{LEAST_NVRTC[1]}"
            )
        except (
            OSError,
            AttributeError,
            KernelError,
        ) as error:  # AttributeError: another library
            reasons.append(f"{library}: {error}")
    raise KernelError(
        f"NVRTC was not found ({'; '.join(reasons)}). CUDA builds of torch install it; "
        f"otherwise: {install_command('nvidia-cuda-nvrtc')}"
    )


def load_hiprtc() -> RuntimeCompiler:
    """hipRTC of torch's ROCm build, or of the system. Raises KernelError where there is none."""
    reasons = []
    for library in (
        str(Path(torch.__file__).parent / "lib/libhiprtc.so"),
        "libhiprtc.so",
    ):
        try:
            return RuntimeCompiler(library, HIPRTC)
        except OSError as error:
            reasons.append(str(error))
    raise KernelError(f"hipRTC was not found ({'; '.join(reasons)})")


def nvrtc_candidates() -> Iterator[str]:
    """Paths and names of NVRTC in the order in which they are tried; those of torch's CUDA version first."""
    if chosen := os.environ.get("MEGATRON_DS_NVRTC"):
        yield chosen
        return
    of_torch = (torch.version.cuda or "").partition(".")[0]
    majors = sorted(MAJORS, key=lambda major: major != of_torch)
    wheels = _nvidia_folders()
    for major in majors:
        for folder in wheels:
            for inner in (f"cu{major}/lib", "cuda_nvrtc/lib"):
                if (path := folder / inner / f"libnvrtc.so.{major}").is_file():
                    yield str(path)
    if found := _by_pathfinder():
        yield found
    yield from (f"libnvrtc.so.{major}" for major in majors)


def _nvidia_folders() -> list[Path]:
    """Folders of the namespace package `nvidia`, in which NVIDIA's wheels install."""
    spec = importlib.util.find_spec("nvidia")
    return (
        [Path(folder) for folder in spec.submodule_search_locations or ()]
        if spec
        else []
    )


def _by_pathfinder() -> str | None:
    """Return the library by cuda-pathfinder, which CUDA's Python packages install; it knows conda and CUDA_HOME."""
    try:
        return (
            importlib.import_module("cuda.pathfinder")
            .load_nvidia_dynamic_lib("nvrtc")
            .abs_path
        )
    except (
        Exception
    ):  # absent, or one of its own errors: the system's loader is asked next
        return None


def _strings(texts: Sequence[str]) -> ctypes.Array:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
