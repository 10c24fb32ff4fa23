"""Tensors without memory, in which plans run the layers of a model."""

import torch

from ..host.fake_cpu import FakeCpuTensor


def has_memory(t: torch.Tensor) -> bool:
    """False on the meta device and for a FakeCpuTensor, which have shapes and dtypes but no values."""
    return not (t.is_meta or isinstance(t, FakeCpuTensor))
