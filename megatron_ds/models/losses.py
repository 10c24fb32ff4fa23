"""Training objectives: the masked mean of the tokens' cross entropy; for BERT also that of the order of two
segments.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..data.batch import Batch
from ..mpu.group import Group
from ..tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from .heads import BertOutput


@dataclass(frozen=True)
class Loss:
    """The main loss of one micro-batch on the last stage: fp32 scalars on the device.

    objective  differentiated; further loss terms are in the ledger of the batch
    total      sum of the losses of the tokens that count, detached; for the log
    tokens     number of tokens that count
    """

    objective: torch.Tensor
    total: torch.Tensor
    tokens: torch.Tensor


def gpt_loss(logits: torch.Tensor, batch: Batch, *, tp: Group, vocab_size: int, label_smoothing: float = 0.0,
             per_token: bool = False) -> Loss:
    """Loss of logits [s, b, Vp / t] against `batch.labels` [b, s], where `batch.loss_mask` is not 0.

    The objective is the mean over the counted tokens of this micro-batch (0 when none counts), so every
    micro-batch has the same weight, as in Megatron. `per_token`: the objective is their sum, and the
    optimizer step divides the gradient by the tokens of the whole global batch, so every token has the same
    weight. Label smoothing applies to training alone. The logits are overwritten. Collective over tp.
    """
    smoothing = label_smoothing if batch.training else 0.0
    losses = vocab_parallel_cross_entropy(logits, batch.labels.t(), tp, vocab_size, smoothing)      # [s, b]
    mask = batch.loss_mask.t().to(losses.dtype)
    total, tokens = (losses * mask).sum(), mask.sum()
    return Loss(total if per_token else total / tokens.clamp(min=1.0), total.detach(), tokens)


def bert_loss(output: BertOutput, batch: Batch, *, tp: Group, vocab_size: int, label_smoothing: float = 0.0,
              per_token: bool = False) -> Loss:
    """`gpt_loss` of the masked tokens; the cross entropy of the segments' order goes to the ledger as "sop
    loss".

    Samples whose `sentence_order` is -1 have no order to predict and do not count in the second. Collective
    over tp.
    """
    loss = gpt_loss(output.logits, batch, tp=tp, vocab_size=vocab_size, label_smoothing=label_smoothing,
                    per_token=per_token)
    if output.order is not None:
        total = F.cross_entropy(output.order.float(), batch.sentence_order, ignore_index=-1, reduction="sum")
        batch.ledger.add("sop loss", total, (batch.sentence_order >= 0).sum().float())
    return loss
