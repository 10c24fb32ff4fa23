"""Tensors without memory, in which plans run the layers of a model."""

import torch

from ..host.valueless_tensor import ValuelessTensor


def has_memory(t: torch.Tensor) -> bool:
    """False on the meta device and for a ValuelessTensor, which have shapes and dtypes but no values."""
    return not (t.is_meta or isinstance(t, ValuelessTensor))
