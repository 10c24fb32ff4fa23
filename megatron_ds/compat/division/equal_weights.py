"""The same whole weights on all ranks of a tensor-parallel group, before each keeps its piece of them."""

import torch
from torch import nn

from ...mpu.collectives import all_gather_object, broadcast_
from ...mpu.group import Group


@torch.no_grad()
def take_weights_of_first(
    model: nn.Module, group: Group, device: torch.device
) -> list[str]:
    """Give all ranks the parameters and buffers of the first rank; returns the names of those that differed.

    Collective over `group`. Tensors that are equal are not sent; device: that of the group's messages.
    """
    tensors: dict[str, torch.Tensor] = {}
    tensors.update(model.named_parameters())
    tensors.update(model.named_buffers())
    sums = {name: _sums(tensor) for name, tensor in tensors.items()}
    of_ranks = all_gather_object(sums, group)
    different = [
        name
        for name, own in of_ranks[0].items()
        if any(theirs[name] != own for theirs in of_ranks)
    ]
    for name in different:
        own = tensors[name]
        sent = own.to(device, copy=True).contiguous()
        broadcast_(sent, group)
        own.copy_(sent)
    return different


def _sums(tensor: torch.Tensor) -> tuple[float, float]:
    """Return two sums by which tensors of random numbers differ."""
    numbers = tensor.detach().flatten()
    half = numbers[: numbers.numel() // 2]
    sums = (
        numbers.sum(dtype=torch.float64),
        half.sum(dtype=torch.float64),
    )
    return float(sums[0]), float(sums[1])
