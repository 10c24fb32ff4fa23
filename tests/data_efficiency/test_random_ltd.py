"""Blocks that see a random part of the tokens: equal to a plain GPT that leaves the others out, whatever the
layout."""

from dataclasses import replace

import pytest
import torch

from megatron_ds.errors import LayoutError
from megatron_ds.extensions.data_efficiency.random_ltd import RandomLTD
from megatron_ds.mpu.group import solo
from megatron_ds.ops.dropout import KeepMask, apply_mask, dropout, sample_keys
from megatron_ds.ops.keyed_random import random_subset
from tests.harness.gpt_runs import make_batch, make_model, run_gpt
from tests.harness.plain_gpt import STYLES, logical_weights
from tests.models.test_gpt_layouts import LAYOUTS, MIXTURES, assert_equal_runs, oracle

pytestmark = [pytest.mark.threads, pytest.mark.one_in(2)]

SEED, LENGTH, KEPT, DROPS = (
    11,
    10,
    4,
    (0, 1),
)  # of three blocks; ten tokens over two ranks, four of them kept


def places(layer: int, samples, kept: int = KEPT, seed: int = SEED) -> torch.Tensor:
    keys = [
        (seed, "random_ltd", f"decoder.layers.{layer}", sample) for sample in samples
    ]
    return random_subset(keys, kept, LENGTH)


def kept_by(batch, kept: int = KEPT):
    return lambda layer: (
        places(layer, batch.sample_ids, kept) if layer in DROPS else None
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("style", MIXTURES)
def test_forward_and_backward_equal_a_plain_gpt_whose_blocks_see_the_kept_tokens_only(
    style, layout
):
    """Two ranks of five tokens each; of some samples three of the four kept ones are with one of them."""
    config = MIXTURES[style]
    weights, batch = (
        logical_weights(config, seed=1),
        make_batch(config, kept_tokens=KEPT),
    )
    halves = (places(0, batch.sample_ids) < LENGTH // 2).sum(1)
    assert halves.min() < KEPT // 2 or halves.max() > KEPT // 2
    reference = oracle(config, weights, batch, kept_by=kept_by(batch))
    assert reference[0] != pytest.approx(oracle(config, weights, batch)[0], rel=1e-3)
    assert_equal_runs(
        run_gpt(config, weights, batch, drops=DROPS, seed=SEED, **layout), reference
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "style, recompute",
    [("gpt2", None), ("gpt2", "selective"), ("gpt2", "full"), ("alibi", "selective")],
)
def test_dropout_falls_on_a_kept_token_as_it_falls_on_it_among_all(
    layout, style, recompute
):
    p = 0.3
    config = replace(MIXTURES[style], hidden_dropout=p, attention_dropout=p)
    weights, batch = (
        logical_weights(config, seed=1),
        make_batch(config, kept_tokens=KEPT),
    )

    def drop(site, x):  # x: [b, s, h]
        return dropout(
            x.transpose(0, 1),
            p,
            seed=SEED,
            site=site,
            sample_ids=batch.sample_ids,
            rows=range(LENGTH),
        ).transpose(0, 1)

    def drop_scores(site, scores):
        keys = sample_keys(SEED, site, batch.sample_ids)
        keep = KeepMask(
            p, keys, heads=range(scores.shape[1]), rows=range(LENGTH), cols=LENGTH
        )
        return apply_mask(scores, keep.mask, keep.p)

    reference = oracle(
        config,
        weights,
        batch,
        drop=drop,
        drop_scores=drop_scores,
        kept_by=kept_by(batch),
    )
    assert_equal_runs(
        run_gpt(
            config,
            weights,
            batch,
            drops=DROPS,
            seed=SEED,
            recompute_granularity=recompute,
            **layout,
        ),
        reference,
    )


def test_documents_that_may_not_see_one_another_stay_apart_among_the_kept_tokens():
    config = STYLES["llama"]
    positions = torch.tensor([[*range(4), *range(6)], [*range(9), 0], [*range(10)]])
    document = (positions == 0).cumsum(1)
    mask = (document[:, None, :, None] != document[:, None, None, :]) | torch.ones(
        LENGTH, LENGTH
    ).triu(1).bool()
    weights = logical_weights(config, seed=2)
    batch = make_batch(
        config, position_ids=positions, attention_mask=mask, kept_tokens=KEPT
    )
    reference = oracle(config, weights, batch, kept_by=kept_by(batch))
    blind = oracle(
        config,
        weights,
        make_batch(config, position_ids=positions),
        kept_by=kept_by(batch),
    )
    assert reference[0] != pytest.approx(blind[0], rel=1e-4)
    assert_equal_runs(
        run_gpt(
            config,
            weights,
            batch,
            drops=DROPS,
            seed=SEED,
            tp_size=2,
            sequence_parallel=True,
        ),
        reference,
    )


def test_each_block_and_each_sample_has_tokens_of_its_own_in_any_micro_batch():
    config = STYLES["gpt2"]
    batch = make_batch(config, kept_tokens=KEPT)
    model = make_model(
        config, solo("tp"), logical_weights(config, seed=1), drops=DROPS, seed=SEED
    )
    blocks = [module for module in model if isinstance(module, RandomLTD)]
    drawn = torch.stack([block.draw(KEPT, batch) for block in blocks])  # [layers, b, k]
    assert (
        len({tuple(row) for layer in drawn.tolist() for row in layer})
        == len(blocks) * batch.size
    )
    assert torch.equal(blocks[1].draw(KEPT, batch.split(1)[2])[0], drawn[1, 2])
    assert torch.equal(drawn[1], places(1, batch.sample_ids))


@pytest.mark.parametrize(
    "changes",
    [
        dict(kept_tokens=LENGTH),
        dict(kept_tokens=LENGTH + 3),
        dict(kept_tokens=None),
        dict(kept_tokens=KEPT, training=False),
    ],
    ids=str,
)
def test_all_tokens_go_through_at_full_length_and_in_evaluation(changes):
    config = STYLES["gpt2"]
    weights = logical_weights(config, seed=1)
    plain = run_gpt(
        config, weights, make_batch(config), tp_size=2, sequence_parallel=True
    )
    with_it = run_gpt(
        config,
        weights,
        make_batch(config, **changes),
        drops=DROPS,
        tp_size=2,
        sequence_parallel=True,
    )
    assert torch.equal(plain[1], with_it[1])


def test_recomputation_changes_no_bit_where_tokens_are_dropped():
    config = replace(STYLES["llama"], hidden_dropout=0.2, attention_dropout=0.1)
    weights, batch = (
        logical_weights(config, seed=3),
        make_batch(config, kept_tokens=KEPT),
    )
    runs = [
        run_gpt(
            config,
            weights,
            batch,
            drops=DROPS,
            tp_size=2,
            sequence_parallel=True,
            seed=SEED,
            recompute_granularity=granularity,
        )
        for granularity in (None, "selective", "full")
    ]
    for again in runs[1:]:
        assert torch.equal(runs[0][1], again[1])
        assert all(
            torch.equal(grad, again[2][name]) for name, grad in runs[0][2].items()
        )


def test_kept_tokens_that_the_ranks_cannot_share_are_refused_by_the_block_too():
    config = STYLES["gpt2"]
    weights, batch = logical_weights(config, seed=1), make_batch(config, kept_tokens=5)
    with pytest.raises(LayoutError, match="5 kept tokens are not divisible by 2"):
        run_gpt(config, weights, batch, drops=DROPS, tp_size=2, sequence_parallel=True)
    run_gpt(config, weights, batch, drops=DROPS, tp_size=2)


def test_names_and_shapes_of_the_weights_are_those_of_a_model_that_drops_nothing():
    config = STYLES["llama"]
    weights = logical_weights(config, seed=1)
    plain, with_it = (
        make_model(config, solo("tp"), weights, drops=drops) for drops in ((), DROPS)
    )
    assert [p.spec for p in plain.parameters()] == [
        p.spec for p in with_it.parameters()
    ]
    assert [type(module) for module in with_it].count(RandomLTD) == len(DROPS)
