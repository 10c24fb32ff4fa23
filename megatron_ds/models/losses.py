"""The training objective of a language model: masked mean of the cross entropy of each token."""

from dataclasses import dataclass

import torch

from ..data.batch import Batch
from ..mpu.group import Group
from ..tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


@dataclass(frozen=True)
class Loss:
    """What the last stage makes of one micro-batch. All fp32 scalars on the device; nothing waits for it.

    objective  what backward starts from
    total      sum of the token losses that count, detached; for the log
    tokens     how many tokens count
    """

    objective: torch.Tensor
    total: torch.Tensor
    tokens: torch.Tensor


def gpt_loss(logits: torch.Tensor, batch: Batch, *, tp: Group, vocab_size: int, label_smoothing: float = 0.0,
             per_token: bool = False) -> Loss:
    """Loss of logits [s, b, Vp / t] against `batch.labels` [b, s], where `batch.loss_mask` is not 0.

    The objective is the mean over the counted tokens of this micro-batch (0 when none counts), so every micro-batch weighs
    the same, as in Megatron. `per_token`: it is their sum instead, and the gradient is divided by the tokens of the whole
    global batch at the step, so every token weighs the same. Smoothing is for training; evaluation measures without.
    The logits may be overwritten. Collective over tp.
    """
    smoothing = label_smoothing if batch.training else 0.0
    losses = vocab_parallel_cross_entropy(logits, batch.labels.t(), tp, vocab_size, smoothing)      # [s, b]
    mask = batch.loss_mask.t().to(losses.dtype)
    total, tokens = (losses * mask).sum(), mask.sum()
    return Loss(total if per_token else total / tokens.clamp(min=1.0), total.detach(), tokens)
