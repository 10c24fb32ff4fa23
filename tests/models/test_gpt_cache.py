"""Generating with a cache gives the logits of a forward over the whole text."""

from dataclasses import replace

import pytest
import torch

from megatron_ds.commands import generate_text
from megatron_ds.errors import ConfigError
from megatron_ds.models import make_caches, run_layers
from megatron_ds.models.attention import SelfAttention
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.gpt_runs import make_batch, make_model
from tests.harness.plain_gpt import (
    ALIBI,
    FAMILIES,
    LLAMA,
    STYLES,
    TinyConfig,
    logical_weights,
    plain_gpt,
)
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

MORE = {
    **FAMILIES,
    "alibi": ALIBI,
    "features": TinyConfig(
        **LLAMA, qk_layernorm=True, rotary_interleaved=True, use_parallel_residual=True
    ),
    # longer than the original length: the angles are those of 17 positions from the first token on
    "dynamic ntk": TinyConfig(
        **LLAMA, rotary_ntk_factor=2.0, original_max_position_embeddings=5
    ),
    "yarn": TinyConfig(
        **LLAMA | dict(position_embedding_type="yarn"),
        original_max_position_embeddings=40,
        yarn_factor=3.0,
        yarn_beta_fast=4.0,
    ),
    "windows": TinyConfig(**LLAMA, window_size=(3, 0), window_attn_skip_freq="2"),
    "blocks": TinyConfig(**LLAMA, sparse_attention="local", sparse_block=2),
    "sinks": TinyConfig(window_size=(4, 0), softmax_type="learnable"),
}


def piece(batch, start, stop):
    cut = lambda t: t[:, start:stop]
    return replace(
        batch,
        tokens=cut(batch.tokens),
        labels=cut(batch.labels),
        loss_mask=cut(batch.loss_mask),
        position_ids=cut(batch.position_ids),
    )


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("style", [*STYLES, *MORE])
@torch.no_grad()
def test_a_prompt_then_pieces_then_single_tokens_equal_one_forward(style, tp_size):
    config = replace((STYLES | MORE)[style], hidden_dropout=0.5, attention_dropout=0.5)
    weights, batch = (
        logical_weights(config, seed=1),
        make_batch(config, b=2, s=11, training=False),
    )

    def main(rank, world):
        with torch.no_grad():
            tp = world.group("tp", tuple(range(tp_size)), rank)
            model = make_model(config, tp, weights, recompute_granularity="full")
            caches = make_caches(model, batch_size=2, max_length=11)
            bounds = (0, 5, 8, 9, 10, 11)
            parts = [
                run_layers(model, None, piece(batch, a, b), caches)
                for a, b in zip(bounds, bounds[1:])
            ]
            return torch.cat(parts), caches["decoder.layers.1"].keys.shape

    ranks = run_ranks(tp_size, main)
    logits = torch.cat([part for part, _ in ranks], dim=-1)[
        ..., : config.vocab_size
    ].transpose(0, 1)
    torch.testing.assert_close(
        logits.double(),
        plain_gpt(weights, config, batch.tokens, batch.position_ids),
        rtol=1e-5,
        atol=1e-5,
    )
    assert ranks[0][1] == (11, 2, config.query_groups // tp_size, config.head_dim)


@torch.no_grad()
def test_a_cache_that_was_reset_starts_the_text_again_and_a_full_one_says_so():
    config = STYLES["llama"]
    weights, batch = (
        logical_weights(config, seed=1),
        make_batch(config, b=1, s=7, training=False),
    )

    def main(rank, world):
        with torch.no_grad():
            model = make_model(config, world.group("tp", (0,), rank), weights)
            caches = make_caches(model, batch_size=1, max_length=7)
            once = run_layers(model, None, batch, caches)
            with pytest.raises(
                ConfigError, match="position 7 does not fit a cache of 7"
            ):
                run_layers(model, None, piece(batch, 6, 7), caches)
            for cache in caches.values():
                cache.reset(4)
            return once[4:], run_layers(model, None, piece(batch, 4, 7), caches)

    ((once, again),) = run_ranks(1, main)
    torch.testing.assert_close(once, again, rtol=1e-5, atol=1e-5)


def test_context_parallel_ranks_have_no_cache():
    def main(rank, world):
        ctx = ParallelContext(Mesh(Grid(cp=2), rank, world.connect))
        attention = SelfAttention(STYLES["gpt2"], "attention", ctx, output_std=0.02)
        with pytest.raises(
            ConfigError, match="generation with context_parallel_size=2"
        ):
            attention.new_cache(1, 8)

    run_ranks(2, main)


def test_the_tool_that_generates_refuses_context_parallelism_before_it_loads():
    words = ["--load", "nowhere", "--prompt", "a", "--context-parallel-size", "2"]
    with pytest.raises(
        ConfigError, match="--context-parallel-size 2: a key-value cache holds whole"
    ):
        generate_text.main(generate_text.parse_arguments(words), None)
