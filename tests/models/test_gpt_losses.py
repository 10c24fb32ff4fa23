"""The loss of a micro-batch, against torch's own cross entropy."""

import pytest
import torch
from torch.nn import functional as F

from megatron_ds.models import gpt_loss
from megatron_ds.mpu.group import solo
from tests.harness.gpt_runs import make_batch
from tests.harness.plain_gpt import STYLES

pytestmark = pytest.mark.plan

CONFIG = STYLES["gpt2"]


def logits_of(batch, seed=5, padding=3):
    draw = torch.Generator().manual_seed(seed)
    # [s, b, Vp]
    return torch.randn(
        batch.seq_length, batch.size, CONFIG.vocab_size + padding, generator=draw
    )


def reference(logits, batch, smoothing=0.0):
    """Sum over the tokens that count; 37 true columns, the labels that do not count ignored by torch.

    Megatron spreads the smoothing over the other 36 tokens, torch over all 37.
    """
    labels = batch.labels.masked_fill(batch.loss_mask == 0, -100).t()
    return F.cross_entropy(
        logits[..., : CONFIG.vocab_size].double().flatten(0, 1),
        labels.flatten(),
        reduction="sum",
        label_smoothing=smoothing * 37 / 36,
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("per_token", [False, True])
def test_the_objective_is_the_mean_or_the_sum_of_the_tokens_that_count(
    smoothing, per_token
):
    batch = make_batch(CONFIG)
    ours, true = logits_of(batch).requires_grad_(), logits_of(batch).requires_grad_()
    loss = gpt_loss(
        ours.clone(),
        batch,
        tp=solo(),
        vocab_size=CONFIG.vocab_size,
        label_smoothing=smoothing,
        per_token=per_token,
    )
    total = reference(true, batch, smoothing)
    objective = total if per_token else total / 23
    loss.objective.backward()
    objective.backward()
    assert loss.tokens.item() == 23  # 3 + 10 + 10
    assert (
        loss.total.item() == pytest.approx(total.item(), rel=1e-6)
        and not loss.total.requires_grad
    )
    assert loss.objective.item() == pytest.approx(objective.item(), rel=1e-6)
    torch.testing.assert_close(ours.grad, true.grad, rtol=1e-5, atol=1e-7)


def test_evaluation_measures_without_smoothing():
    batch = make_batch(CONFIG, training=False)
    loss = gpt_loss(
        logits_of(batch),
        batch,
        tp=solo(),
        vocab_size=CONFIG.vocab_size,
        label_smoothing=0.5,
    )
    assert loss.total.item() == pytest.approx(
        reference(logits_of(batch), batch).item(), rel=1e-6
    )


def test_a_batch_in_which_no_token_counts_has_loss_and_gradient_zero():
    batch = make_batch(CONFIG, loss_mask=torch.zeros(3, 10))
    logits = logits_of(batch).requires_grad_()
    loss = gpt_loss(logits.clone(), batch, tp=solo(), vocab_size=CONFIG.vocab_size)
    loss.objective.backward()
    assert loss.objective.item() == loss.tokens.item() == 0
    assert not logits.grad.any()
