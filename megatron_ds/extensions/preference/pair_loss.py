"""The loss of direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290, equation 7).

    reward(answer) = β (log p(answer) - log p_ref(answer))
    loss           = -log σ(reward(chosen) - reward(rejected)), a mean over pairs

With label smoothing ε it is (1 - ε) times this, plus ε times the loss of the pair in the other order (Mitchell 2023,
"A note on DPO with noisy preferences").
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid

from ...batch.batch import Batch
from ...config import RunConfig
from ...models import Loss
from ...models.architecture import token_losses
from ...mpu.group import Group
from ...mpu.mesh import Mesh
from ...mpu.regions import reduce_from_region
from ...tensor_parallel.logits_in_chunks import LogitsInChunks
from .options import PreferenceConfig

Logits = torch.Tensor | LogitsInChunks


class AnswerScores(NamedTuple):
    """log_probs fp32 [b, 2]: logarithms of the probabilities of the chosen and of the rejected answer."""

    log_probs: torch.Tensor

    @property
    def objective(self) -> torch.Tensor:
        """What a pipeline stage attaches terms of layers to; without gradients there are none."""
        return self.log_probs


def answer_scores(
    logits: Logits, batch: Batch, *, tp: Group, cp: Group, vocab_size: int
) -> AnswerScores:
    """logits [s(/c), b, Vp / t] → the sums over the learned tokens of each answer, the same on all ranks.

    Overwrites the logits. Collective over tp, and over cp, whose ranks hold parts of the rows.
    """
    losses = token_losses(logits, batch, tp, vocab_size)  # [s, b]
    learned = batch.loss_mask.t()
    assert batch.document_ids is not None, "a row of a pair has two documents"
    answers = batch.document_ids.t()
    sums = [
        (losses * (learned * (answers == answer))).sum(0).neg() for answer in (0, 1)
    ]
    return AnswerScores(reduce_from_region(torch.stack(sums, dim=1), cp))


def dpo_loss(
    logits: Logits,
    batch: Batch,
    *,
    tp: Group,
    cp: Group,
    vocab_size: int,
    beta: float,
    label_smoothing: float,
) -> Loss:
    """Return the mean over the pairs of a micro-batch; every micro-batch has as many. Shapes and collectives as of
    `answer_scores`.

    Adds to the ledger of the batch the means of the rewards, of their difference, and of the pairs whose order is
    right.
    """
    scores = answer_scores(logits, batch, tp=tp, cp=cp, vocab_size=vocab_size)
    rewards = beta * (scores.log_probs - batch.reference.squeeze(1))
    margins = rewards[:, 0] - rewards[:, 1]
    losses = -(1 - label_smoothing) * logsigmoid(margins)
    if label_smoothing:
        losses = losses - label_smoothing * logsigmoid(-margins)
    # For the log.
    pairs = len(losses)
    chosen, rejected = rewards.detach().sum(0)
    batch.ledger.record("reward chosen", chosen, pairs)
    batch.ledger.record("reward rejected", rejected, pairs)
    batch.ledger.record("reward margin", chosen - rejected, pairs)
    right = (margins > 0).float()
    batch.ledger.record("reward accuracy", right.sum(), pairs)
    # Each context-parallel rank has the whole loss, and its gradient by the tokens of this rank.
    total = losses.detach().sum()
    return Loss(losses.mean(), total / cp.size, torch.full_like(total, pairs))


def pair_loss(config: RunConfig, mesh: Mesh) -> Callable[[Logits, Batch], Loss]:
    """Return the loss of a run on pairs of answers."""
    preference = config.of(PreferenceConfig)
    return partial(
        dpo_loss,
        **sizes_of(config, mesh),
        beta=preference.dpo_beta,
        label_smoothing=preference.dpo_label_smoothing,
    )


def sizes_of(config: RunConfig, mesh: Mesh) -> dict:
    """Return the arguments of `answer_scores` besides logits and batch."""
    return {
        "tp": mesh.group("tp"),
        "cp": mesh.group("cp"),
        "vocab_size": config.model.vocab_size,
    }
