"""`MixtureOfExperts`: a feed-forward whose tokens each pass k of E experts. It fills a slot of `Block`.

    x [s(/t), b, h] ── router ── dispatch ── experts ── combine ──┬── y
                    └─ shared experts (dense) ──────── (· gate) ──┘     or, residual: a dense MLP, and
                                                                       y = c0 routed + c1 dense

The work is in router.py (choice), capacity.py (drops), totals.py and losses.py (balance), dispatch.py or
padded.py (movement) and experts.py (products); this file is their order.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from ..batch.batch import Batch
from ..config.options.model import ModelConfig
from ..mpu.context import ParallelContext
from ..mpu.param_spec import Init, ParamSpec
from ..mpu.rows import Waiting
from ..ops.grouped import RowRuns
from ..tensor_parallel.linear import new_shard
from .capacity import Capacity, limit
from .dispatch import Dispatch, Groups
from .experts import Experts
from .losses import add_losses, record_load, sets_of
from .padded import PaddedDispatch
from .router import Router, Routing
from .totals import Totals


class MixtureOfExperts(nn.Module):
    """x [s(/t), b, h] → the same shape.

    dense  a feed-forward that all tokens pass: shared experts, or that of a residual MoE; None without

    token_keys, if it is set, is a function of the batch → int64 [T], keys of the random numbers of the tokens, or
    None; the experts find them in `RowRuns.token_keys`.
    """

    token_keys: Callable[[Batch], torch.Tensor | None] | None = None

    def __init__(
        self,
        config: ModelConfig,
        num_experts: int,
        name: str,
        ctx: ParallelContext,
        *,
        output_std: float,
        dense: nn.Module | None = None,
    ):
        super().__init__()
        self.config = config
        self.num_experts = num_experts
        self.name = name
        self.ctx = ctx
        self.groups = Groups.of(ctx)
        self.router = Router(config, num_experts, f"{name}.router", ctx)
        self.experts = Experts(
            config, num_experts, f"{name}.experts", ctx, output_std=output_std
        )
        self.dense = dense
        self.gate = self.coefficient = None
        if config.mlp_type == "residual":
            self.coefficient = _small(f"{name}.coefficient", 2, config, ctx)
        elif config.moe_shared_expert_gate:
            self.gate = _small(f"{name}.shared_experts.gate_weight", 1, config, ctx)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Adds loss terms and metrics to the ledger of the batch. Collective over ep and etp."""
        tokens = x.flatten(0, 1)
        counted = self._counted(batch)
        # Choose experts, and limit them.
        routing = self.router(x, batch, counted)
        if counted is not None:
            routing = routing.keeping(counted[:, None].expand_as(routing.experts))
        capacity = Capacity.of(self.config, self.num_experts, batch.training)
        if batch.past is not None:  # a text must not depend on those beside it
            capacity = capacity.lifted
        chosen = routing
        routing = limit(routing, capacity, batch, self.ctx)
        # Move tokens to their experts and back; the dense part computes while they are under way.
        dispatch = self._dispatch(routing, capacity, batch.size)
        runs = self._runs(dispatch, batch)
        waiting = Waiting()
        rows = dispatch.send(tokens, waiting)
        dense = None if self.dense is None else self.dense(x, batch)
        self._count(chosen, routing, counted, batch)
        waiting.wait()
        routed = dispatch.back(self.experts(dispatch.arrive(rows), runs)).view_as(x)
        return self._joined(x, routed, dense)

    def _runs(self, dispatch: Dispatch | PaddedDispatch, batch: Batch) -> RowRuns:
        keys = None if self.token_keys is None else self.token_keys(batch)
        if keys is None:
            return dispatch.runs
        return replace(dispatch.runs, token_keys=dispatch.follow(keys))

    def _count(
        self,
        chosen: Routing,
        limited: Routing,
        counted: torch.Tensor | None,
        batch: Batch,
    ) -> None:
        """Losses, balance and metrics of a micro-batch. Collective over the ranks that divide a sequence.

        chosen, limited: before and after drops
        """
        config = self.config
        ledger = batch.ledger
        balance = self.router.balance
        squares = bool(config.moe_z_loss_coeff) and batch.training
        ranks = self.ctx.sequence_ranks
        # All ranks that divide a sequence add up what their tokens chose.
        totals = Totals.of(
            chosen,
            limited.kept,
            sets_of(config, batch.size, ledger) if batch.training else 1,
            None if ranks is None else ranks.every,
            counted,
            squares,
        )
        if batch.training:
            add_losses(ledger, totals, config, balance.share)
        if self.ctx.cp.rank == 0:  # the totals are those of all context-parallel ranks
            balance.count(totals.whole.demand, batch)
        record_load(
            ledger,
            self.name.removesuffix(".mlp"),
            totals,
            limited is not chosen,
            balance.bias,
        )

    def _dispatch(
        self, routing: Routing, capacity: Capacity, samples: int
    ) -> Dispatch | PaddedDispatch:
        if not capacity.padded:
            return Dispatch(routing, self.num_experts, self.groups)
        sets = capacity.sets(samples)
        tokens = len(routing.experts)
        ranks = self.ctx.sequence_ranks
        whole = tokens if ranks is None else tokens * ranks.size
        held = tokens * self.groups.parts
        places = min(capacity.rows(whole // sets), held // sets)
        return PaddedDispatch(routing, self.num_experts, self.groups, sets, places)

    def _joined(
        self, x: torch.Tensor, routed: torch.Tensor, dense: torch.Tensor | None
    ) -> torch.Tensor:
        if dense is None:
            return routed
        if self.coefficient is not None:
            share = F.linear(x, self.coefficient).float().softmax(-1).to(x.dtype)
            return routed * share[..., :1] + dense * share[..., 1:]
        if self.gate is not None:
            dense = dense * F.linear(x, self.gate).sigmoid()
        return routed + dense

    def _counted(self, batch: Batch) -> torch.Tensor | None:
        """bool [T], False for padding; None where there is none."""
        padding = batch.padding
        if padding is None:
            return None
        rows = self.ctx.slice.rows(batch.seq_length)
        return ~padding[:, rows.start : rows.stop].t().flatten()


def _small(
    name: str, rows: int, config: ModelConfig, ctx: ParallelContext
) -> nn.Parameter:
    return new_shard(
        ParamSpec(
            name,
            (rows, config.hidden_size),
            Init("normal", config.init_method_std),
            partial_over=ctx.partial_over,
        ),
        ctx,
    )
