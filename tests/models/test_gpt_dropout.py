"""Dropout sits where it should, and is the same in every layout."""

from dataclasses import replace

import pytest
import torch

from megatron_ds.ops.dropout import dropout
from tests.harness.gpt_runs import make_batch, run_gpt
from tests.harness.plain_gpt import STYLES, logical_weights, plain_gpt
from tests.models.test_gpt_layouts import LAYOUTS, assert_equal_runs, oracle

pytestmark = pytest.mark.threads

SEED = 11


def dropping(**p):
    return replace(STYLES["gpt2"], **p)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_hidden_dropout_equals_plain_dropout_with_the_masks_of_the_whole_sequence(
    layout,
):
    config = dropping(hidden_dropout=0.3)
    weights, batch = logical_weights(config, seed=1), make_batch(config)

    def drop(site, x):  # x: [b, s, h]
        return dropout(
            x.transpose(0, 1),
            0.3,
            seed=SEED,
            site=site,
            sample_ids=batch.sample_ids,
            rows=range(x.shape[1]),
        ).transpose(0, 1)

    assert_equal_runs(
        run_gpt(config, weights, batch, seed=SEED, **layout),
        oracle(config, weights, batch, drop=drop),
    )


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_attention_dropout_is_the_same_in_every_layout(layout):
    config = dropping(attention_dropout=0.3)
    weights, batch = logical_weights(config, seed=1), make_batch(config)
    _, whole, grads = run_gpt(config, weights, batch, seed=SEED)
    _, split, split_grads = run_gpt(config, weights, batch, seed=SEED, **layout)
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-5)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    torch.testing.assert_close(split_grads[name], grads[name], rtol=1e-4, atol=1e-6)
    without = plain_gpt(weights, config, batch.tokens, batch.position_ids)
    assert not torch.allclose(whole.double(), without, atol=1e-2)


@pytest.mark.parametrize(
    "p", [dict(hidden_dropout=0.3), dict(attention_dropout=0.3)], ids=str
)
def test_a_sample_keeps_its_masks_in_any_micro_batch_and_loses_them_with_another_seed(
    p,
):
    config = dropping(**p)
    weights, batch = logical_weights(config, seed=1), make_batch(config)
    _, together, _ = run_gpt(config, weights, batch, seed=SEED)
    _, alone, _ = run_gpt(config, weights, batch.split(1)[2], seed=SEED)
    _, other, _ = run_gpt(config, weights, batch, seed=SEED + 1)
    torch.testing.assert_close(alone[0], together[2], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(other, together, atol=1e-2)


def test_evaluation_drops_nothing():
    config = dropping(hidden_dropout=0.3, attention_dropout=0.3)
    weights, batch = logical_weights(config, seed=1), make_batch(config, training=False)
    _, logits, _ = run_gpt(config, weights, batch)
    torch.testing.assert_close(
        logits.double(),
        plain_gpt(weights, config, batch.tokens, batch.position_ids),
        rtol=1e-5,
        atol=1e-5,
    )
