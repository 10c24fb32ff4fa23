"""Self-attention over heads that are divided among the tensor-parallel ranks.

Letters: s positions, b samples, n heads, g groups of query heads that share one key and value (g = n: plain
multi-head, g = 1: multi-query; Ainslie et al. 2023, arXiv:2305.13245), d sizes of a head, t tensor-parallel
ranks.

The projection is packed by group, so that a contiguous slice of its rows is a set of whole groups:

    rows of linear_qkv   | q_1 .. q_{n/g}  k  v | q .. q  k  v | ...        each letter d rows
                         |------ group 0 -------|-- group 1 ---|

`SelfAttention` has two slots: rotary positions, and the core, which computes attention from q, k and v.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ..batch.batch import Batch
from ..config.options.model import ModelConfig
from ..mpu.context import ParallelContext, new_parameter
from ..mpu.param_spec import Init, Matrices, ParamSpec, Split
from ..ops.alibi import Alibi, alibi_slopes
from ..ops.attention_pattern import CAUSAL, FULL, AttentionPattern
from ..ops.core_attention import OutputExchange, attention, exchanged_attention
from ..ops.dropout import KeepMask, sample_keys
from ..ops.kernel_table import Bound
from ..ops.key_rows import KeyRows
from ..ops.key_visibility import KeyVisibility
from ..ops.norms import Norm
from ..ops.rotary import (
    apply_rotary,
    rotary_channels,
    rotary_tables,
    split_heads,
    split_rotary,
)
from ..ops.rotary_scaling import (
    LinearScaling,
    Llama3Scaling,
    Scaling,
    YarnScaling,
    ntk_base,
)
from ..ops.scoring import Scoring
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from .layer import check_divides, recompute
from .normalization import make_head_norm

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Tables = tuple[torch.Tensor, torch.Tensor]


class Core(nn.Module):
    """Attention of a rank's heads: a call takes q [s, b, n/t, d], k and v [sk, b, g/t, d], and the batch, and
    returns [s, b, n/t * d]."""

    def arrange(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> Heads:
        """Return the q, k and v which the call then takes; the caller frees its own between the two."""
        return q, k, v

    def again(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Return what the call returns, where it is repeated in backward."""
        return self(q, k, v, batch)


def attend(
    core: Core, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
) -> torch.Tensor:
    """q [s, b, n/t, d], k and v [sk, b, g/t, d] → [s, b, n/t * d]."""
    return core(*core.arrange(q, k, v, batch), batch)


def attend_again(
    core: Core, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
) -> torch.Tensor:
    """`attend`, which backward calls again in place of keeping what it needs."""
    return recompute(
        lambda q, k, v: core.again(*core.arrange(q, k, v, batch), batch), q, k, v
    )


class Rotary:
    """Splits packed heads [s, b, g, n/g + 2, d]; rotates queries and keys by the positions of their tokens.

    All layers of a model share one object: it keeps the tables of the last positions, so they are computed
    once for a micro-batch. The tables of a layer that sees only some of the tokens are not kept.
    """

    def __init__(
        self,
        head_dim: int,
        percent: float,
        base: float,
        scalings: tuple[Scaling, ...] = (),
        interleaved: bool = False,
    ):
        self.channels = rotary_channels(head_dim, percent)
        self.base = base
        self.scalings = scalings
        self.interleaved = interleaved
        self._split = Bound(split_rotary)
        # The positions of the last tables, and the tables.
        self._kept: tuple[torch.Tensor, Tables] | None = None

    def __call__(
        self, qkv: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [s, b, n, d], k and v [s, b, g, d]. The positions of the batch are [b, s]."""
        return self._split(qkv, *self.tables_of(batch), self.interleaved)

    def rotate(self, heads: Iterable[torch.Tensor], batch: Batch) -> list[torch.Tensor]:
        """Each of the tensors [s, b, n, d] rotated: for heads that are changed after they are split."""
        tables = self.tables_of(batch)
        return [apply_rotary(x, *tables, self.interleaved) for x in heads]

    def tables_of(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [s, b or 1, 1, r/2] of the positions of a batch."""
        ids = batch.position_ids
        return self._make(ids) if batch.is_narrowed else self.tables(ids)

    def tables(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [s, b or 1, 1, r/2]. The same tensor object again returns the same tables."""
        if self._kept is None or self._kept[0] is not position_ids:
            alike = position_ids.stride(0) == 0  # one row expanded over the batch
            made = self._make(position_ids[0] if alike else position_ids)
            self._kept = position_ids, made
        return self._kept[1]

    def _make(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotary_tables(position_ids, self.channels, self.base, self.scalings)


def make_rotary(config: ModelConfig) -> Rotary | None:
    """Return the rotary embedding that all layers of a model share; None for other position embeddings."""
    if not config.is_rotary:
        return None
    return Rotary(
        config.head_dim,
        config.rotary_percent,
        scaled_rotary_base(config),
        rotary_scalings(config),
        config.rotary_interleaved,
    )


def make_window_rotary(config: ModelConfig) -> Rotary | None:
    """Return the rotary embedding of layers with a window, where it is not that of all layers; else None."""
    if config.window_rotary_base is None or not config.is_rotary:
        return None
    return Rotary(
        config.head_dim,
        config.rotary_percent,
        config.window_rotary_base,
        interleaved=config.rotary_interleaved,
    )


def scaled_rotary_base(config: ModelConfig) -> float:
    """Base of the rotary angles, with dynamic NTK that of sequences of all positions of the model.

    It depends on no batch: so a token is rotated alike under every layout, in a shortened sequence, and when
    it becomes a key of later tokens.
    """
    if config.rotary_ntk_factor is None:
        return config.rotary_base
    assert config.original_max_position_embeddings is not None, "rules want it"
    return ntk_base(
        config.rotary_base,
        rotary_channels(config.head_dim, config.rotary_percent),
        config.rotary_ntk_factor,
        config.original_max_position_embeddings,
        config.positions,
    )


def rotary_scalings(config: ModelConfig) -> tuple[Scaling, ...]:
    """Return how the frequencies of the model's rotary embedding are scaled."""
    original = config.original_max_position_embeddings
    factor = config.rotary_seq_len_interpolation_factor
    if config.position_embedding_type == "yarn":
        assert original is not None, "rules want it"
        return (
            YarnScaling(
                config.yarn_factor,
                original,
                config.rotary_base,
                config.yarn_beta_fast,
                config.yarn_beta_slow,
                config.yarn_mscale,
                config.yarn_mscale_all_dim,
                config.yarn_correction_range_round_to_int,
            ),
        )
    llama3 = Llama3Scaling(
        config.rope_scaling_factor, original=original or Llama3Scaling.original
    )
    linear = () if factor in (None, 1) else (LinearScaling(factor),)
    return (llama3, *linear) if config.use_rope_scaling else linear


def alibi_heads(config: ModelConfig) -> int:
    """Number of heads of the model that have a slope of ALiBi; 0 with other position embeddings."""
    return (
        config.num_attention_heads if config.position_embedding_type == "alibi" else 0
    )


def alibi_of(
    total: int, heads: range, batch: Batch, device: torch.device
) -> Alibi | None:
    """ALiBi of these of `total` heads; None if there are 0.

    Where the batch holds only some tokens, distances are those of their positions.
    """
    if not total:
        return None
    slopes = alibi_slopes(total, device)[heads.start : heads.stop]
    return Alibi(slopes, None if batch.places is None else batch.places.index)


class SelfAttention(nn.Module):
    """x [s(/t), b, h] → [s(/t), b, h]. Each rank holds n/t heads and g/t groups.

    core            computes attention of the rank's heads; by default `CoreAttention`
    recompute_core  call the core again in backward instead of keeping what it needs
    """

    core_attention: Core

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        ctx: ParallelContext,
        *,
        output_std: float,
        rotary: Rotary | None = None,
        core: Core | None = None,
    ):
        super().__init__()
        n = config.num_attention_heads
        g = config.query_groups
        d = config.head_dim
        self.name = name
        self.head_dim = d
        self.rotary = rotary
        self.recompute_core = False
        # Tensor-parallel ranks divide heads, and groups of heads, whole.
        self.num_heads = check_divides(
            "num_attention_heads", n, ctx.tp, "each rank holds whole heads"
        )
        self.num_groups = check_divides(
            "num_query_groups", g, ctx.tp, "each rank holds whole groups of heads"
        )
        self.core_attention = core or CoreAttention(
            config, f"{name}.core_attention", ctx
        )
        self.group_heads = self.num_heads // self.num_groups + 2  # with key and value
        bias = config.add_bias_linear and config.use_bias_in_attn_linear
        # One projection for queries, keys and values, packed by group.
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            (n + 2 * g) * d,
            ctx,
            name=f"{name}.linear_qkv",
            init_std=config.init_method_std,
            bias=bias or config.add_qkv_bias,
        )
        weight = self.linear_qkv.weight
        weight.spec = replace(
            weight.spec, matrices=Matrices(g, (n // g * d, d, d), head=d)
        )
        # Norms of the heads of queries and keys.
        self.q_layernorm: Norm | None = None
        self.k_layernorm: Norm | None = None
        if config.qk_layernorm:
            self.q_layernorm = make_head_norm(config, f"{name}.q_layernorm", ctx)
            self.k_layernorm = make_head_norm(config, f"{name}.k_layernorm", ctx)
        self.linear_proj = RowParallelLinear(
            n * d,
            config.hidden_size,
            ctx,
            name=f"{name}.linear_proj",
            init_std=output_std,
            bias=bias,
        )

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Attention among the tokens of x; of generated text also to those of `batch.past`."""
        return self.linear_proj(self.attend(self.linear_qkv(x), batch))

    def attend(self, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
        """qkv, the result of the first projection [s, b, (n + 2g)/t * d] → [s, b, n/t * d] for the second."""
        q, k, v = self.heads(qkv, batch)
        del qkv
        core = self.core_attention
        if batch.past is not None:
            return batch.past.attend(self.name, core, q, k, v, batch)
        if self.recompute_core:
            return attend_again(core, q, k, v, batch)
        # What the projection returned is free from here on, unless the core keeps it.
        q, k, v = core.arrange(q, k, v, batch)
        return core(q, k, v, batch)

    def heads(
        self, qkv: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [s, b, n/t, d], k and v [s, b, g/t, d]; q and k normalized and rotated."""
        s, b, _ = qkv.shape
        qkv = qkv.view(s, b, self.num_groups, self.group_heads, self.head_dim)
        if self.q_layernorm is None and self.rotary is not None:
            return self.rotary(qkv, batch)  # splits and rotates at once
        q, k, v = split_heads(qkv)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q = self.q_layernorm(q)
            k = self.k_layernorm(k)
            if self.rotary is not None:
                q, k = self.rotary.rotate((q, k), batch)
        return q, k, v


class AttentionSink(nn.Module):
    """The score of each of the rank's heads that joins those of the keys, for a softmax that may sum to less
    than 1. name: of the core attention, to which its weight belongs."""

    def __init__(self, config: ModelConfig, name: str, ctx: ParallelContext):
        super().__init__()
        self.kind = config.softmax_type
        self.first = ctx.tp.rank * config.num_attention_heads // ctx.tp.size
        self.softmax_offset = None
        if self.kind == "learnable":
            spec = ParamSpec(
                f"{name}.softmax_offset",
                (config.num_attention_heads,),
                Init("normal", config.init_method_std),
                splits=(Split("tp", 0),),
                decay=False,
            )
            self.softmax_offset = new_parameter(
                spec, sizes={"tp": ctx.tp.size}, dtype=ctx.dtype, device=ctx.device
            )

    def forward(self, heads: range, device: torch.device) -> torch.Tensor | None:
        """[n] of these heads, global numbers among those of the tensor-parallel rank; None without a sink."""
        if self.kind == "off-by-one":
            return torch.zeros(len(heads), device=device)
        if self.softmax_offset is None:
            return None
        return self.softmax_offset[heads.start - self.first : heads.stop - self.first]


class CoreAttention(Core):
    """softmax(q kᵀ / √d) v of the rank's heads and the keys that a query sees, with dropout of the
    probabilities.

    Fewer queries than keys are the last ones. name: of the dropout site. pattern: which keys a token sees
    head_rank: of this rank among those that divide the heads; None for its tensor-parallel rank.
    """

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        ctx: ParallelContext,
        *,
        pattern: AttentionPattern = CAUSAL,
        head_rank: int | None = None,
    ):
        super().__init__()
        self.site = name
        self.ctx = ctx
        self.dropout = config.attention_dropout
        self.pattern = pattern
        self.head_rank = ctx.tp.rank if head_rank is None else head_rank
        self.sink = AttentionSink(config, name, ctx)
        self.alibi_heads = alibi_heads(config)
        self.scale = config.softmax_scale
        self.cap = config.attention_logit_softcapping
        # Where a query sees itself and all keys before it, attention needs nothing but q, k and v.
        is_bare = (
            self.sink.kind == "vanilla"
            and not self.alibi_heads
            and self.scale is None
            and self.cap is None
        )
        self.is_simple = is_bare and pattern == CAUSAL
        self.simple_attention = Bound(attention)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        exchange: OutputExchange | None = None,
    ) -> torch.Tensor:
        """q [s, b, n/t, d], k and v [sk, b, g/t, d] → [s, b, n/t * d], or what an exchange makes of it."""
        p = self.dropout if batch.training else 0.0
        # The common case is one call of a kernel.
        hides_keys = (
            batch.document_ids is not None
            or batch.attention_mask is not None
            or q.shape[0] != k.shape[0]
        )
        if self.is_simple and not p and exchange is None and not hides_keys:
            return self.simple_attention(q, k, v)
        # Each query has keys of its own, or its sums are exchanged.
        visible = visible_keys(self.pattern.of_heads(self.heads(q)), batch)
        run = (
            attention
            if exchange is None
            else partial(exchanged_attention, exchange=exchange)
        )
        return run(
            q,
            k,
            v,
            visible,
            keep=self.keep_mask(q, k, p, batch) if p else None,
            scoring=Scoring(
                self.scale,
                sink=self.sink(self.heads(q), q.device),
                alibi=alibi_of(self.alibi_heads, self.heads(q), batch, q.device),
                cap=self.cap,
            ),
        )

    def of_rows(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: KeyRows
    ) -> torch.Tensor:
        """q [1, b, n/t, d], k and v [length, b, g/t, d] → [1, b, n/t * d]: a token of each text that is
        generated."""
        if self.is_simple and rows.is_alike:
            return self.simple_attention(q, k, v)
        heads = self.heads(q)
        alibi = None
        if self.alibi_heads:
            slopes = alibi_slopes(self.alibi_heads, q.device)[heads.start : heads.stop]
            alibi = Alibi(slopes, rows.keys, rows.places)
        visible = rows.visible(self.pattern.of_heads(heads))
        sink = self.sink(heads, q.device)
        scoring = Scoring(self.scale, sink=sink, alibi=alibi, cap=self.cap)
        return attention(q, k, v, visible, scoring=scoring)

    def heads(self, q: torch.Tensor) -> range:
        """Global numbers of the heads of q [s, b, n, d]."""
        return range(self.head_rank * q.shape[2], (self.head_rank + 1) * q.shape[2])

    def keep_mask(
        self, q: torch.Tensor, k: torch.Tensor, p: float, batch: Batch
    ) -> KeepMask:
        """Return which probabilities are kept. Keys contain the global number of a head, so its mask is the same on
        any rank."""
        heads, (rows, picked) = q.shape[2], batch.positions()
        first = self.head_rank * heads
        keys = sample_keys(self.ctx.seed, self.site, batch.sample_ids)
        return KeepMask(
            p,
            keys,
            heads=range(first, first + heads),
            rows=rows,
            cols=k.shape[0] if picked is None else len(rows),
            picked=picked,
            device=q.device,
        )


def visible_keys(pattern: AttentionPattern, batch: Batch) -> KeyVisibility:
    """Return which keys the tokens of a batch see.

    Distances are those of the positions in whole sequences, also where only some of their tokens are present.
    """
    mask = batch.attention_mask
    if pattern.is_plain or batch.places is None:
        return KeyVisibility(pattern, batch.documents, mask)
    index = batch.places.index.expand(batch.size, -1)
    hidden = pattern.mask(index, index)  # [b, n or 1, k, k]
    assert hidden is not None, "a pattern that is not plain hides something"
    mask = hidden if mask is None else hidden | mask
    return KeyVisibility(CAUSAL if pattern.causal else FULL, batch.documents, mask)
