"""Losses and gradients of all depths are those of `MultiTokenPredictionBlock` of megatron-core."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from megatron_ds.batch.ledger import Ledger
from megatron_ds.config.options.model import ModelConfig
from megatron_ds.models import MODELS, build_stage, run_layers
from tests.harness.gpt_runs import make_batch
from tests.harness.limits import HUNG
from tests.harness.megatron_core import skip_reason
from tests.harness.model_runs import context_of

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(skip_reason()), reason=skip_reason()),
]

SEQUENCE, ROWS, SCALE = 12, 64, 0.4
THEIRS = dict(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=48,
    normalization="RMSNorm",
    add_bias_linear=False,
    vocab_size=ROWS,
    max_sequence_length=SEQUENCE,
    mtp_num_layers=2,
    mtp_loss_scaling_factor=SCALE,
)
OURS = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=48,
    normalization="RMSNorm",
    add_bias_linear=False,
    activation="swiglu",
    position_embedding_type="rope",
    seq_length=SEQUENCE,
    vocab_size=ROWS,
    make_vocab_size_divisible_by=1,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    mtp_num_layers=2,
    mtp_loss_scaling_factor=SCALE,
)


CASES = {
    "tied": (False, False),
    "untied": (True, False),
    "losses per token": (False, True),
    "untied, losses per token": (True, True),
}
BATCH = make_batch(OURS, b=2, s=SEQUENCE)


@pytest.fixture(scope="module")
def megatron(tmp_path_factory) -> dict[str, dict]:
    """What the program of megatron-core has computed, by case."""
    folder = tmp_path_factory.mktemp("megatron")
    jobs = [
        {
            "model": {**THEIRS, "share_embeddings_and_output_weights": not unties},
            "per_token": per_token,
            "tokens": BATCH.tokens.tolist(),
            "labels": BATCH.labels.tolist(),
            "mask": BATCH.loss_mask.tolist(),
        }
        for unties, per_token in CASES.values()
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    program = [sys.executable, "-m", "tests.harness.megatron_predictions"]
    files = [str(folder / "jobs.json"), str(folder / "out.pt")]
    subprocess.run([*program, *files], check=True, timeout=HUNG)
    return dict(zip(CASES, torch.load(folder / "out.pt"), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_megatron_core(case, megatron):
    unties, per_token = CASES[case]
    batch = BATCH
    theirs = megatron[case]
    model, loss, means = of_ours(batch, unties, per_token, theirs["weights"])
    assert loss.item() == pytest.approx(theirs["loss"].item(), rel=1e-5)
    torch.testing.assert_close(means, theirs["means"], rtol=1e-5, atol=0)
    named = {p.spec.name: p for p in model.parameters()}
    assert named.keys() == theirs["gradients"].keys()
    largest = max(float(grad.abs().max()) for grad in theirs["gradients"].values())
    for name, grad in theirs["gradients"].items():
        torch.testing.assert_close(
            named[name].grad, grad, rtol=1e-5, atol=1e-5 * largest, msg=name
        )


def of_ours(batch, unties, per_token, weights):
    """(model with gradients, main loss, mean of each depth), with megatron-core's weights."""
    config = replace(OURS, untie_embeddings_and_output_weights=unties)
    ctx = context_of()
    model = build_stage(MODELS["gpt"](config, ctx))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(weights[p.spec.name])
    tokens = batch.counted_tokens
    ledger = Ledger(batch.counted_by_sequence if per_token else None)
    noted = batch.with_ledger(ledger)
    logits = run_layers(model, None, noted)
    loss = MODELS["gpt"].loss(
        logits, noted, tp=ctx.tp, vocab_size=ROWS, per_token=per_token
    )
    entries = ledger.take()
    weighed = tokens if per_token else None
    terms = [entry.value * entry.gradient(1.0, weighed) for entry in entries]
    objective = loss.objective + sum(terms)
    (objective / tokens if per_token else objective).backward()
    means = torch.stack([entry.value.detach() / entry.count for entry in entries])
    return model, loss.total / tokens, means
