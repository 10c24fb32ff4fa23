"""The loss of a run with a z-loss.

    loss of a token = lse - logit[label] + A lse²        lse = log Σ exp(logit)
    dlogit          = p - [label] + 2 A lse p            p = exp(logit - lse)

Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, section 5) have A = 1e-4. In evaluation the loss is the cross entropy
alone.
"""

from collections.abc import Callable

import torch

from ...batch.batch import Batch
from ...config import RunConfig
from ...models import MODELS, Loss
from ...mpu.group import Group
from ...mpu.mesh import Mesh
from ...ops.logits import cross_entropy_facts, cross_entropy_gradient_
from ...tensor_parallel.cross_entropy import own_columns, token_losses
from ...tensor_parallel.logits_in_parts import Logits, losses_of, width_of
from ...tensor_parallel.token_loss import Parts
from .feature import ZLossConfig


class NormalizedTokens:
    """A `TokenLoss` with two losses: cross entropy, and lse².

    labels      int64 [n], of the whole vocabulary
    width       columns of this rank
    vocab_size  columns from it on are padding
    """

    def __init__(self, labels: torch.Tensor, width: int, group: Group, vocab_size: int):
        start, self.valid = own_columns(width, group, vocab_size)
        self.labels = labels - start
        self.group = group
        self.vocab_size = vocab_size

    def of(self, parts: Parts) -> torch.Tensor:
        """Return both losses, fp32 [2, n]. Collective: all-gather."""
        facts = [
            cross_entropy_facts(logits, self.labels[rows], self.valid, False)
            for rows, logits in parts
        ]
        whole = torch.cat(facts, dim=1)
        loss, self.lse = token_losses(whole, self.group, self.vocab_size, 0.0)
        return torch.stack([loss, self.lse.square()])

    def gradients(self, parts: Parts, dlosses: torch.Tensor) -> Parts:
        """Yields the gradients, dlosses [2, n]: (a + 2 b lse) p - [label] a for gradients a and b of the losses."""
        on_label, on_square = dlosses
        more = 2 * on_square * self.lse
        is_own = (self.labels >= 0) & (self.labels < self.valid)
        column = self.labels.clamp(0, max(self.valid - 1, 0)).unsqueeze(-1)
        for rows, logits in parts:
            every = on_label[rows] + more[rows]
            labels = self.labels[rows]
            lse = self.lse[rows]
            cross_entropy_gradient_(logits, labels, lse, every, self.valid, 1.0, 0.0)
            # At the label the second loss has no -1.
            left = (more[rows] * is_own[rows]).unsqueeze(-1)
            logits.scatter_add_(-1, column[rows], left.to(logits.dtype))
            yield rows, logits


def normalized_loss(config: RunConfig, mesh: Mesh) -> Callable[[Logits, Batch], Loss]:
    """(logits [s, b, V'/t], batch) → the loss.

    Overwrites the logits. Collective over tp. Adds both parts to the ledger of the batch.
    """
    strength = config.of(ZLossConfig).z_loss_strength
    tp = mesh.group("tp")
    vocab_size = config.model.vocab_size
    assert vocab_size is not None, "the tokenizer has given it"
    per_token = config.train.calculate_per_token_loss
    own = MODELS[config.model.model].loss

    def loss(logits: Logits, batch: Batch) -> Loss:
        if not batch.training:
            return own(logits, batch, tp=tp, vocab_size=vocab_size, per_token=per_token)
        labels = batch.labels.t().reshape(-1)
        tokens = NormalizedTokens(labels, width_of(logits), tp, vocab_size)
        return _weighed(losses_of(logits, tokens), batch, strength, per_token)

    return loss


def _weighed(
    losses: torch.Tensor, batch: Batch, strength: float, per_token: bool
) -> Loss:
    """losses [2, s, b] → the loss."""
    mask = batch.loss_mask.t().to(losses.dtype)
    language, squares = (losses * mask).sum((1, 2))
    # For the log: tokens of this rank.
    counted = mask.sum()
    batch.ledger.record("language loss", language, counted)
    batch.ledger.record("z-loss", squares, counted)
    total = language + strength * squares
    tokens = batch.counted_tokens
    return Loss(
        total if per_token else total / tokens.clamp(min=1.0), total.detach(), tokens
    )
