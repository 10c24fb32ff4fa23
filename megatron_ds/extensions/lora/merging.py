"""The sum of a frozen weight and its adapters as one weight: W + s B A, with magnitudes those of its rows."""

from collections.abc import Mapping

import torch

from ...mpu.param_spec import ParamSpec
from .targets import PackedRows


def merged(
    weight: torch.Tensor,
    spec: ParamSpec,
    adapters: Mapping[int | None, Mapping[str, torch.Tensor]],
    scale: float,
) -> torch.Tensor:
    """Return a new tensor in fp32: whole weights [rows, in], or [experts, rows, in].

    adapters: part of the packed rows, None for all of them → "a" [.., r, in], "b" [.., rows of the part, r], and
    "m" [.., rows of the part] where magnitudes are trained, their changes
    """
    total = weight.to(torch.float32, copy=True)
    rows = PackedRows.of(spec)
    by_group = _by_group(total, rows)
    for part, leaves in adapters.items():
        place = rows.place_of(part)
        target = by_group[..., place, :]
        _add_adapter_(target, leaves, scale)
    return total


def _add_adapter_(
    target: torch.Tensor, leaves: Mapping[str, torch.Tensor], scale: float
) -> None:
    """Add an adapter to the rows of its part [.., groups, rows, in]."""
    before = target.norm(dim=-1)
    down = leaves["a"].float()
    up = leaves["b"].float()
    product = up @ down
    product = product.view(target.shape)
    target += scale * product
    if "m" not in leaves:
        return
    # With magnitudes, a row keeps the direction alone.
    change = leaves["m"].float()
    change = change.view(before.shape)
    wanted = before + change
    after = target.norm(dim=-1)
    after = after.where(after > 0, 1)
    factor = wanted / after
    factor = factor.unsqueeze(-1)
    target *= factor


def row_norms(weight: torch.Tensor, spec: ParamSpec, part: int | None) -> torch.Tensor:
    """‖W_i‖ in fp32 of the rows of one part, None for all of them: [.., rows, in] → [.., rows of the part]."""
    rows = PackedRows.of(spec)
    place = rows.place_of(part)
    by_group = _by_group(weight.float(), rows)
    chosen = by_group[..., place, :]
    norms = chosen.norm(dim=-1)
    return norms.flatten(-2)


def _by_group(weight: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    *experts, _, columns = weight.shape
    return weight.view(*experts, rows.groups, -1, columns)
