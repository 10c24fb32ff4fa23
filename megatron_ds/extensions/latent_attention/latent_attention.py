"""`LatentAttention`: attention whose keys and values are projections of one short vector of each token.

Letters: s positions, b samples, n heads, t tensor-parallel ranks, h the hidden size; r_q and r_kv the widths of the
latents; of a head e channels without positions and p rotated ones of queries and keys, and v of values.

    x → linear_q_down_proj  [r_q] → norm → linear_q_up_proj    [n, e + p]   q = [q_e; rotated q_p]
    x → linear_kv_down_proj [r_kv + p] = [c; k_p]
                 norm(c)          →        linear_kv_up_proj   [n, e + v]   k = [k_e; rotated k_p], v
    linear_proj(softmax(q kᵀ scale) v)                                      k_p is one for all heads

Formulas: DeepSeek-V2 (arXiv:2405.04434), section 2.1 and appendix C. Names of the weights are Megatron's. Ranks
divide the heads. What leads to the latents is whole on each of them: with sequence parallelism, of its tokens.
Context-parallel ranks send either k and v, or norm(c) and the rotated k_p, of which each then projects k and v.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ...batch.batch import Batch
from ...config.options.model import ModelConfig
from ...models.attention import Core, Rotary, attend, attend_again
from ...models.layer import check_divides, recompute
from ...models.normalization import sized_norm
from ...mpu.context import ParallelContext
from ...mpu.param_spec import Matrices
from ...mpu.regions import copy_to_region, gather_from_sequence_region
from ...ops.norms import Norm
from ...tensor_parallel.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from .latent_sizes import query_width
from .made_keys import MadeKeys


class LatentAttention(nn.Module):
    """x [s(/t), b, h] → [s(/t), b, h]. Each rank holds n/t heads.

    core            computes attention of the rank's heads
    recompute_core  call the core again in backward instead of keeping what it needs
    sends_latents   the core takes a `KeyMaker`: latents and what is rotated travel in place of keys and values
    """

    core_attention: Core

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        ctx: ParallelContext,
        *,
        output_std: float,
        rotary: Rotary | None,
        core: Core,
        sends_latents: bool = False,
    ):
        super().__init__()
        # Sizes.
        heads = config.num_attention_heads
        self.name = name
        self.ctx = ctx
        self.rotary = rotary
        self.recompute_core = False
        self.sends_latents = sends_latents
        self.num_heads = check_divides(
            "num_attention_heads", heads, ctx.tp, "each rank holds whole heads"
        )
        self.query_parts = config.qk_head_dim, config.qk_pos_emb_head_dim
        self.value_parts = config.qk_head_dim, config.v_head_dim
        self.latent_parts = config.kv_lora_rank, config.qk_pos_emb_head_dim
        # Queries, from the hidden state or from a latent.
        make = partial(_Weights, config, name, ctx)
        queries = heads * query_width(config)
        rank = config.q_lora_rank
        self.linear_q_proj: nn.Module | None = None
        self.linear_q_down_proj: nn.Module | None = None
        self.q_layernorm: Norm | None = None
        self.linear_q_up_proj: nn.Module | None = None
        if rank is None:
            self.linear_q_proj = make("linear_q_proj").up(config.hidden_size, queries)
        else:
            self.linear_q_down_proj = make("linear_q_down_proj").down(rank)
            self.q_layernorm = make("q_layernorm").norm(rank)
            self.linear_q_up_proj = make("linear_q_up_proj").up(rank, queries)
        # Keys and values, whose matrices are packed into one weight each way.
        self.linear_kv_down_proj = make("linear_kv_down_proj").down(
            sum(self.latent_parts), Matrices(1, self.latent_parts)
        )
        self.kv_layernorm = make("kv_layernorm").norm(config.kv_lora_rank)
        self.linear_kv_up_proj = make("linear_kv_up_proj").up(
            config.kv_lora_rank,
            heads * sum(self.value_parts),
            Matrices(heads, self.value_parts),
        )
        self.core_attention = core
        self.linear_proj = RowParallelLinear(
            heads * config.v_head_dim,
            config.hidden_size,
            ctx,
            name=f"{name}.linear_proj",
            init_std=output_std,
            bias=config.add_bias_linear,
        )

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Attention among the tokens of x; of generated text also to those of `batch.past`."""
        if batch.past is not None:
            return self.linear_proj(self.generated(x, batch))
        if self.sends_latents and self._is_plain:
            return self.linear_proj(self._of_latents(x, batch))
        q, k, v = self.heads(x, batch)
        call = attend_again if self.recompute_core else attend
        return self.linear_proj(call(self.core_attention, q, k, v, batch))

    def heads(
        self, x: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q and k [s, b, n/t, e + p] and v [s, b, n/t, v] of the tokens x [s(/t), b, h]."""
        q, latent, shared = self._projected(x, batch)
        return q, *self._keys_values(latent, shared)

    def _of_latents(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x [s(/t), b, h] → [s, b, n/t * v], by keys and values that each rank makes of the latents of all."""
        weights = (self.linear_kv_up_proj.weight,)
        maker = MadeKeys(self._keys_values, weights, self.value_parts[1])
        call = partial(self.core_attention, batch=batch, maker=maker)
        parts = self._projected(x, batch)
        return recompute(call, *parts) if self.recompute_core else call(*parts)

    def _projected(
        self, x: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q [s, b, n/t, e + p], the latent [s(/t), b, r_kv], and the rotated part of the keys [s, b, 1, p]."""
        latent, shared = self.latents(x)
        q, q_rotated = self.queries(x).split(self.query_parts, -1)
        q_rotated, shared = self.rotated(q_rotated, shared, batch)
        return torch.cat((q, q_rotated), -1), latent, shared

    def _keys_values(
        self, latent: torch.Tensor, shared: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v of a latent and the rotated part of its keys. Collective over tp with sequence parallelism."""
        k, v = self._per_head(self.linear_kv_up_proj(latent)).split(
            self.value_parts, -1
        )
        of_heads = shared.expand(-1, -1, self.num_heads, -1)
        return torch.cat((k, of_heads), -1), v

    @property
    def _is_plain(self) -> bool:
        """Whether the projection of the latents has no adapter, which would belong to the tokens of this rank."""
        return type(self.linear_kv_up_proj) is ColumnParallelLinear

    def generated(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x [s(/t), b, h] → [s, b, n/t * v], by the past of the batch, which keeps r_kv + p numbers of a token.

        The projection of the latents is a part of the queries and of the results in place of keys and values:
        q_e · (W_k c) = (W_kᵀ q_e) · c, and Σ p W_v c = W_v Σ p c.
        """
        past = batch.past
        assert past is not None, "training has no past"
        if not self._is_plain:
            # Adapters are a part of that projection, so its results are kept.
            return past.attend(
                self.name, self.core_attention, *self.heads(x, batch), batch
            )
        # One key for all heads: the latent, and what is rotated.
        latent, shared = self.latents(x)
        if self.ctx.sequence_parallel and self.ctx.tp.size > 1:
            latent = gather_from_sequence_region(latent, self.ctx.tp)
        q, q_rotated = self.queries(x).split(self.query_parts, -1)
        q_rotated, shared = self.rotated(q_rotated, shared, batch)
        k = torch.cat((latent.unsqueeze(2), shared), -1)  # [s, b, 1, r_kv + p]
        # Rows of the projection, [n/t, e, r_kv] and [n/t, v, r_kv].
        rows = self.linear_kv_up_proj.weight.unflatten(0, (self.num_heads, -1))
        of_keys, of_values = rows.split(self.value_parts, 1)
        q = torch.einsum("sbne,ner->sbnr", q, of_keys)
        q = torch.cat((q, q_rotated), -1)
        width = latent.shape[-1]
        out = past.attend(self.name, self.core_attention, q, k, width, batch)
        out = torch.einsum("sbnr,nvr->sbnv", self._per_head(out), of_values)
        return out.flatten(-2)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """x [s(/t), b, h] → [s, b, n/t, e + p], not rotated."""
        if self.linear_q_proj is not None:
            return self._per_head(self.linear_q_proj(x))
        assert self.linear_q_down_proj is not None, "one of the two ways"
        assert self.linear_q_up_proj is not None, "both of the latter"
        latent = self.linear_q_down_proj(x)
        if self.q_layernorm is not None:
            latent = self.q_layernorm(latent)
        return self._per_head(self.linear_q_up_proj(latent))

    def latents(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [s(/t), b, h] → the latent of keys and values [s(/t), b, r_kv], normalized, and the rotated part of the
        keys [s, b, 1, p], before its rotation."""
        latent, shared = self.linear_kv_down_proj(x).split(self.latent_parts, -1)
        latent = latent.contiguous()
        if self.kv_layernorm is not None:
            latent = self.kv_layernorm(latent)
        return latent, self._of_all_ranks(shared.contiguous()).unsqueeze(2)

    def rotated(
        self, q: torch.Tensor, k: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [s, b, n/t, p] and k [s, b, 1, p], rotated by the positions of their tokens."""
        if self.rotary is None:
            return q, k
        q, k = self.rotary.rotate((q.contiguous(), k), batch)
        return q, k

    def _of_all_ranks(self, shared: torch.Tensor) -> torch.Tensor:
        """Return the part that all heads read, [s, b, p]: its gradient is a sum over the heads of all ranks."""
        tp = self.ctx.tp
        if tp.size == 1:
            return shared
        if self.ctx.sequence_parallel:
            return gather_from_sequence_region(shared, tp)
        return copy_to_region(shared, tp)

    def _per_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.num_heads, -1))


class _Weights:
    """Makes one of the layers between hidden states and heads."""

    def __init__(self, config: ModelConfig, name: str, ctx: ParallelContext, leaf: str):
        self.config = config
        self.name = f"{name}.{leaf}"
        self.ctx = ctx

    def down(self, rank: int, matrices: Matrices | None = None) -> ReplicatedLinear:
        """[s(/t), b, h] → [s(/t), b, rank], of the rank's tokens."""
        return ReplicatedLinear(
            self.config.hidden_size,
            rank,
            self.ctx,
            name=self.name,
            init_std=self.config.init_method_std,
            bias=False,
            partial_over=self.ctx.partial_over,
            matrices=matrices or Matrices(),
        )

    def up(
        self, rank: int, width: int, matrices: Matrices | None = None
    ) -> ColumnParallelLinear:
        """[s(/t), b, rank] → [s, b, width/t]."""
        linear = ColumnParallelLinear(
            rank,
            width,
            self.ctx,
            name=self.name,
            init_std=self.config.init_method_std,
            bias=False,
        )
        if matrices is not None:
            spec = linear.weight.spec
            linear.weight.spec = replace(spec, matrices=matrices)
        return linear

    def norm(self, width: int) -> Norm | None:
        """Return the norm of a latent; None without --qk-layernorm."""
        config = self.config
        if not config.qk_layernorm:
            return None
        if config.latent_norm_epsilon is not None:
            config = replace(config, norm_epsilon=config.latent_norm_epsilon)
        return sized_norm(
            config, width, self.name, self.ctx, partial_over=self.ctx.partial_over
        )
