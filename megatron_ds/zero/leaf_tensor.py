"""`LeafTensor`: what a torch optimizer updates, the master of a piece of a parameter."""

import torch

from ..mpu.managed_parameter import ManagedParameter
from .layout import SlotPiece


class LeafTensor(ManagedParameter):
    """The master of `piece` of the parameter with `spec`. For annotations, as `ManagedParameter` is.

    low       the part of the model's own weight in a 16-bit model, else None
    low_grad  in place of `grad`, where gradients have another dtype
    """

    piece: SlotPiece
    low: torch.Tensor | None
    low_grad: torch.Tensor | None
