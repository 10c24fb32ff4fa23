"""A model whose work is divided over an axis that our models do not use, in this file alone.

`GatheredKeys` is a core attention for context parallelism: each rank along "cp" holds a part of every
sequence (`SequenceSlice`), attends with its own queries, and gathers keys and values of all parts. It goes
into the slot of `SelfAttention`; embedding, positions, dropout and feed-forward need nothing, since they know
which tokens a rank holds.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_ds.models import build_stage, gpt_layers, run_layers
from megatron_ds.models.attention import Core, SelfAttention, make_rotary
from megatron_ds.models.block import MLP, Block, output_std
from megatron_ds.mpu.context import ParallelContext, Recompute
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.group import coordinates_of
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.mpu.regions import gather_from_sequence_region
from megatron_ds.mpu.sequence_slice import RankPart, SequenceSlice
from megatron_ds.ops.attention_pattern import FULL
from megatron_ds.ops.core_attention import attention
from megatron_ds.ops.key_visibility import KeyVisibility
from megatron_ds.tensor_parallel.init import initialize
from tests.harness.gpt_runs import make_batch
from tests.harness.plain_gpt import STYLES, gather_logical
from tests.harness.threads import run_ranks

LENGTH = 16


class GatheredKeys(Core):
    """Causal attention of this rank's queries to the keys and values of all ranks along cp."""

    def __init__(self, ctx):
        super().__init__()
        self.group = ctx.group("cp")

    def forward(self, q, k, v, batch):
        # [s, b, g/t, d], in the order of the ranks
        k, v = (gather_from_sequence_region(x, self.group) for x in (k, v))
        parts = [
            SequenceSlice(context=RankPart(rank, self.group.size))
            for rank in range(self.group.size)
        ]
        keys = torch.cat([part.index(batch.places.length) for part in parts])
        later = keys > batch.places.index[:, None]  # [s/cp, s]
        return attention(q, k, v, visible=KeyVisibility(FULL, mask=later[None, None]))


def context_parallel_gpt(config, ctx):
    rotary = make_rotary(config)

    def block(name):
        attention = SelfAttention(
            config,
            f"{name}.self_attention",
            ctx,
            output_std=output_std(config),
            rotary=rotary,
            core=GatheredKeys(ctx),
        )
        return Block(
            config,
            name,
            ctx,
            attention=attention,
            feed_forward=MLP(config, f"{name}.mlp", ctx, output_std=output_std(config)),
        )

    return [
        replace(layer, make=partial(block, layer.name)) if layer.is_block else layer
        for layer in gpt_layers(config, ctx)
    ]


def run(layers, config, ctx, batch):
    """(logits [s, b, V/t], [(spec, gradient)]) of a loss that is a sum over tokens and logits."""
    model = build_stage(layers(config, ctx))
    initialize(list(model.parameters()), 3, coordinates_of(ctx.tp))
    logits = run_layers(model, None, batch)
    weight = (
        batch.labels.t()[..., None]
        + 1
        + torch.arange(logits.shape[-1])
        + ctx.tp.rank * logits.shape[-1]
    ) % 7 - 3.0
    (logits * weight).sum().backward()
    return logits.detach(), [(p.spec, p.grad) for p in model.parameters()]


@pytest.mark.parametrize("granularity", [None, "selective", "full"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("cp, tp", [(2, 1), (2, 2), (4, 1)])
def test_it_computes_what_one_process_computes(style, cp, tp, granularity):
    config = replace(STYLES[style], hidden_dropout=0.2, vocab_size=40)
    batch = make_batch(config, s=LENGTH)
    whole, gradients = run(gpt_layers, config, ParallelContext(seed=1), batch)

    def main(rank, world):
        mesh = Mesh(Grid(tp=tp, cp=cp), rank, world.connect)
        ctx = ParallelContext(
            mesh, sequence_parallel=True, seed=1, recompute=Recompute(granularity)
        )
        part = batch.cut(ctx.slice)
        return (
            mesh.coordinate("cp"),
            part.places.index,
            run(context_parallel_gpt, config, ctx, part),
        )

    ranks = run_ranks(cp * tp, main)
    for at in range(cp):
        held = [(index, logits) for c, index, (logits, _) in ranks if c == at]
        logits = torch.cat([logits for _, logits in held], dim=-1)
        torch.testing.assert_close(logits, whole[held[0][0]], rtol=1e-5, atol=1e-6)
    # Gradients of the ranks along cp are partial sums, which a run adds over `mesh.reduction`.
    total = [
        gather_logical([grads for c, _, (_, grads) in ranks if c == at])
        for at in range(cp)
    ]
    for spec, gradient in gradients:
        summed = sum(part[spec.name] for part in total)
        torch.testing.assert_close(
            summed, gradient[tuple(map(slice, spec.shape))], rtol=1e-4, atol=1e-4
        )
