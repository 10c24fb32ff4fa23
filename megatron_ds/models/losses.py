"""Training objectives: masked mean of the cross entropy of each token; for BERT the order of two segments besides."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..data.batch import Batch
from ..mpu.group import Group
from ..tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


@dataclass(frozen=True)
class Loss:
    """What the last stage makes of one micro-batch. All fp32 scalars on the device; nothing waits for it.

    objective  what backward starts from
    total      sum of the token losses that count, detached; for the log
    tokens     how many tokens count
    terms      what else the objective holds, as (sum, how many it is the sum of), in the order of the architecture's `terms`
    """

    objective: torch.Tensor
    total: torch.Tensor
    tokens: torch.Tensor
    terms: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()


def gpt_loss(logits: torch.Tensor, batch: Batch, *, tp: Group, vocab_size: int, label_smoothing: float = 0.0,
             per_token: bool = False) -> Loss:
    """Loss of logits [s, b, Vp / t] against `batch.labels` [b, s], where `batch.loss_mask` is not 0.

    The objective is the mean over the counted tokens of this micro-batch (0 when none counts), so every micro-batch weighs
    the same, as in Megatron. `per_token`: it is their sum instead, and the gradient is divided by the tokens of the whole
    global batch at the step, so every token weighs the same. Smoothing is for training; evaluation measures without.
    The logits are used up. Collective over tp.
    """
    smoothing = label_smoothing if batch.training else 0.0
    losses = vocab_parallel_cross_entropy(logits, batch.labels.t(), tp, vocab_size, smoothing)      # [s, b]
    mask = batch.loss_mask.t().to(losses.dtype)
    total, tokens = (losses * mask).sum(), mask.sum()
    return Loss(total if per_token else total / tokens.clamp(min=1.0), total.detach(), tokens)


def bert_loss(output, batch: Batch, *, tp: Group, vocab_size: int, label_smoothing: float = 0.0,
              per_token: bool = False) -> Loss:
    """`gpt_loss` of the masked tokens, plus the mean cross entropy of the order of the segments where there is one.

    output: a `BertOutput`. Samples whose `sentence_order` is -1 do not count in the second. `per_token`: the mean over the
    samples is weighed by the micro-batch's masked tokens, so that the step's division by all of them gives a mean again.
    """
    words = gpt_loss(output.logits, batch, tp=tp, vocab_size=vocab_size, label_smoothing=label_smoothing, per_token=per_token)
    if output.order is None:
        return words
    total = F.cross_entropy(output.order.float(), batch.sentence_order, ignore_index=-1, reduction="sum")
    count = (batch.sentence_order >= 0).sum().float()
    mean = total / count.clamp(min=1.0)
    objective = words.objective + (mean * words.tokens if per_token else mean)
    return Loss(objective, words.total, words.tokens, ((total.detach(), count),))
