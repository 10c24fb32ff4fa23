"""The sum of a frozen weight and its adapters, W + s B A, as one weight."""

from collections.abc import Mapping

import torch

from ...mpu.param_spec import ParamSpec
from .lora_targets import PackedRows


def merged(
    weight: torch.Tensor,
    spec: ParamSpec,
    adapters: Mapping[int | None, tuple[torch.Tensor, torch.Tensor]],
    scale: float,
) -> torch.Tensor:
    """A new tensor in fp32: whole weights [rows, in], or [experts, rows, in].

    adapters: part of the packed rows, None for all of them → (A [.., r, in], B [.., rows of the part, r])
    """
    total = weight.to(torch.float32, copy=True)
    rows = PackedRows.of(spec)
    *experts, _, columns = total.shape
    by_group = total.view(*experts, rows.groups, -1, columns)
    for part, (down, up) in adapters.items():
        product = up.float() @ down.float()
        target = by_group[..., rows.place_of(part), :]
        target += scale * product.view(target.shape)
    return total
