"""What a model with mixers computes, refuses and begins with."""

import math

import pytest
import torch
from torch.nn.functional import softplus

from megatron_ds.batch.ledger import DISCARDING
from megatron_ds.compat.conversion.beyond_megatron import check_known_to_megatron
from megatron_ds.config import parse
from megatron_ds.errors import CheckpointError, ConfigError
from megatron_ds.extensions.mixers.first_values import FACTORS, STEPS
from megatron_ds.extensions.mixers.half_block import HalfBlock
from megatron_ds.models import build_stage, gpt_layers, run_layers
from megatron_ds.models.block import Block
from megatron_ds.models.identity import model_identity
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.tensor_parallel.init import initialize
from tests.harness.gpt_runs import make_batch
from tests.mixers.test_mixer_layouts import BASE, DELTA, MAMBA, job_of

pytestmark = pytest.mark.plan

ALONE = "--micro-batch-size 2 --position-embedding-type none"


def model_of(flags: list[str]):
    config = parse(flags, world_size=1).model
    model = build_stage(gpt_layers(config, ParallelContext()))
    initialize(list(model.parameters()), 3, {})
    return config, model


@pytest.mark.parametrize("name", ("blocks", "mamba blocks"))
def test_documents_of_a_row_have_the_logits_of_each_alone(name):
    config, model = model_of(job_of(name, ALONE))
    cuts = (0, 1, 5, 12, 16)
    documents = torch.zeros(1, 16, dtype=torch.long)
    for at in cuts[1:-1]:
        documents[:, at:] += 1
    quiet = {"training": False, "sample_ids": (7,)}
    batch = make_batch(config, b=1, s=16, document_ids=documents, **quiet)
    logits = run_layers(model, None, batch)
    for first, last in zip(cuts, cuts[1:]):
        part = make_batch(config, b=1, s=last - first, **quiet)
        tokens = batch.tokens[:, first:last]
        object.__setattr__(part, "tokens", tokens)
        alone = run_layers(model, None, part)
        torch.testing.assert_close(logits[first:last], alone, rtol=1e-5, atol=1e-6)
    joined = make_batch(config, b=1, s=16, **quiet)
    others = run_layers(model, None, joined)
    assert (logits - others).abs().max() > 1e-4


@pytest.mark.parametrize("name", ("blocks", "halves", "side by side"))
def test_tokens_behind_a_text_change_none_of_its_logits(name):
    """Scoring fills up the texts of a batch so."""
    config, model = model_of(job_of(name, ALONE))
    quiet = {"training": False, "sample_ids": (7,), "ledger": DISCARDING}
    batch = make_batch(config, b=1, s=16, **quiet)
    logits = run_layers(model, None, batch)
    for length in (1, 5, 12):
        part = make_batch(config, b=1, s=length, **quiet)
        object.__setattr__(part, "tokens", batch.tokens[:, :length])
        alone = run_layers(model, None, part)
        torch.testing.assert_close(logits[:length], alone, rtol=1e-5, atol=1e-6)


def test_a_pattern_makes_a_layer_of_each_half():
    _, model = model_of(job_of("halves", ALONE))
    halves = [module for module in model if isinstance(module, HalfBlock)]
    inside = [type(half.module).__name__ for half in halves]
    assert inside == [
        "Mamba",
        "MLP",
        "SelfAttention",
        "MixtureOfExperts",
        "GatedDeltaNet",
        "Mamba",
    ]
    assert not any(isinstance(module, Block) for module in model)


def test_a_half_block_is_its_input_and_the_module_of_the_norm():
    config, model = model_of(job_of("halves", f"{ALONE} --hidden-dropout 0"))
    half = model[1]
    x = torch.randn(16, 2, config.hidden_size)
    batch = make_batch(config, b=2, s=16)
    expected = x + half.self_attention(half.input_layernorm(x), batch)
    torch.testing.assert_close(half(x, batch), expected)


def test_the_gate_of_attention_multiplies_its_output():
    config, model = model_of(job_of("blocks", f"{ALONE} --attention-dropout 0"))
    attention = model[3].self_attention
    x = torch.randn(16, 2, config.hidden_size)
    batch = make_batch(config, b=2, s=16)
    d = config.head_dim
    packed = attention.linear_qkv(x).unflatten(-1, (config.query_groups, 4, d))
    q, k, v, gate = packed.unbind(3)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) / d**0.5
    hidden = torch.ones(16, 16, dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    out = torch.einsum("bnst,tbnd->sbnd", probabilities, v) * gate.sigmoid()
    expected = attention.linear_proj(out.flatten(2))
    torch.testing.assert_close(attention(x, batch), expected, rtol=1e-4, atol=1e-6)


def test_first_values_are_in_the_ranges_of_their_papers():
    flags = job_of("halves", f"{ALONE} --mamba-num-heads 512 --mamba-num-groups 4")
    _, model = model_of(flags)
    mamba = model[1].self_attention
    factors = mamba.A_log.exp()
    steps = softplus(mamba.dt_bias)
    assert FACTORS[0] <= factors.min() and factors.max() <= FACTORS[1]
    assert STEPS[0] * 0.999 <= steps.min() and steps.max() <= STEPS[1] * 1.001
    # Means of a uniform factor and of a uniform logarithm, within five deviations of the mean of 512 draws.
    assert abs(factors.mean() - 8.5) < 5 * 15 / math.sqrt(12 * 512)
    middle = math.log(STEPS[0] * STEPS[1]) / 2
    assert abs(steps.log().mean() - middle) < 5 * math.log(100) / math.sqrt(12 * 512)
    assert torch.equal(mamba.D, torch.ones(512))


def test_a_checkpoint_is_one_of_the_kinds_and_sizes_of_its_layers():
    identity = lambda *more: model_identity(
        parse(job_of("blocks", " ".join((ALONE, *more)))).model
    )
    assert identity() == identity("--linear-attention-freq [1,1,0]")
    assert identity() != identity("--linear-attention-freq [1,0,1]")
    assert identity() != identity("--linear-key-head-dim 12")
    assert identity() != identity("--no-attention-output-gate")


@pytest.mark.parametrize(
    "flags, what",
    (
        ("--attention-output-gate", "gates of attention"),
        ("--qk-layernorm-of-all-heads", "norms of all heads"),
        ("--norms-behind-attention", "norms behind attention alone"),
    ),
)
def test_formats_of_megatron_refuse_what_it_does_not_compute(flags, what):
    plain = f"{BASE} --num-layers 2 --micro-batch-size 1 --normalization RMSNorm"
    check_known_to_megatron(parse(plain.split()).model, "Megatron")
    model = parse(f"{plain} {flags}".split()).model
    with pytest.raises(CheckpointError, match=f"does not compute {what}"):
        check_known_to_megatron(model, "Megatron")


REFUSED = {
    "--num-layers 3 --mixer-pattern M-": "describes 2 layers, but the model has 3",
    "--num-layers 2 --mixer-pattern MX": "'X', which names no layer",
    "--num-layers 2 --mixer-pattern M- --linear-attention-freq 2": "both choose what each layer is; give one",
    "--num-layers 2 --mixer-pattern ME": "has experts in layers where",
    "--num-layers 2 --linear-attention-freq [1,0,1]": "describes 3 layers",
    f"--num-layers 2 --linear-attention-freq 2 {DELTA} --linear-num-value-heads 6": "is not a multiple",
    f"--num-layers 2 --mixer-pattern M- {MAMBA} --mamba-num-groups 3": "does not divide the 8 heads",
    f"--num-layers 2 --linear-attention-freq 2 {DELTA} --model bert": "Use --model gpt",
    f"--num-layers 2 --linear-attention-freq 2 {DELTA} --attention-output-gate --lora-rank 2 "
    "--lora-target-modules q_proj": "has gates too. Use linear_qkv",
    f"--num-layers 2 --linear-attention-freq 2 {DELTA} --mixer-multipliers 1 2": "has 2 values, and must have 11",
    f"--num-layers 2 --linear-attention-freq 2 {DELTA} --norms-behind-attention --normalization RMSNorm "
    "--attention-output-gate": "both describe blocks with attention",
    f"--num-layers 2 --linear-attention-freq 2 {DELTA} --sparse-attention fixed": "layouts are those of models",
}
RANKS = {
    f"--num-layers 2 --linear-attention-freq 2 {DELTA} --tensor-model-parallel-size 8": 8,
    f"--num-layers 2 --linear-attention-freq 2 {DELTA} --context-parallel-size 8 --cp-comm-type a2a": 8,
    f"--num-layers 2 --linear-attention-freq 2 {DELTA} --context-parallel-size 2": 2,
}


def refusal(flags: str, world: int = 1) -> str:
    base = (
        "--hidden-size 24 --num-attention-heads 8 --seq-length 16 --vocab-size 61 --mock-data --lr 1 "
        "--train-iters 1 --micro-batch-size 1"
    )
    with pytest.raises(ConfigError) as error:
        parse(f"{base} {flags}".split(), world_size=world)
    return str(error.value)


@pytest.mark.parametrize("flags", REFUSED)
def test_what_a_model_with_mixers_cannot_be_is_refused(flags):
    assert REFUSED[flags] in refusal(flags)


@pytest.mark.parametrize("flags", RANKS)
def test_ranks_divide_groups_and_exchange_heads(flags):
    text = refusal(flags, RANKS[flags])
    assert "whole groups of heads" in text or "--cp-comm-type a2a" in text
