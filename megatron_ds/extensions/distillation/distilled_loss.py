"""The loss of a run with a teacher.

    loss = (1 - A) × language loss + A × T² × divergence        means over the tokens that count

The factor T² keeps the gradient of the divergence as large as at temperature 1 (Hinton et al. 2015, arXiv:1503.02531,
section 2). In evaluation the loss is the language loss alone, which no teacher changes.
"""

from collections.abc import Callable

import torch

from ...batch.batch import Batch
from ...config import RunConfig
from ...models import MODELS, Loss
from ...mpu.mesh import Mesh
from ...tensor_parallel.logits_in_parts import Logits, losses_of, width_of
from .divergence import Columns, DistilledTokens
from .options import DistillationConfig


def distillation_loss(config: RunConfig, mesh: Mesh) -> Callable[[Logits, Batch], Loss]:
    """(logits [s, b, V'/t], batch) → the loss.

    It is the model's own without `batch.reference`, the predictions of the teacher. Overwrites the logits. Collective
    over tp. Adds both parts to the ledger of the batch.
    """
    options = config.of(DistillationConfig)
    tp = mesh.group("tp")
    vocab_size = config.model.vocab_size
    assert vocab_size is not None, "the tokenizer has given it"
    per_token = config.train.calculate_per_token_loss
    own = MODELS[config.model.model].loss

    def loss(logits: Logits, batch: Batch) -> Loss:
        if batch.reference is None:
            return own(logits, batch, tp=tp, vocab_size=vocab_size, per_token=per_token)
        columns = Columns(width_of(logits), tp, vocab_size, options.distill_temperature)
        tokens = DistilledTokens(
            batch.labels.t().reshape(-1), columns, batch.reference, is_reverse(options)
        )
        return _weighed(losses_of(logits, tokens), batch, options, per_token)

    return loss


def is_reverse(options: DistillationConfig) -> bool:
    """Return whether the divergence is KL(student, teacher)."""
    return options.distill_divergence == "reverse"


def _weighed(
    losses: torch.Tensor, batch: Batch, options: DistillationConfig, per_token: bool
) -> Loss:
    """losses [2, s, b] → the loss."""
    mask = batch.loss_mask.t().to(losses.dtype)
    language, divergence = (losses * mask).sum((1, 2))
    # For the log: tokens of this rank.
    counted = mask.sum()
    batch.ledger.record("language loss", language, counted)
    batch.ledger.record("divergence", divergence, counted)
    weight = options.distill_weight
    scale = weight * options.distill_temperature**2
    total = (1 - weight) * language + scale * divergence
    tokens = batch.counted_tokens
    return Loss(
        total if per_token else total / tokens.clamp(min=1.0), total.detach(), tokens
    )
