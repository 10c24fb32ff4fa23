"""Build script; everything declarative is in pyproject.toml.

The compiled parts in csrc/ are optional: without a compiler the package installs all the same and torch, or
threads of Python, do their work, which is then said once in the log. They know nothing of torch, so that one
build serves every version of it. The sources of GPU kernels, csrc/gpu, are data of the package: they are
compiled when a run starts.
"""

import os
import shutil
import sys
from glob import glob
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

KERNEL_SOURCES = Path("csrc/gpu")


class BuildWithKernels(build_py):
    """Copies the sources of GPU kernels into the package; an editable installation reads csrc/gpu itself."""

    def run(self):
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "megatron_ds/extensions/kernels/gpu/sources")
            shutil.rmtree(
                folder, ignore_errors=True
            )  # of an earlier build, with other files
            shutil.copytree(KERNEL_SOURCES, folder)


commands = {"build_py": BuildWithKernels}

try:
    from pybind11.setup_helpers import Pybind11Extension
    from pybind11.setup_helpers import build_ext as BuildExt
except (
    ImportError
):  # built without isolation and without pybind11: as without a compiler
    setup(cmdclass=commands)
else:

    class SideBySide(BuildExt):
        def finalize_options(self):
            super().finalize_options()
            self.parallel = self.parallel or os.cpu_count()

    def extension(source, flags, *more):
        """megatron_ds._NAME from csrc/FOLDER/NAME.cpp; compiled again when a header of csrc/ changes."""
        folder, name = source.split("/")
        headers = [*glob(f"csrc/{folder}/*.h"), *glob("csrc/common/*.h")]
        return Pybind11Extension(
            f"megatron_ds._{name}",
            [f"csrc/{source}.cpp"],
            depends=headers,
            cxx_std=17,
            extra_compile_args=[*flags, *more] if flags else [],
            optional=True,
        )

    # Without -march: instruction sets are chosen at run time. Without contraction: see "Bits" in the file.
    # gcc 12 warns of its own intrinsics.
    flags = [
        "-O3",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-pthread",
        "-Wno-maybe-uninitialized",
    ]
    flags = [] if sys.platform == "win32" else flags
    # Without traps: loops with choices vectorize, since comparisons need not signal. Without jump threading:
    # it makes paths of choices that follow one another, and a vectorized loop computes all of them.
    choices = "-fno-trapping-math"
    straight = "-fno-thread-jumps"
    extensions = [
        extension("host/crc32", flags),
        extension("data/bpe", flags),
        extension("data/index_builder", flags, choices, "-Wno-psabi"),
        extension("attention/attention", flags),
        extension("products/product", flags),
        extension("products/accumulate", flags, choices),
        extension("elementwise/gelu", flags, choices, straight),
        extension("elementwise/gated", flags, choices, straight),
        extension("elementwise/rotary", flags, choices),
        extension("elementwise/norms", flags, choices, "-Wno-psabi"),
        extension("elementwise/cross_entropy", flags, choices, "-Wno-psabi"),
        extension("elementwise/quantize", flags, choices),
        extension("optimizers/cpu_adam", flags),
    ]
    if sys.platform == "linux":
        extensions.append(extension("host/async_io", ["-O2", "-pthread"]))
    setup(ext_modules=extensions, cmdclass=commands | {"build_ext": SideBySide})
