"""Core attention of a rank that holds some tokens of each sequence, by the name of its communication.

    p2p         keys and values travel around the context-parallel ranks (`context_parallel.block_exchange`)
    all_gather  they are gathered at once
    a2a         each rank attends with some of the heads over all tokens (`context_parallel.head_exchange`)
    a2a+p2p     ranks of a run, as on one node, exchange tokens for heads; keys and values travel around the
                ranks of equal position in all runs

A core takes q [s/c, b, n/t, d], k and v [s/c, b, g/t, d] and a batch with `Batch.whole`, and returns
[s/c, b, n/t * d], in two calls (`attention.Core`), collective over cp, forward and backward. Letters: c
context-parallel ranks; the others as in attention.py.
"""

from collections.abc import Callable
from functools import lru_cache, partial

import torch

from ..batch.batch import Batch
from ..config.options.model import ModelConfig
from ..context_parallel.block_exchange import BlockExchange, Gather, Ring
from ..context_parallel.head_exchange import (
    ToTokens,
    spread_groups,
    to_heads,
    to_tokens,
)
from ..context_parallel.key_maker import KeyMaker
from ..context_parallel.shared_keys import SharedKeys
from ..mpu.context import ParallelContext, SequenceSlice
from ..mpu.group import solo
from ..ops.attention_pattern import CAUSAL, AttentionPattern
from ..ops.attention_tiles import Runs, Tile
from ..ops.dropout import KeepMask, sample_keys
from ..ops.keep_tables import keep_masks, keep_scale
from ..ops.partial_attention import Keep
from ..ops.scoring import Scoring
from .attention import (
    AttentionSink,
    Core,
    CoreAttention,
    Heads,
    alibi_heads,
    alibi_of,
    visible_keys,
)


class SharedKeysAttention(Core):
    """Attention of the rank's tokens; keys and values of other ranks pass by.

    exchanges_heads  first exchange tokens for heads with the ranks of a run
    """

    def __init__(
        self,
        exchange: BlockExchange,
        config: ModelConfig,
        name: str,
        ctx: ParallelContext,
        *,
        pattern: AttentionPattern = CAUSAL,
        exchanges_heads: bool = False,
    ):
        super().__init__()
        self.exchange = exchange
        self.site = name
        self.ctx = ctx
        self.dropout = config.attention_dropout
        self.pattern = pattern
        self.run, self.ring = (
            ctx.split_cp if exchanges_heads else (solo("cp-inner"), ctx.cp)
        )
        self.sink = AttentionSink(config, name, ctx)
        self.alibi_heads = alibi_heads(config)
        self.scale = config.softmax_scale
        self.cap = config.attention_logit_softcapping

    def arrange(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> Heads:
        """Return the rank's heads of the tokens of a run."""
        ranks = self.run.size
        if ranks == 1:
            return q, k, v
        parts = q, spread_groups(k, ranks), spread_groups(v, ranks)
        q, k, v = to_heads(parts, self.run)
        return q, k, v

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        maker: KeyMaker | None = None,
    ) -> torch.Tensor:
        """Attention [sq, b, heads * d] of the queries, keys and values that `arrange` returned.

        Collective over the context-parallel ranks. maker: as of `SharedKeys`, without an exchange of heads
        """
        # The heads of this rank, and how their scores become probabilities.
        ranks = self.run.size
        first = (self.ctx.tp.rank * ranks + self.run.rank) * q.shape[2]
        heads = range(first, first + q.shape[2])
        whole = _whole(batch)
        p = self.dropout if batch.training else 0.0
        scoring = Scoring(
            self.scale,
            sink=self.sink(heads, q.device),
            alibi=alibi_of(self.alibi_heads, heads, whole, q.device),
            cap=self.cap,
        )
        # Attention to the keys of all ranks, whose outputs go back to the ranks of their tokens.
        positions = _positions(self.ctx.slice, whole.seq_length, ranks)
        out = SharedKeys(self.ring, self.exchange, positions)(
            q,
            k,
            v,
            visible_keys(self.pattern.of_heads(heads), whole),
            scoring,
            self._keep(heads, p, whole) if p else None,
            maker,
        )
        if ranks > 1:
            out = to_tokens(out.unflatten(2, (len(heads), -1)), self.run).flatten(2)
        return out

    def _keep(self, heads: range, p: float, whole: Batch) -> Keep:
        """Draws what is kept of a tile, from the tables of the whole sequences."""
        device = whole.tokens.device
        keys = sample_keys(self.ctx.seed, self.site, whole.sample_ids)
        rows, picked = whole.positions()
        table = KeepMask(p, keys, heads, rows, len(rows), picked, device)
        if picked is not None:
            return partial(_slice_of, table.mask, keep_scale(p))
        return partial(
            _draw, table.of_heads, p, len(rows), (len(keys), len(heads)), device
        )


def _slice_of(
    mask: torch.Tensor, scale: float, tile: Tile
) -> tuple[torch.Tensor, float]:
    rows, columns = (slice(r.start, r.stop) for r in (tile.queries, tile.keys))
    return mask[:, :, rows, columns], scale


def _draw(
    keys: list,
    p: float,
    length: int,
    shape: tuple[int, int],
    device: torch.device,
    tile: Tile,
) -> tuple[torch.Tensor, float]:
    drawn = keep_masks(p, keys, tile.queries, length, device=device)  # whole rows
    return drawn[:, :, tile.keys.start : tile.keys.stop].unflatten(
        0, shape
    ), keep_scale(p)


class HeadsAttention(Core):
    """Attention of some heads over all tokens."""

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        ctx: ParallelContext,
        *,
        pattern: AttentionPattern = CAUSAL,
    ):
        super().__init__()
        self.ctx = ctx
        self.core = CoreAttention(
            config,
            name,
            ctx,
            pattern=pattern,
            head_rank=ctx.tp.rank * ctx.cp.size + ctx.cp.rank,
        )

    def arrange(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> Heads:
        """Return the rank's heads of all tokens."""
        group = self.ctx.cp
        parts = q, spread_groups(k, group.size), spread_groups(v, group.size)
        q, k, v = to_heads(parts, group, self._order(batch, q))
        return q, k, v

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Attention [sq, b, heads * d] of the queries, keys and values that `arrange` returned.

        Collective over the context-parallel ranks.
        """
        return self.core(
            q, k, v, batch.whole, ToTokens(self.ctx.cp, self._order(batch, q))
        )

    def again(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Return the same. As the exchange keeps nothing, what repeats this stops before it, and the output is sent
        once."""
        out = self.core(q, k, v, batch.whole)
        return to_tokens(
            out.unflatten(2, (q.shape[2], -1)), self.ctx.cp, self._order(batch, q)
        ).flatten(2)

    def _order(self, batch: Batch, like: torch.Tensor) -> torch.Tensor | None:
        return self.ctx.slice.order(_whole(batch).seq_length, like.device)


def _whole(batch: Batch) -> Batch:
    assert batch.whole is not None, "context-parallel ranks have parts of a batch"
    return batch.whole


@lru_cache(maxsize=8)
def _positions(part: SequenceSlice, length: int, ranks: int) -> tuple[Runs, ...]:
    """Return the positions [length / n] of each run of `ranks` context-parallel ranks, in the order of its ranks."""
    return tuple(
        Runs(sum((part.runs(length, rank) for rank in range(first, first + ranks)), ()))
        for first in range(0, part.context.size, ranks)
    )


COMM_TYPES: dict[str, Callable[..., Core]] = {
    "p2p": partial(SharedKeysAttention, Ring()),
    "all_gather": partial(SharedKeysAttention, Gather()),
    "a2a": HeadsAttention,
    "a2a+p2p": partial(SharedKeysAttention, Ring(), exchanges_heads=True),
}
