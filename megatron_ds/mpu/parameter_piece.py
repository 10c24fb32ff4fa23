"""`ParameterPiece`: a whole local tensor in the form that checkpoints take, `checkpoint.pieces.Piece`."""

from dataclasses import dataclass

import torch

from .param_spec import ParamSpec


@dataclass(frozen=True)
class ParameterPiece:
    """A whole local parameter or buffer as a piece.

    kind              in checkpoints; "weight" where the tensor is no state of an optimizer
    replica, replicas  position of this rank among those that hold the same content, and their number
    """

    spec: ParamSpec
    tensor: torch.Tensor
    kind: str = "weight"
    start: int = 0
    replica: int = 0
    replicas: int = 1

    @property
    def stop(self) -> int:
        """End of the piece in the flattened tensor."""
        return self.tensor.numel()
