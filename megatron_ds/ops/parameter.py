"""Parameters with a spec: memory now, values later (`tensor_parallel.init.initialize`)."""

from collections.abc import Mapping

import torch
from torch import nn

from ..mpu.param_spec import ParamSpec


def new_parameter(spec: ParamSpec, *, sizes: Mapping[str, int] | None = None,
                  dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> nn.Parameter:
    """A shard of `spec` on mesh axes of these sizes (1 where absent), uninitialised, with `.spec` set."""
    parameter = nn.Parameter(torch.empty(spec.local_shape(sizes or {}), dtype=dtype, device=device))
    parameter.spec = spec
    return parameter
