"""The machine code of every kernel, for each architecture, without a GPU: registers, spills, wide accesses.

Each file of kernels states in its head how many registers its kernels may use on sm_90 ("Registers on sm_90:
norm_forward 40, norm_backward 96." or "Registers: at most 64.") and, if any, which kernels access memory in
less than 16 bytes at a time ("Narrow: scatter, whose rows have any length."). Each `GpuKernel` has examples
of its template arguments.
"""

import functools
import importlib
import itertools
import pkgutil
import re

import pytest

from megatron_ds.extensions.kernels import gpu
from megatron_ds.extensions.kernels.gpu.gpu_kernel import GpuKernel
from megatron_ds.extensions.kernels.gpu.kernel_sources import (
    kernel_source,
    source_folder,
)
from tests.harness.real_nvrtc import nvrtc_or_skip
from tests.harness.samples import ALL

# PTX of a 16-byte access to global memory, by its address space or by an address of any, whatever its parts.
WIDE = re.compile(
    r"\b(?:ld|st)(?!\.(?:shared|local|param|const))[.\w:]*"
    r"\.(?:v4\.[bfus]32|v2\.[bfus]64|b128)\b"
)
PROPERTIES = re.compile(
    r"Function properties for (\w+).*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?",
    re.DOTALL,
)
STATIC_SHARED_MEMORY = 48 << 10


def all_kernels():
    """The kernels of all wrappers: {file: [GpuKernel]}."""
    found = {}
    for module in pkgutil.iter_modules(gpu.__path__):
        if module.name.endswith("_kernels"):
            for value in vars(
                importlib.import_module(f"{gpu.__name__}.{module.name}")
            ).values():
                if isinstance(value, GpuKernel) and value not in found.setdefault(
                    value.file, []
                ):
                    found[value.file].append(value)
    return found


KERNELS = all_kernels()
# (file, another architecture): each once, and with `make test-all` each with every file.
OTHERS = ("sm_80", "sm_100", "sm_120")
OF_OTHERS = [*(itertools.product if ALL else zip)(sorted(KERNELS), OTHERS)]


def head_of(file):
    """The comment at the beginning of a source, as one line."""
    lines = kernel_source(file).text.splitlines()
    count = next(i for i, line in enumerate(lines) if not line.startswith("//"))
    return " ".join(line.removeprefix("//").strip() for line in lines[:count])


def register_bounds(head, names):
    """{kernel: registers} of "Registers on sm_90: a 64, b 96." or "Registers: at most 64." in a head."""
    found = re.search(r"Registers\b[^:]*:([^.]*)", head)
    if not found:
        return {}
    parts = re.split(
        rf"\b({'|'.join(sorted(names, key=len, reverse=True))})\b", found[1]
    )
    numbers = lambda text: [int(n) for n in re.findall(r"\b\d+\b", text)]
    for_all = max(numbers(parts[0]), default=None)
    bounds = {name: max(numbers(text)) for name, text in zip(parts[1::2], parts[2::2])}
    return {name: bounds.get(name, for_all) for name in names}


@functools.cache
def program_of(file, target):
    if (
        target.startswith("sm_")
        and int(target[3:]) not in nvrtc_or_skip().architectures
    ):
        pytest.skip(f"{nvrtc_or_skip().name} has no {target}")
    expressions = [
        kernel.expression(template)
        for kernel in KERNELS[file]
        for template in kernel.examples
    ]
    extra = ("--ptxas-options=-v",) if target.startswith("sm_") else ()
    return nvrtc_or_skip().compile(kernel_source(file), expressions, target, extra)


def is_narrow(file, name):
    """Whether the head names the kernel as one whose accesses are narrower than 16 bytes."""
    return re.search(rf"Narrow\b[^.]*\b{name}\b", head_of(file)) is not None


def test_every_source_has_a_wrapper_and_every_kernel_examples_and_a_bound_of_registers():
    assert set(KERNELS) == {path.name for path in source_folder().glob("*.cu")}
    for file, kernels in KERNELS.items():
        bounds = register_bounds(head_of(file), [kernel.name for kernel in kernels])
        for kernel in kernels:
            assert kernel.examples, f"{kernel.name} of {file} has no examples"
            assert bounds.get(kernel.name), (
                f"the head of {file} has no bound of registers for {kernel.name}"
            )


@pytest.mark.parametrize(
    "file, target",
    [(file, "sm_90") for file in sorted(KERNELS)] + OF_OTHERS,
)
@pytest.mark.one_in(3)
def test_machine_code_spills_nothing_and_keeps_its_bound_of_registers(file, target):
    program = program_of(file, target)
    found = {
        symbol: [int(n or 0) for n in numbers]
        for symbol, *numbers in PROPERTIES.findall(program.log)
    }
    assert set(found) == set(program.symbols.values()) and program.code.startswith(
        b"\x7fELF"
    )
    bounds = register_bounds(head_of(file), [kernel.name for kernel in KERNELS[file]])
    for expression, symbol in program.symbols.items():
        stores, loads, registers, shared = found[symbol]
        assert stores == loads == 0, (
            f"{expression} spills {stores} and {loads} bytes on {target}"
        )
        assert shared <= STATIC_SHARED_MEMORY
        if target == "sm_90":
            assert registers <= bounds[expression.partition("<")[0]], (
                f"{expression}: {registers} registers"
            )


@pytest.mark.parametrize("file", sorted(KERNELS))
def test_global_memory_is_accessed_16_bytes_at_a_time(file):
    program = program_of(file, "compute_90")
    bodies = dict(
        re.findall(r"\.entry (\w+)\((.*?)\n\}", program.code.decode(), re.DOTALL)
    )
    narrow = [
        expression
        for expression, symbol in program.symbols.items()
        if not WIDE.search(bodies[symbol])
        and not is_narrow(file, expression.partition("<")[0])
    ]
    assert not narrow


def test_bounds_are_read_from_heads():
    names = ["dropout", "dropout_backward", "mask"]
    assert register_bounds(
        "Registers on sm_90: dropout 64, without packets 96; mask 40, "
        "dropout_backward 72. More 999",
        names,
    ) == {"dropout": 96, "dropout_backward": 72, "mask": 40}
    assert register_bounds(
        "float. Registers a thread: at most 40, nothing spilled.", names
    ) == dict.fromkeys(names, 40)
    assert register_bounds("stay in registers", names) == {}
