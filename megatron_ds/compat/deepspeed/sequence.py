"""`deepspeed.sequence.layer.DistributedAttention`: Ulysses around a program's own attention.

    [s/c, b, n, d]  ── all-to-all ──  [s, b, n/c, d]  ── local_attention ── [s, b, n/c, d] ── all-to-all ──

Letters: s positions, b samples, n heads, d channels, c ranks of the group.
"""

from typing import Any

import torch
from torch import nn

from ...context_parallel.head_exchange import to_heads, to_tokens
from ...errors import ConfigError
from .external_groups import group_of


class DistributedAttention(nn.Module):
    """Attention whose ranks have some of the tokens outside, and some of the heads inside.

    local_attention         (q, k, v, …) → output, all [s, b, n/c, d] or [b, s, n/c, d]
    sequence_process_group  the ranks that share a sequence
    scatter_idx, gather_idx dimensions of heads and of positions: 2, and 0 or 1
    sp_stream, num_kv_heads have no effect
    """

    def __init__(
        self,
        local_attention: nn.Module,
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ):
        super().__init__()
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise ConfigError(
                f"DistributedAttention(scatter_idx={scatter_idx}, gather_idx={gather_idx}): "
                "heads are dimension 2, and positions dimension 0 or 1."
            )
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self._positions = gather_idx
        self._group = group_of(sequence_process_group)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[s/c, b, n, d] each, or [b, s/c, n, d]; the output has the same form. Collective over the group."""
        if (batch := batch_dim_idx) is not None and batch not in (0, 1):
            raise ConfigError(f"batch_dim_idx={batch}: samples are dimension 0 or 1.")
        positions = self._positions if batch is None else 1 - batch
        if wrong := [
            t.shape[2] for t in (query, key, value) if t.shape[2] % self._group.size
        ]:
            raise ConfigError(
                f"{wrong[0]} heads are not divisible by the {self._group.size} ranks of the "
                "sequence: each rank computes whole heads. Use fewer ranks."
            )
        order = lambda t: t.transpose(0, 1) if positions == 1 else t
        inside = to_heads(
            tuple(order(t).contiguous() for t in (query, key, value)), self._group
        )
        out = self.local_attn(*(order(t) for t in inside), *args, **kwargs)
        return order(to_tokens(order(out).contiguous(), self._group))
