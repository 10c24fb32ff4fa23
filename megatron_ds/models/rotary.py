"""Rotary positions for all the layers of a model: the tables of a micro-batch are made once, not once a layer."""

import torch

from ..ops.rotary import apply_rotary, rotary_channels, rotary_tables


class Rotary:
    """Turns queries and keys [s, b, n, d] by the positions [b, s] of their tokens. Holds the tables of the last positions.

    Positions that one layer alone has (`once`) get tables of their own, which are not held.
    """

    def __init__(self, head_dim: int, percent: float, base: float):
        self.channels, self.base = rotary_channels(head_dim, percent), base
        self._positions, self._tables = None, None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, position_ids: torch.Tensor,
                 once: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rotary_tables(position_ids, self.channels, self.base) if once else self.tables(position_ids)
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)

    def tables(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [s, b or 1, 1, r/2]. The very same tensor of ids gets the tables it got last time."""
        if position_ids is not self._positions:
            alike = position_ids.stride(0) == 0                 # one row expanded over the batch
            self._tables = rotary_tables(position_ids[0] if alike else position_ids, self.channels, self.base)
            self._positions = position_ids
        return self._tables
