"""Which tokens a rank holds: the arithmetic, and models that are given an index of tokens instead of whole
sequences."""

from dataclasses import replace

import pytest
import torch

from megatron_ds.errors import LayoutError
from megatron_ds.extensions.data_efficiency.random_ltd import RandomLTD
from megatron_ds.models import MODELS
from megatron_ds.models.attention import CoreAttention, Rotary
from megatron_ds.models.block import MLP
from megatron_ds.models.layer import HiddenDropout
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.group import coordinates_of
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.mpu.sequence_slice import RankPart, SequenceSlice
from megatron_ds.tensor_parallel.init import initialize
from tests.harness.bert_runs import random_bert_batch
from tests.harness.gpt_runs import make_batch
from tests.harness.model_runs import context_of
from tests.harness.plain_gpt import STYLES
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

DROPS = dict(hidden_dropout=0.4, attention_dropout=0.4)


@pytest.mark.parametrize(
    "cp, tp, length", [(1, 1, 7), (1, 3, 9), (2, 1, 8), (3, 2, 24), (4, 4, 32)]
)
def test_the_ranks_hold_each_token_once(cp, tp, length):
    held = []
    for c in range(cp):
        for t in range(tp):
            part = SequenceSlice.of(tp=(t, tp), sequence_parallel=True, cp=(c, cp))
            count = part.batch_length(length)
            index = part.index(length)
            tokens = torch.arange(length) if index is None else index
            assert len(tokens) == count and bool((tokens.diff() > 0).all())
            held += tokens[part.rows(count).start : part.rows(count).stop].tolist()
            assert part.hidden_shape(count, 3, 5) == (length // (cp * tp), 3, 5)
    assert sorted(held) == list(range(length))


def test_each_context_rank_has_the_same_number_of_causal_scores():
    scores = [
        int((SequenceSlice(context=RankPart(c, 4)).index(64) + 1).sum())
        for c in range(4)
    ]
    assert set(scores) == {65 * 64 // 2 // 4}


def test_without_sequence_parallelism_every_tensor_rank_holds_all_rows():
    part = SequenceSlice.of(tp=(1, 2), sequence_parallel=False)
    assert part.rows(5) == range(5) and part.index(5) is None


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(
        LayoutError, match="5 tokens of a sequence are not divisible by 2"
    ):
        SequenceSlice(tensor=RankPart(0, 2)).rows(5)
    with pytest.raises(
        LayoutError, match="10 tokens is not divisible by 4: .* two equal chunks"
    ):
        SequenceSlice(context=RankPart(0, 2)).batch_length(10)


def test_a_batch_of_some_tokens_is_narrowed_further():
    batch = make_batch(
        STYLES["gpt2"],
        s=12,
        document_ids=torch.arange(12).expand(3, -1) // 5,
        kept_tokens=6,
    )
    part = SequenceSlice(context=RankPart(1, 2))
    index, inner = part.index(12), torch.tensor([[0, 2, 5], [1, 3, 4], [0, 1, 2]])
    cut = batch.cut(part)
    assert (
        cut.kept_tokens == 6 and not cut.is_narrowed and cut.position_ids.stride(0) == 0
    )
    nested, direct = cut.at_places(inner), batch.at_places(index[inner])
    assert nested.is_narrowed and nested.places.length == direct.places.length == 12
    for name, tensor in direct.tensors().items():
        assert torch.equal(nested.tensors()[name], tensor), name
    assert torch.equal(nested.places.index, direct.places.index)
    assert torch.equal(cut.tokens, batch.tokens[:, index]) and torch.equal(
        cut.labels, batch.labels[:, index]
    )


def test_a_mask_is_cut_in_queries_and_keys():
    mask = torch.rand(3, 1, 12, 12, generator=torch.Generator().manual_seed(0)) < 0.5
    index = SequenceSlice(context=RankPart(0, 3)).index(12)
    batch = make_batch(STYLES["gpt2"], s=12, attention_mask=mask)
    assert torch.equal(
        batch.at_places(index).attention_mask, mask[:, :, index][..., index]
    )


def build(module, ctx):
    initialize(list(module.parameters()), 5, coordinates_of(ctx.tp))
    return module


@pytest.mark.parametrize(
    "name, style", [("gpt", "gpt2"), ("gpt", "llama"), ("bert", "gpt2")]
)
@pytest.mark.parametrize("cp, tp", [(1, 2), (2, 1), (2, 2)])
def test_the_embedding_of_a_rank_is_its_rows_of_the_embedding_of_the_whole(
    name, style, cp, tp
):
    """Tokens, positions, token types and dropout."""
    config = replace(STYLES[style], **DROPS)
    batch = (
        make_batch(config, s=16)
        if name == "gpt"
        else random_bert_batch(config.vocab_size, (4, 5, 6), 16)
    )
    if name == "bert":
        config = BertStyle(config)
    one = ParallelContext(seed=9)
    with torch.no_grad():
        whole = build(MODELS[name](config, one)[0].make(), one)(None, batch)

    def main(rank, world):
        ctx = ParallelContext(
            Mesh(Grid(tp=tp, cp=cp), rank, world.connect),
            sequence_parallel=True,
            seed=9,
        )
        part = batch.cut(ctx.slice)
        with torch.no_grad():
            x = build(MODELS[name](config, ctx)[0].make(), ctx)(None, part)
        index = torch.arange(16) if part.places is None else part.places.index
        rows = ctx.slice.rows(part.seq_length)
        return index[rows.start : rows.stop], x

    for positions, x in run_ranks(cp * tp, main):
        assert torch.equal(x, whole[positions])


class BertStyle:
    """A GPT's configuration with the fields of a BERT."""

    bert_binary_head = True

    def __init__(self, config):
        self.config = config

    def __getattr__(self, name):
        return getattr(self.config, name)


def test_rotary_positions_and_attention_dropout_are_those_of_the_tokens_among_all():
    config, ctx = replace(STYLES["llama"], **DROPS), context_of(seed=3)
    batch, index = (
        make_batch(config, s=12),
        SequenceSlice(context=RankPart(1, 3)).index(12),
    )
    qkv = torch.randn(12, 3, 2, 4, 8, generator=torch.Generator().manual_seed(4))
    rotary, part = (
        Rotary(8, 1.0, 100.0),
        batch.cut(SequenceSlice(context=RankPart(1, 3))),
    )
    whole, some = rotary(qkv, batch), rotary(qkv[index], part)
    assert all(
        torch.equal(ours, all_of_it[index]) for ours, all_of_it in zip(some, whole)
    )
    assert rotary.tables(part.position_ids) is rotary.tables(
        part.position_ids
    )  # made once for all layers
    core, (q, k, _) = CoreAttention(config, "core", ctx), whole
    mask = core.keep_mask(q, k, 0.4, batch).mask
    assert torch.equal(
        core.keep_mask(q[index], k[index], 0.4, part).mask,
        mask[:, :, index][..., index],
    )


class PerToken(torch.nn.Module):
    """A block without attention, so that what a token becomes does not depend on which others are there."""

    def __init__(self, config, ctx):
        super().__init__()
        self.mlp, self.drop = (
            build(MLP(config, "mlp", ctx, output_std=0.5), ctx),
            HiddenDropout(0.4, "mlp", ctx),
        )

    def forward(self, x, batch):
        return x + self.drop(self.mlp(x, batch), batch)


@pytest.mark.parametrize("cp, tp", [(2, 1), (2, 2), (3, 1)])
def test_a_layer_that_drops_tokens_keeps_the_same_ones_where_ranks_share_the_sequence(
    cp, tp
):
    config, kept = STYLES["gpt2"], 12
    batch = make_batch(config, s=24, kept_tokens=kept)
    x = torch.randn(
        24, 3, config.hidden_size, generator=torch.Generator().manual_seed(1)
    )
    ctx = context_of(seed=3)
    with torch.no_grad():
        expected = RandomLTD(PerToken(config, ctx), "layer", ctx)(x, batch)

    def main(rank, world):
        mesh = Mesh(Grid(tp=tp, cp=cp), rank, world.connect)
        ctx = ParallelContext(mesh, sequence_parallel=tp > 1, seed=3)
        layer, part = (
            RandomLTD(PerToken(config, ctx), "layer", ctx),
            batch.cut(ctx.slice),
        )
        rows = ctx.slice.rows(part.seq_length)
        held = part.places.index[rows.start : rows.stop]
        with torch.no_grad():
            return held, layer(x[held], part)

    for held, y in run_ranks(cp * tp, main):
        torch.testing.assert_close(
            y, expected[held], rtol=1e-6, atol=1e-6
        )  # products of other sizes
