"""Forward and backward of the BERT equal a plain one under tensor and sequence parallelism; recomputation
changes no bit."""

from dataclasses import replace

import pytest
import torch

from megatron_ds.extensions.data_efficiency.seqlen_curriculum import truncate
from megatron_ds.models import attention
from megatron_ds.ops.keyed_random import random_subset
from tests.harness.bert_runs import random_bert_batch, run_bert
from tests.harness.plain_bert import (
    TinyBert,
    bert_shapes,
    bert_weights,
    plain_bert,
    plain_bert_losses,
)
from tests.harness.plain_gpt import LLAMA

pytestmark = pytest.mark.threads

BERT = TinyBert()
STYLES = {
    "bert": BERT,
    "one segment, untied": TinyBert(
        bert_binary_head=False, untie_embeddings_and_output_weights=True
    ),
    "rope, rms, swiglu": TinyBert(**{**LLAMA, "add_bias_linear": True}),
    "alibi": TinyBert(position_embedding_type="alibi"),
    "features": TinyBert(
        position_embedding_type="rope",
        qk_layernorm=True,
        apply_layernorm_1p=True,
        use_parallel_residual=True,
    ),
}
LAYOUTS = [dict(tp_size=1), dict(tp_size=2), dict(tp_size=2, sequence_parallel=True)]
IDS = (3, 4, 5)


def batch_of(config, **changes):
    return random_bert_batch(config.vocab_size, IDS, 10, **changes)


def oracle(config, weights, batch, **kept):
    weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
    logits, order = plain_bert(
        weights,
        config,
        batch.tokens,
        batch.position_ids,
        batch.token_types,
        batch.attention_mask[:, 0, 0],
        **kept,
    )
    words, sentences = plain_bert_losses(
        logits, order, batch.labels, batch.loss_mask, batch.sentence_order
    )
    (words + sentences).backward()
    return (
        words.item(),
        sentences.item(),
        logits.detach(),
        {name: w.grad for name, w in weights.items()},
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_bert_equals_plain_bert_forward_and_backward(style, layout):
    config = STYLES[style]
    weights, batch = bert_weights(config, seed=1), batch_of(config)
    assert_equal_runs(
        config,
        run_bert(config, weights, batch, **layout),
        oracle(config, weights, batch),
    )


def assert_equal_runs(config, ours, reference):
    (loss, logits, grads), (words, sentences, true_logits, true_grads) = ours, reference
    # fp32 against fp64; a gradient's error is measured against its largest element
    assert loss.objective.item() == pytest.approx(words + sentences, rel=1e-6)
    assert (loss.total / loss.tokens).item() == pytest.approx(words, rel=1e-6)
    if config.bert_binary_head:
        [(name, total, count)] = [
            (entry.name, entry.value, entry.count) for entry in loss.entries
        ]
        assert (
            name == "sop loss"
            and count == len(IDS)
            and (total / count).item() == pytest.approx(sentences, rel=1e-6)
        )
    torch.testing.assert_close(logits.double(), true_logits, rtol=1e-5, atol=2e-5)
    assert set(grads) == set(true_grads) == set(bert_shapes(config))
    for name, grad in grads.items():
        scale = true_grads[name].abs().max()
        assert scale > 0
        torch.testing.assert_close(
            grad.double() / scale,
            true_grads[name] / scale,
            rtol=0,
            atol=2e-5,
            msg=lambda m, name=name: f"{name}: {m}",
        )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_blocks_that_drop_tokens_of_shortened_samples_equal_a_plain_bert_that_leaves_them_out(
    style, layout
):
    """Padding stays hidden among the kept, and a curriculum cuts samples before tokens are drawn from
    them."""
    config, seed, length, kept = STYLES[style], 11, 8, 4
    # with seed 1, the samples' gradients of binary_head.bias all but cancel, and rounding shows
    weights, batch = (
        bert_weights(config, seed=2),
        truncate(batch_of(config, kept_tokens=kept), length),
    )
    assert batch.attention_mask.any() and batch.seq_length == length
    places = {
        layer: random_subset(
            [(seed, "random_ltd", f"encoder.layers.{layer}", i) for i in IDS],
            kept,
            length,
        )
        for layer in (0, 1)
    }
    reference = oracle(config, weights, batch, kept_by=places.get)
    assert reference[0] != pytest.approx(oracle(config, weights, batch)[0], rel=1e-3)
    assert_equal_runs(
        config,
        run_bert(config, weights, batch, drops=tuple(places), seed=seed, **layout),
        reference,
    )


def test_what_stands_in_the_padding_reaches_no_loss_and_no_gradient():
    weights, batch = bert_weights(BERT, seed=2), batch_of(BERT)
    padding = batch.attention_mask[:, 0, 0]
    assert padding.any() and not padding[0].any()
    other = replace(
        batch, tokens=batch.tokens.where(~padding, (batch.tokens + 1) % BERT.vocab_size)
    )
    (loss, _, grads), (loss2, _, grads2) = (
        run_bert(BERT, weights, batch),
        run_bert(BERT, weights, other),
    )
    assert torch.equal(loss.objective, loss2.objective)
    for name, grad in grads.items():
        # rows of padding tokens are looked up, and their gradient is zero
        torch.testing.assert_close(grads2[name], grad, rtol=0, atol=1e-6)


def test_a_token_sees_those_behind_it():
    weights, batch = bert_weights(BERT, seed=2), batch_of(BERT)
    tokens = batch.tokens.clone()
    tokens[0, -1] = (tokens[0, -1] + 1) % BERT.vocab_size
    changed = run_bert(BERT, weights, replace(batch, tokens=tokens))[1]
    assert (changed[0, 0] != run_bert(BERT, weights, batch)[1][0, 0]).any()


def test_the_segments_order_of_a_sample_may_be_left_out_and_weigh_with_the_tokens():
    weights, batch = bert_weights(BERT, seed=3), batch_of(BERT)
    order = torch.tensor([-1, 1, 0])
    kept = replace(batch, sentence_order=order)
    [entry] = run_bert(BERT, weights, kept)[0].entries
    total, count = entry.value, entry.count
    assert count == 2
    loss = run_bert(BERT, weights, kept, per_token=True)[0]
    assert loss.objective.item() == pytest.approx(
        (loss.total + total / count * loss.tokens).item()
    )


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputation_changes_no_bit_and_runs_attention_twice(
    granularity, monkeypatch
):
    config = replace(BERT, hidden_dropout=0.2, attention_dropout=0.1)
    weights, batch, runs = bert_weights(config, seed=3), batch_of(config), []
    core = attention.attention
    monkeypatch.setattr(
        attention,
        "attention",
        lambda *args, **kwargs: (runs.append(1), core(*args, **kwargs))[1],
    )
    layout = dict(tp_size=2, sequence_parallel=True, seed=7)
    plain, once = run_bert(config, weights, batch, **layout), len(runs)
    again = run_bert(
        config, weights, batch, recompute_granularity=granularity, **layout
    )
    assert len(runs) == 3 * once == 3 * 2 * config.num_layers
    assert torch.equal(plain[1], again[1])
    assert all(torch.equal(plain[2][name], again[2][name]) for name in plain[2])
    assert not torch.equal(
        plain[1], run_bert(config, weights, batch, **(layout | {"seed": 8}))[1]
    )
