"""Parameters with a spec: memory now, values later (`tensor_parallel.init.initialize`)."""

import torch
from torch import nn

from ..mpu.param_spec import ParamSpec


def new_parameter(spec: ParamSpec, *, size: int = 1, dtype: torch.dtype = torch.float32,
                  device: torch.device | str | None = None) -> nn.Parameter:
    """This rank's shard of `spec` among `size` tensor-parallel ranks, uninitialised, with `.spec` set."""
    parameter = nn.Parameter(torch.empty(spec.local_shape(size), dtype=dtype, device=device))
    parameter.spec = spec
    return parameter
