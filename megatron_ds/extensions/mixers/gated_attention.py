"""`GatedSelfAttention`: attention whose output is multiplied by a gate of its input, as in Qwen3-Next.

rows of linear_qkv   | q_1 .. q_{n/g}  k  v  gate_1 .. gate_{n/g} | ...        each letter d rows
                     |----------------- group 0 ------------------|
"""

from dataclasses import replace
from typing import Any

import torch

from ...batch.batch import Batch
from ...config.options.model import ModelConfig
from ...models.attention import SelfAttention
from ...mpu.context import ParallelContext
from ...mpu.param_spec import Matrices
from ...tensor_parallel.linear import ColumnParallelLinear


class GatedSelfAttention(SelfAttention):
    """x [s(/t), b, h] → the same shape: `SelfAttention` with a gate for each channel of the heads' outputs."""

    def __init__(
        self, config: ModelConfig, name: str, ctx: ParallelContext, **settings: Any
    ):
        """settings: of `SelfAttention`."""
        super().__init__(config, name, ctx, **settings)
        n = config.num_attention_heads
        g = config.query_groups
        d = config.head_dim
        # In place of the projection that has no gates.
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            2 * (n + g) * d,
            ctx,
            name=f"{name}.linear_qkv",
            init_std=config.init_method_std,
            bias=self.linear_qkv.bias is not None,
        )
        weight = self.linear_qkv.weight
        queries = n // g * d
        weight.spec = replace(
            weight.spec, matrices=Matrices(g, (queries, d, d, queries), head=d)
        )

    def attend(self, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
        """qkv, the result of the first projection [s, b, 2 (n + g)/t * d] → [s, b, n/t * d] for the second."""
        groups = qkv.unflatten(-1, (self.num_groups, -1))
        own = self.group_heads * self.head_dim
        heads, gates = groups.split((own, groups.shape[-1] - own), -1)
        out = super().attend(heads.flatten(2), batch)
        return out * gates.flatten(2).sigmoid()
