"""Multi-latent attention: against the formulas written out, its plan, FLOPs, options and optimizers."""

import math

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.latent_attention.latent_sizes import score_scale
from megatron_ds.extensions.lora.options import LoraConfig
from megatron_ds.models import build_stage, gpt_layers, run_layers
from megatron_ds.models.identity import model_identity
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.mpu.param_spec import Matrices
from megatron_ds.tensor_parallel.init import initialize
from tests.harness.gpt_runs import make_batch
from tests.harness.latent_jobs import LATENT, RUN, SIZES, YARN, latent_config
from tests.planning.test_activations import RANKS, kept

pytestmark = pytest.mark.plan


def a_block(*flags, rank_of_queries=True):
    config = latent_config(*flags, rank_of_queries=rank_of_queries)
    model = build_stage(gpt_layers(config.model, ParallelContext()))
    initialize(list(model.parameters()), 3, {})
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4) if p.dim() > 1 else p.add_(torch.randn_like(p), alpha=0.2)
    batch = make_batch(config.model, s=16)
    x = run_layers(model[:1], None, batch)
    return config.model, model[1].self_attention, x, batch


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x, frequencies, amplitude):
    """Neighbouring channels [.., s, p] as complex numbers, multiplied by those of their positions."""
    angles = torch.arange(x.shape[-2])[:, None] * frequencies
    turn = torch.polar(torch.full_like(angles, amplitude), angles)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


def written_out(m, attention, x, frequencies, amplitude, growth):
    """The formulas of DeepSeek-V2, in fp64: [s, b, h] → [s, b, h]."""
    w = {name: p.detach().double() for name, p in attention.named_parameters()}
    x = x.detach().double().transpose(0, 1)
    e, p, v, r, n = (
        m.qk_head_dim,
        m.qk_pos_emb_head_dim,
        m.v_head_dim,
        m.kv_lora_rank,
        m.num_attention_heads,
    )
    latent = x
    if m.q_lora_rank:
        down = x @ w["linear_q_down_proj.weight"].T
        latent = rms(down, w["q_layernorm.weight"], m.norm_epsilon)
    up = w.get("linear_q_up_proj.weight", w.get("linear_q_proj.weight"))
    q = (latent @ up.T).unflatten(-1, (n, e + p)).transpose(1, 2)
    both = x @ w["linear_kv_down_proj.weight"].T
    c = rms(both[..., :r], w["kv_layernorm.weight"], m.norm_epsilon)
    kv = (c @ w["linear_kv_up_proj.weight"].T).unflatten(-1, (n, e + v))
    kv = kv.transpose(1, 2)  # [b, n, s, e + v]
    shared = rotated(both[:, None, :, r:], frequencies, amplitude)
    of_queries = rotated(q[..., e:], frequencies, amplitude)
    scores = q[..., :e] @ kv[..., :e].transpose(-1, -2)
    scores = scores + of_queries @ shared.transpose(-1, -2)
    scores = scores * growth**2 / math.sqrt(e + p)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    out = (probabilities @ kv[..., e:]).transpose(1, 2).flatten(-2)
    return (out @ w["linear_proj.weight"].T).transpose(0, 1)


@pytest.mark.parametrize("rank_of_queries", [True, False])
def test_it_computes_the_formulas_of_deepseek_v2(rank_of_queries):
    m, attention, x, batch = a_block(rank_of_queries=rank_of_queries)
    p = m.qk_pos_emb_head_dim
    frequencies = 10000.0 ** -(torch.arange(0, p, 2).double() / p)
    expected = written_out(m, attention, x, frequencies, 1.0, 1.0)
    assert expected.abs().max() > 0.05
    torch.testing.assert_close(
        attention(x, batch).double(), expected, rtol=1e-5, atol=1e-6
    )


def test_yarn_scales_rotation_and_scores():
    m, attention, x, batch = a_block(*YARN)
    factor = m.yarn_rotary_scaling_factor
    growth = 0.1 * m.yarn_mscale_all_dim * math.log(factor) + 1
    amplitude = (0.1 * m.yarn_mscale * math.log(factor) + 1) / growth
    assert growth != 1 != amplitude
    scale = growth**2 / math.sqrt(m.qk_head_dim + m.qk_pos_emb_head_dim)
    assert score_scale(m) == pytest.approx(scale)
    frequencies = attention.rotary.scalings[0](
        10000.0 ** -(torch.arange(0, 8, 2).float() / 8)
    )
    expected = written_out(m, attention, x, frequencies, amplitude, growth)
    torch.testing.assert_close(
        attention(x, batch).double(), expected, rtol=1e-5, atol=2e-6
    )


def test_kinds_and_flops_are_those_of_its_weights():
    m = latent_config().model
    layers = [layer for layer in gpt_layers(m, ParallelContext()) if layer.is_block]
    assert {layer.kind for layer in layers} == {"latent_block"}
    block = layers[0].make()
    matrices = [p.numel() for p in block.parameters() if p.dim() == 2]
    s = 64
    found = layers[0].flops(s, 0)
    assert found.weights == 6 * s * sum(matrices)
    widths = m.qk_head_dim + m.qk_pos_emb_head_dim + m.v_head_dim
    pairs = s * s / 2  # Megatron's half of a causal matrix
    assert found.scores == pytest.approx(6 * pairs * m.num_attention_heads * widths)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("recompute", [[], ["--recompute-granularity", "selective"]])
def test_the_plan_has_the_bytes_that_its_blocks_keep(ranks, recompute):
    number, of_ranks = RANKS[ranks]
    flags = [*LATENT, *recompute, *of_ranks, "--seq-length", "24"]
    measured, _, planned = kept(
        [*flags, "--micro-batch-size", "2"], number, slice(1, 3)
    )
    assert measured == planned


@pytest.mark.parametrize("rank_of_queries", [True, False])
def test_all_linear_layers_have_adapters_if_asked(rank_of_queries):
    chosen = lambda *flags: (
        latent_config("--lora-rank", "2", *flags, rank_of_queries=rank_of_queries)
        .of(LoraConfig)
        .targets
    )
    block = a_block(rank_of_queries=rank_of_queries)[1]
    linear = {name for name, m in block.named_children() if hasattr(m, "call")}
    every = {*linear, "linear_fc1", "linear_fc2"}
    assert {*chosen("--lora-target-modules", "all-linear")} == every
    assert every - {*chosen()} == {n for n in linear if "down" in n} != set()


def test_columns_of_encoded_weights_that_ranks_would_cut_are_named():
    encoded = "--lora-rank 2 --lora-base-bits 4 --tensor-model-parallel-size 2".split()
    flags = [*SIZES, *LATENT, *RUN, *encoded, "--qk-head-dim", "120"]
    flags += ["--ffn-hidden-size", "128"]
    wide = ["--kv-lora-rank", "64", "--q-lora-rank", "64", "--v-head-dim", "32"]
    parse([*flags, *wide], world_size=2)
    with pytest.raises(ConfigError, match="16 columns of linear_kv_up_proj"):
        parse([*flags, *wide, "--kv-lora-rank", "16"], world_size=2)
    with pytest.raises(ConfigError, match="48 columns of linear_proj"):
        parse([*flags, *wide, "--v-head-dim", "24"], world_size=2)


def test_packed_matrices_are_updated_apart():
    m, attention, _, _ = a_block()
    heads = m.num_attention_heads
    assert attention.linear_kv_up_proj.weight.spec.matrices == Matrices(
        heads, (m.qk_head_dim, m.v_head_dim)
    )
    assert attention.linear_kv_down_proj.weight.spec.matrices == Matrices(
        1, (m.kv_lora_rank, m.qk_pos_emb_head_dim)
    )
    assert attention.linear_q_down_proj.weight.spec.matrices == Matrices()


def test_options_that_its_blocks_do_not_read_are_refused():
    for flags, named in (
        (["--position-embedding-type", "alibi"], "position-embedding-type alibi"),
        (["--num-query-groups", "2"], "num-query-groups"),
        (["--rotary-percent", "0.5"], "rotary-percent"),
        (["--sparse-attention", "dense"], "sparse-attention"),
        (["--qk-pos-emb-head-dim", "7"], "Use --qk-pos-emb-head-dim 8"),
    ):
        with pytest.raises(ConfigError, match=named):
            latent_config(*flags)
    assert latent_config("--num-query-groups", "4").model.query_groups == 4


def test_rope_type_takes_the_place_of_the_type_of_positions():
    model = latent_config("--position-embedding-type", "rope", *YARN).model
    assert model.position_embedding_type == "yarn" and model.rotary_interleaved
    assert latent_config().model.position_embedding_type == "rope"
    wide = ["--max-position-embeddings", "5000", "--rotary-scaling-factor", "40"]
    scaled = latent_config(*wide).model
    assert scaled.position_embedding_type == "yarn"
    assert scaled.original_max_position_embeddings == 4096


def test_a_checkpoint_records_its_options_and_others_none():
    identity = model_identity(latent_config().model)
    assert identity["multi_latent_attention"] and identity["v_head_dim"] == 12
    plain = parse([*SIZES, *RUN], world_size=1)
    of_latents = {"multi_latent_attention", "v_head_dim"}
    assert not of_latents & model_identity(plain.model).keys()
