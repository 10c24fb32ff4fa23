"""The sum of a frozen weight and its adapters, W + s B A, as one weight."""

from collections.abc import Mapping

import torch

from ...mpu.param_spec import ParamSpec
from .targets import PackedRows


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
    by_group = total.view(*total.shape[:-2], rows.groups, -1, total.shape[-1])
    for part, (down, up) in adapters.items():
        product = scale * (up.float() @ down.float())
        start = 0 if part is None else sum(rows.parts[:part])
        stop = sum(rows.parts) if part is None else start + rows.parts[part]
        target = by_group[..., start:stop, :]
        target += product.view(target.shape)
    return total
