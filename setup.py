"""Build script; everything declarative is in pyproject.toml.

The compiled parts in csrc/ are optional: without a compiler the package installs all the same and torch, or
threads of Python, do their work, which is then said once in the log. They know nothing of torch, so that one
build serves every version of it. The sources of GPU kernels, csrc/gpu, are data of the package: they are
compiled when a run starts.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

KERNEL_SOURCES = Path("csrc/gpu")


class BuildWithKernels(build_py):
    """Copies the sources of GPU kernels into the package; an editable installation reads csrc/gpu itself."""

    def run(self):
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "megatron_ds/ops/gpu/sources")
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

    # Without -march: instruction sets are chosen at run time. Without contraction: see "Bits" in the file.
    # gcc 12 warns of its own intrinsics.
    flags = [
        "-O3",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-pthread",
        "-Wno-maybe-uninitialized",
    ]
    # Without traps: loops with choices vectorize, since comparisons need not signal.
    flags = [] if sys.platform == "win32" else flags
    extensions = [
        Pybind11Extension(
            "megatron_ds._cpu_adam",
            ["csrc/cpu_adam.cpp"],
            depends=[
                "csrc/cpu_adam_kernel.h",
                "csrc/pool.h",
                "csrc/processors.h",
                "csrc/vector_math.h",
            ],
            cxx_std=17,
            extra_compile_args=flags,
            optional=True,
        ),
        Pybind11Extension(
            "megatron_ds._gelu",
            ["csrc/gelu.cpp"],
            depends=[
                "csrc/bf16_vectors.h",
                "csrc/gelu_vectors.h",
                "csrc/pool.h",
                "csrc/processors.h",
                "csrc/vector_math.h",
            ],
            cxx_std=17,
            extra_compile_args=[*flags, "-fno-trapping-math"] if flags else [],
            optional=True,
        ),
        Pybind11Extension(
            "megatron_ds._norms",
            ["csrc/norms.cpp"],
            depends=[
                "csrc/bf16_vectors.h",
                "csrc/norms_vectors.h",
                "csrc/pool.h",
                "csrc/processors.h",
                "csrc/vector_math.h",
            ],
            cxx_std=17,
            extra_compile_args=[*flags, "-fno-trapping-math", "-Wno-psabi"]
            if flags
            else [],
            optional=True,
        ),
        Pybind11Extension(
            "megatron_ds._quantize",
            ["csrc/quantize.cpp"],
            depends=["csrc/pool.h", "csrc/processors.h", "csrc/vector_math.h"],
            cxx_std=17,
            extra_compile_args=[*flags, "-fno-trapping-math"] if flags else [],
            optional=True,
        ),
        Pybind11Extension(
            "megatron_ds._cross_entropy",
            ["csrc/cross_entropy.cpp"],
            depends=[
                "csrc/bf16_softmax.h",
                "csrc/bf16_vectors.h",
                "csrc/pool.h",
                "csrc/processors.h",
                "csrc/vector_math.h",
            ],
            cxx_std=17,
            extra_compile_args=[*flags, "-fno-trapping-math", "-Wno-psabi"]
            if flags
            else [],
            optional=True,
        ),
        Pybind11Extension(
            "megatron_ds._accumulate",
            ["csrc/accumulate.cpp"],
            depends=["csrc/pool.h", "csrc/processors.h", "csrc/vector_math.h"],
            cxx_std=17,
            extra_compile_args=[*flags, "-fno-trapping-math"] if flags else [],
            optional=True,
        ),
        Pybind11Extension(
            "megatron_ds._attention",
            ["csrc/attention.cpp"],
            depends=[
                "csrc/attention_amx.h",
                "csrc/attention_avx2.h",
                "csrc/attention_avx512.h",
                "csrc/attention_backward.h",
                "csrc/attention_forward.h",
                "csrc/attention_heads.h",
                "csrc/attention_kernel.h",
                "csrc/attention_memory.h",
                "csrc/attention_plan.h",
                "csrc/attention_products.h",
                "csrc/bf16_vectors.h",
                "csrc/pool.h",
                "csrc/processors.h",
                "csrc/vector_math.h",
            ],
            cxx_std=17,
            extra_compile_args=flags,
            optional=True,
        ),
        Pybind11Extension(
            "megatron_ds._product",
            ["csrc/product.cpp"],
            depends=[
                "csrc/bf16_vectors.h",
                "csrc/pool.h",
                "csrc/processors.h",
                "csrc/product_kernel.h",
                "csrc/product_packing.h",
                "csrc/product_row.h",
                "csrc/vector_math.h",
            ],
            cxx_std=17,
            extra_compile_args=flags,
            optional=True,
        ),
        Pybind11Extension(
            "megatron_ds._bpe",
            ["csrc/bpe.cpp"],
            depends=["csrc/bpe_cutter.h", "csrc/bpe_merges.h"],
            cxx_std=17,
            extra_compile_args=flags,
            optional=True,
        ),
        Pybind11Extension(
            "megatron_ds._crc32",
            ["csrc/crc32.cpp"],
            cxx_std=17,
            extra_compile_args=flags,
            optional=True,
        ),
        Pybind11Extension(
            "megatron_ds._index_builder",
            ["csrc/index_builder.cpp"],
            cxx_std=17,
            optional=True,
            depends=[
                "csrc/" + name
                for name in (
                    "bert_mapping.h",
                    "blend_index.h",
                    "lanes.h",
                    "pool.h",
                    "processors.h",
                    "sample_index.h",
                    "shuffle.h",
                )
            ],
            extra_compile_args=[*flags, "-fno-trapping-math", "-Wno-psabi"]
            if flags
            else [],
        ),
    ]
    if sys.platform == "linux":
        extensions.append(
            Pybind11Extension(
                "megatron_ds._async_io",
                ["csrc/async_io.cpp"],
                cxx_std=17,
                extra_compile_args=["-O2", "-pthread"],
                optional=True,
            )
        )
    setup(ext_modules=extensions, cmdclass=commands | {"build_ext": SideBySide})
