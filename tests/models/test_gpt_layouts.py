"""Forward and backward of the GPT equal a plain one, whatever the layout."""

from dataclasses import replace

import pytest
import torch

from megatron_ds import models
from megatron_ds.batch.documents import document_positions
from tests.harness.gpt_runs import make_batch, make_model, run_gpt
from tests.harness.plain_gpt import (
    ALIBI,
    FAMILIES,
    LLAMA,
    STYLES,
    TinyConfig,
    logical_weights,
    plain_gpt,
    plain_loss,
)
from tests.harness.threads import run_ranks

pytestmark = [pytest.mark.threads, pytest.mark.one_in(2)]

MIXTURES = {
    **STYLES,
    **FAMILIES,
    "half-turned rope, biases, tied": TinyConfig(
        **{
            **LLAMA,
            "rotary_percent": 0.5,
            "add_bias_linear": True,
            "untie_embeddings_and_output_weights": False,
        }
    ),
    "no positions, rms": TinyConfig(
        position_embedding_type="none", normalization="RMSNorm"
    ),
    "neighbours turned by scaled angles": TinyConfig(
        **LLAMA,
        rotary_interleaved=True,
        rotary_percent=0.75,
        rotary_seq_len_interpolation_factor=2.5,
    ),
    # Waves of 6, 177, 4,990 and 141,000 tokens: the first two are kept, and the last is above 8,192.
    "waves of llama 3.1": TinyConfig(
        **LLAMA | dict(rotary_base=6.3e5),
        use_rope_scaling=True,
        rope_scaling_factor=0.01,
        qk_layernorm=True,
    ),
    "a base for 17 tokens after 5": TinyConfig(
        **LLAMA, rotary_ntk_factor=2.0, original_max_position_embeddings=5
    ),
    # Pairs 0 to 3 turn 6, 2, 0.6 and 0.2 times in 40 tokens: kept, two mixed, stretched.
    "yarn": TinyConfig(
        **LLAMA | dict(position_embedding_type="yarn"),
        original_max_position_embeddings=40,
        yarn_factor=3.0,
        yarn_beta_fast=4.0,
        yarn_beta_slow=0.5,
        yarn_mscale=2.0,
        yarn_mscale_all_dim=0.3,
        yarn_correction_range_round_to_int=False,
    ),
    "alibi": ALIBI,
    "alibi, biases, tied, a slope for each key": TinyConfig(
        position_embedding_type="alibi"
    ),
    "yarn, half-turned": TinyConfig(
        **LLAMA | dict(position_embedding_type="yarn", head_dim=16),
        rotary_percent=0.5,
        original_max_position_embeddings=40,
        yarn_factor=3.0,
        yarn_beta_fast=4.0,
        qk_layernorm=True,
    ),
    "both halves of a block at once": TinyConfig(
        use_parallel_residual=True, norm_epsilon=1e-3
    ),
    "scales minus one": TinyConfig(**LLAMA, apply_layernorm_1p=True, qk_layernorm=True),
    "scales minus one, biases": TinyConfig(apply_layernorm_1p=True),
    "biases of q, k, v alone": TinyConfig(**LLAMA, add_qkv_bias=True),
    "normalized heads, rope, rms": TinyConfig(**LLAMA, qk_layernorm=True),
    "normalized heads, rope, biases": TinyConfig(
        qk_layernorm=True, position_embedding_type="rope"
    ),
    "windows": TinyConfig(window_size=(2, 0), window_attn_skip_freq="2"),
    "windows and sinks": TinyConfig(
        **LLAMA, window_size=(3, 0), softmax_type="learnable"
    ),
    "windows of blocks": TinyConfig(
        **LLAMA,
        sparse_attention="local",
        sparse_block=2,
        sparse_num_sliding_window_blocks=4,
    ),
    "a clamped gate, biases": TinyConfig(
        activation="clamped_swiglu", num_layers=1, softmax_type="learnable"
    ),
    "attention to nothing": TinyConfig(softmax_type="off-by-one"),
}
LAYOUTS = [dict(tp_size=1), dict(tp_size=2), dict(tp_size=2, sequence_parallel=True)]


def oracle(config, weights, batch, **drops):
    weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
    logits = plain_gpt(
        weights,
        config,
        batch.tokens,
        batch.position_ids,
        attention_mask=batch.attention_mask,
        **drops,
    )
    loss = plain_loss(logits, batch.labels, batch.loss_mask)
    loss.backward()
    return loss.item(), logits.detach(), {name: w.grad for name, w in weights.items()}


def assert_equal_runs(ours, reference):
    (loss, logits, grads), (true_loss, true_logits, true_grads) = ours, reference
    # fp32 against fp64; errors of logits and gradients are measured against the largest element
    assert loss.objective.item() == pytest.approx(true_loss, rel=1e-6)
    assert (logits.double() - true_logits).abs().max() <= 1e-5 * true_logits.abs().max()
    assert set(grads) == set(true_grads)
    for name, grad in grads.items():
        scale = true_grads[name].abs().max()
        assert scale > 0
        torch.testing.assert_close(
            grad.double() / scale,
            true_grads[name] / scale,
            rtol=0,
            atol=1e-5,
            msg=lambda m, name=name: f"{name}: {m}",
        )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("style", MIXTURES)
def test_gpt_equals_plain_gpt_forward_and_backward(style, layout):
    config = MIXTURES[style]
    weights, batch = logical_weights(config, seed=1), make_batch(config)
    assert_equal_runs(
        run_gpt(config, weights, batch, **layout), oracle(config, weights, batch)
    )


@pytest.mark.parametrize("style", STYLES)
def test_an_explicit_mask_and_restarting_positions_equal_the_plain_gpt(style):
    config = STYLES[style]
    s = 10
    positions = torch.tensor([[*range(4), *range(6)], [*range(9), 0], [*range(10)]])
    document = (positions == 0).cumsum(1)
    mask = (document[:, None, :, None] != document[:, None, None, :]) | torch.ones(
        s, s
    ).triu(1).bool()
    weights, batch = (
        logical_weights(config, seed=2),
        make_batch(config, position_ids=positions, attention_mask=mask),
    )
    reference = oracle(config, weights, batch)
    assert reference[0] != pytest.approx(oracle(config, weights, make_batch(config))[0])
    assert_equal_runs(
        run_gpt(config, weights, batch, tp_size=2, sequence_parallel=True), reference
    )


@pytest.mark.parametrize("granularity", [None, "full", "selective"])
@pytest.mark.parametrize("style", [*STYLES, "alibi"])
def test_documents_of_a_sample_have_the_logits_that_each_has_by_itself(
    style, granularity
):
    """The oracle never sees a mask: each document is a sample of its own, from position 0."""
    config = MIXTURES[style]
    ids = torch.tensor([[0] * 4 + [1] * 6, [0] + [1] * 8 + [2], [0] * 10])
    weights, batch = logical_weights(config, seed=2), make_batch(config)
    batch = replace(batch, document_ids=ids, position_ids=document_positions(ids))
    _, logits, grads = run_gpt(
        config,
        weights,
        batch,
        tp_size=2,
        sequence_parallel=True,
        recompute_granularity=granularity,
    )
    weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
    total = 0.0
    for row, document in {
        (i, n) for i, numbers in enumerate(ids.tolist()) for n in numbers
    }:
        here = ids[row] == document
        tokens = batch.tokens[row : row + 1, here]
        alone = plain_gpt(weights, config, tokens, torch.arange(tokens.shape[1])[None])
        # fp32 against fp64
        torch.testing.assert_close(
            logits[row, here].double(), alone[0], rtol=1e-5, atol=1e-5
        )
        losses = (
            torch.logsumexp(alone, -1)
            - alone.gather(-1, batch.labels[row : row + 1, here, None])[..., 0]
        )
        total = total + (losses * batch.loss_mask[row : row + 1, here]).sum()
    (total / batch.loss_mask.sum()).backward()
    for name, grad in grads.items():
        scale = weights[name].grad.abs().max()
        torch.testing.assert_close(
            grad.double() / scale, weights[name].grad / scale, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("granularity", ["full", "selective"])
@pytest.mark.parametrize("style", STYLES)
def test_recomputation_changes_no_bit(style, granularity):
    config = replace(STYLES[style], hidden_dropout=0.2, attention_dropout=0.1)
    weights, batch = logical_weights(config, seed=3), make_batch(config)
    layout = dict(tp_size=2, sequence_parallel=True, seed=7)
    plain = run_gpt(config, weights, batch, **layout)
    again = run_gpt(config, weights, batch, recompute_granularity=granularity, **layout)
    assert torch.equal(plain[1], again[1])
    for name in plain[2]:
        assert torch.equal(plain[2][name], again[2][name]), name


@pytest.mark.parametrize(
    "granularity, mlp_runs, attention_runs",
    [(None, 3, 3), ("selective", 3, 6), ("full", 6, 6)],
)
def test_what_is_recomputed_runs_twice(
    monkeypatch, granularity, mlp_runs, attention_runs
):
    config, runs = STYLES["gpt2"], []
    count = lambda name, function: (
        lambda *args, **kwargs: (runs.append(name), function(*args, **kwargs))[1]
    )
    core = models.attention.CoreAttention
    monkeypatch.setattr(core, "forward", count("attention", core.forward))
    monkeypatch.setattr(
        models.block.MLP, "forward", count("mlp", models.block.MLP.forward)
    )
    run_gpt(
        config,
        logical_weights(config, seed=1),
        make_batch(config),
        recompute_granularity=granularity,
    )
    assert (runs.count("mlp"), runs.count("attention")) == (mlp_runs, attention_runs)


def test_sequence_parallel_ranks_hold_slices_of_the_sequence_between_the_layers():
    config = STYLES["gpt2"]
    weights, batch = logical_weights(config, seed=1), make_batch(config)

    def main(rank, world):
        tp = world.group("tp", (0, 1), rank)
        shapes, x = [], None
        for module in make_model(config, tp, weights, sequence_parallel=True):
            x = module(x, batch)
            shapes.append(tuple(x.shape))
        return shapes

    for shapes in run_ranks(2, main):
        assert shapes == [(5, 3, 24)] * 5 + [(10, 3, 20)]


def test_bf16_follows_fp32():
    config = STYLES["llama"]
    weights, batch = logical_weights(config, seed=4), make_batch(config)
    loss, logits, _ = run_gpt(config, weights, batch, tp_size=2, dtype=torch.bfloat16)
    true_loss, true_logits, _ = oracle(config, weights, batch)
    assert logits.dtype == torch.bfloat16
    assert loss.objective.item() == pytest.approx(
        true_loss, rel=2e-2
    )  # bf16 keeps 8 bits
    assert (logits.double() - true_logits).norm() / true_logits.norm() < 3e-2
