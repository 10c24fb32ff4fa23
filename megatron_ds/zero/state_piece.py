"""`StatePiece`: what ZeRO gives to checkpoints and takes from them."""

from dataclasses import dataclass

import torch

from ..mpu.param_spec import ParamSpec


@dataclass(frozen=True)
class StatePiece:
    """Elements [start, stop) of one kind of state of a flattened local (tensor-parallel) parameter.

    kind     "weight" (the fp32 value) or the optimizer's name of the tensor ("exp_avg", "exp_avg_sq", …)
    tensor   flat view: read it to save, copy into it to load
    replica  position of this rank among the `replicas` data-parallel ranks that hold the same content
    """

    spec: ParamSpec
    kind: str
    start: int
    stop: int
    tensor: torch.Tensor
    replica: int
    replicas: int
