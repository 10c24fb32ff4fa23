"""Multi-latent attention of megatron-core, but for its core, in one process: logits and gradients."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ds.batch.ledger import DISCARDING
from megatron_ds.models import build_stage, gpt_layers, run_layers
from megatron_ds.mpu.context import ParallelContext
from tests.harness.gpt_runs import make_batch
from tests.harness.latent_jobs import YARN, latent_config
from tests.harness.limits import HUNG
from tests.harness.megatron_core import skip_reason

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "none"),
]

SEQUENCE = 16


@pytest.mark.parametrize("rank_of_queries", [True, False])
@pytest.mark.parametrize("scaled", [False, True])
def test_logits_and_gradients_are_those_of_megatron_core(
    rank_of_queries, scaled, tmp_path
):
    flags = [*YARN, "--max-position-embeddings", "64"] if scaled else []
    model = latent_config(*flags, rank_of_queries=rank_of_queries).model
    tokens = make_batch(model, s=SEQUENCE).with_ledger(DISCARDING)
    job = {
        "q_lora_rank": model.q_lora_rank,
        "rope_type": "yarn" if scaled else "rope",
        "tokens": tokens.tokens.tolist(),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.megatron_latent", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = torch.load(tmp_path / "theirs.pt")
    modules = build_stage(gpt_layers(model, ParallelContext()))
    own = {p.spec.name: p for p in modules.parameters()}
    assert own.keys() == theirs["weights"].keys()
    for name, p in own.items():
        rows = theirs["weights"][name]
        # Ours has rows that fill up the vocabulary, which nothing has filled yet.
        p.data.zero_()
        p.data[: len(rows)].copy_(rows)
    logits = run_layers(modules, None, tokens)[..., : model.vocab_size]
    expected = theirs["logits"].transpose(0, 1)
    assert expected.abs().max() > 0.3
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    (logits * theirs["factor"].transpose(0, 1)).sum().backward()
    for name, p in own.items():
        right = theirs["gradients"][name]
        error = (p.grad[: len(right)] - right).abs().max() / right.abs().max()
        assert error < 1e-5, (name, error)
