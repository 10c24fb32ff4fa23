"""NVRTC for tests, which are skipped where it is missing."""

import functools

import pytest

from megatron_ds.errors import KernelError
from megatron_ds.extensions.kernels.gpu.nvrtc import RuntimeCompiler, load_nvrtc


@functools.cache
def nvrtc_or_skip() -> RuntimeCompiler:
    """The compiler; needs no GPU."""
    try:
        return load_nvrtc()
    except KernelError as reason:
        pytest.skip(str(reason))
