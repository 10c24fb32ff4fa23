"""The CUDA C++ files of the kernels: csrc/gpu of a checkout, copied to `sources` beside this file in a wheel.

A file may switch off the contraction of a * b + c into one rounding, for results that must equal a reference
bit by bit, with a line of its own in its head:

    // contraction: off
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from ....errors import KernelError

# setup.py copies to the first; an editable installation has only the second.
FOLDERS = (Path(__file__).parent / "sources", Path(__file__).parents[4] / "csrc/gpu")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_CONTRACTION_OFF = re.compile(r"^//\s*contraction:\s*off\s*$", re.MULTILINE)


@dataclass(frozen=True)
class KernelSource:
    """A file of kernels and the headers that it includes, directly or not, as (name, text)."""

    name: str
    text: str
    headers: tuple[tuple[str, str], ...]

    @property
    def contracts(self) -> bool:
        """Whether the compiler may fuse multiplications and additions."""
        return not _CONTRACTION_OFF.search(self.text)


@functools.cache
def source_folder() -> Path:
    """Return the folder with the sources. Raises KernelError where the installation lacks them."""
    for folder in FOLDERS:
        if (folder / "device.cuh").is_file():
            return folder
    raise KernelError(
        f"the sources of the GPU kernels are missing: neither {FOLDERS[0]} nor {FOLDERS[1]} "
        "has device.cuh. Reinstall megatron_ds, or use --kernels torch."
    )


@functools.cache
def kernel_source(file: str, folder: Path | None = None) -> KernelSource:
    """`file` of the folder (default: `source_folder`), or at an absolute path, with its headers from there.

    Read once in a process, so that all its kernels are of one version.
    """
    folder = folder or source_folder()
    headers: dict[str, str] = {}
    text = _read(folder / file)
    waiting = _INCLUDE.findall(text)
    while waiting:
        name = waiting.pop()
        # What is not in the folder is for another compiler: device.cuh includes emulate.h for g++ alone.
        if name not in headers and (folder / name).is_file():
            headers[name] = _read(folder / name)
            waiting += _INCLUDE.findall(headers[name])
    return KernelSource(file, text, tuple(sorted(headers.items())))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise KernelError(
            f"the source of a GPU kernel cannot be read: {error}"
        ) from None
