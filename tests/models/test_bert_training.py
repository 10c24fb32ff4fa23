"""A BERT trains in one process as a plain one by torch alone; the layout grid has it under every layout."""

import pytest
import torch
from torch import nn

from megatron_ds.config import parse
from megatron_ds.config.training_schedule import make_learning_rate
from megatron_ds.extensions.bert.data import bert_batch
from megatron_ds.models import MODELS, build_stage
from megatron_ds.progress.ramps import Progress
from megatron_ds.tensor_parallel.init import initialize
from tests.harness.layout_comparison import mock_samples
from tests.harness.layout_runs import GLOBAL_BATCH, run_layout
from tests.harness.model_runs import context_of
from tests.harness.plain_bert import plain_bert, plain_bert_losses
from tests.harness.plain_training import train_plainly
from tests.harness.tiny_jobs import tiny_job

pytestmark = pytest.mark.threads

STEPS, LAYERS = 5, 4


class PlainBert(nn.Module):
    def __init__(self, config, weights):
        super().__init__()
        self.config, self.names = config, list(weights)
        self.values = nn.ParameterList(
            nn.Parameter(w.clone()) for w in weights.values()
        )

    def forward(self, batch):
        logits, order = plain_bert(
            dict(zip(self.names, self.values)),
            self.config,
            batch.tokens,
            batch.position_ids,
            batch.token_types,
            batch.attention_mask[:, 0, 0],
        )
        return plain_bert_losses(
            logits, order, batch.labels, batch.loss_mask, batch.sentence_order
        )


def test_one_process_trains_like_a_plain_bert_under_torchs_adamw():
    job = tiny_job("bert", "fp32", False, 0.0, LAYERS, GLOBAL_BATCH, STEPS)
    config = parse([*job, "--micro-batch-size", "1"])
    ours = build_stage(MODELS["bert"](config.model, context_of()))
    initialize(ours.parameters(), config.train.seed, {})
    plain = PlainBert(
        config.model,
        {
            p.spec.name: p.detach()[: p.spec.shape[0]]
            for p in dict.fromkeys(ours.parameters())
        },
    )
    decays = {p.spec.name: p.spec.decay for p in ours.parameters()}
    samples, seen = mock_samples(config, 4 * GLOBAL_BATCH, seed=1), []

    def loss_of(module, batch):
        words, order = module(batch)
        seen.append(words.item())
        return words + order

    steps = [
        [
            bert_batch(
                [samples[(step * GLOBAL_BATCH + i) % len(samples)]], (i,), (i,), True
            )
            for i in range(GLOBAL_BATCH)
        ]
        for step in range(STEPS)
    ]
    rate, progress = make_learning_rate(config), [Progress()]
    for _ in range(STEPS):
        progress.append(progress[-1].after(GLOBAL_BATCH, 0))
    norms = train_plainly(
        plain,
        loss_of,
        steps,
        lr=lambda step: rate(progress[step]),
        clip=config.optimizer.clip_grad,
        weight_decay=config.optimizer.weight_decay,
        eps=config.optimizer.adam_eps,
        decays=lambda name, p: decays[plain.names[int(name.split(".")[1])]],
    )
    trace, weights = run_layout(job, "", STEPS).merged
    losses = [
        sum(seen[i : i + GLOBAL_BATCH]) / GLOBAL_BATCH
        for i in range(0, len(seen), GLOBAL_BATCH)
    ]
    assert trace.losses == pytest.approx(
        losses, rel=1e-5
    )  # other kernels, and Adam carries rounding on
    assert trace.grad_norms == pytest.approx(norms, rel=1e-4)
    assert set(weights) == set(plain.names)
    for name, value in zip(plain.names, plain.values):
        if not name.endswith("linear_qkv.bias"):  # of keys it is rounding alone
            torch.testing.assert_close(
                weights[name],
                value.detach(),
                rtol=0,
                atol=2e-4,
                msg=lambda m, n=name: f"{n}: {m}",
            )
