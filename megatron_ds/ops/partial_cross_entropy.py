"""What a rank contributes to the cross entropy of logits whose columns are split over ranks.

    partial = partial_cross_entropy(logits, labels, valid)
    facts = partial.facts(smoothed)           numbers of this rank; the caller combines those of all ranks
    partial.settle(lse)                       the log of the sum of exponentials over all ranks
    dlogits = partial.gradient_(dloss, on_label, on_all)

The logits are overwritten, in `facts` or in `gradient_`: no buffer of their size is allocated.

Implementations: in torch's operations `ProbabilitiesKept`, which replaces the logits by this rank's softmax,
some rows at a time; on GPUs `LogitsKept`, whose kernels read the logits once each way.
"""

from typing import Protocol

import torch

from .gpu import cross_entropy_kernels
from .gpu.gpu_kernel import BACKENDS
from .kernel_table import FLOATS, GPU, Operation

# fp32 elements processed at once, in whole rows: as many as fit a CPU's cache, and as keep a GPU busy.
CPU_BLOCK, GPU_BLOCK = 2**18, 2**24
# fp16 has no exponents for unlikely tokens: probabilities are kept times the largest power of two that fits.
KEPT_TIMES = {torch.float16: 2.0**15}


class PartialCrossEntropy(Protocol):
    """The cross entropy of rows of logits on the columns of one rank, from forward to backward."""

    def facts(self, smoothed: bool) -> torch.Tensor:
        """fp32 [2, n]: the log of the sum of exponentials, -inf without valid columns; the label's logit, 0
        where another rank holds it. [3, n] if `smoothed`: the sum of the logits."""

    def settle(self, lse: torch.Tensor) -> None:
        """lse fp32 [n]: the log of the sum of exponentials over all ranks. Without `facts`, if lse is known
        from an earlier forward."""

    def gradient_(self, dloss: torch.Tensor, on_label: float, on_all: float) -> torch.Tensor:
        """dloss (p - on_all - [label] on_label) [n, columns], where the logits were, once. dloss fp32 [n]."""


@Operation
def partial_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, valid: int) -> PartialCrossEntropy:
    """logits [n, columns], of which those from `valid` on are padding, with probability and gradient 0.

    labels  int64 [n], counted from this rank's first column; outside [0, valid) where another rank has it
    """
    return ProbabilitiesKept(logits, labels, valid)


@partial_cross_entropy.implementation(
    "cuda", devices=GPU, dtypes=FLOATS, fits=cross_entropy_kernels.fits,
    available=lambda: "" if "cuda" in BACKENDS else "kernels cannot be compiled here")
def _in_one_reading(logits: torch.Tensor, labels: torch.Tensor, valid: int) -> PartialCrossEntropy:
    return cross_entropy_kernels.LogitsKept(logits, labels, valid)


class ProbabilitiesKept:
    """`PartialCrossEntropy` in torch's operations. Arguments: as of `partial_cross_entropy`.

    The arithmetic is fp32. In 16 bits the probabilities are kept, not their differences from the target; the
    label's probability is also kept in fp32, because its difference is small where the label is predicted
    well.
    """

    def __init__(self, logits: torch.Tensor, labels: torch.Tensor, valid: int):
        column = labels.unsqueeze(-1)                                            # [n, 1]
        self.elsewhere = (column < 0) | (column >= valid)
        self.column = column.masked_fill(self.elsewhere, 0)
        self.p, self.valid = logits, valid
        self.own_lse: torch.Tensor | None = None

    def facts(self, smoothed: bool) -> torch.Tensor:
        """See `PartialCrossEntropy.facts`. Replaces the logits by probabilities."""
        p = self.p
        label_logit = p.gather(-1, self.column).float().masked_fill_(self.elsewhere, 0)
        sums = [p[:, :self.valid].sum(-1, keepdim=True, dtype=torch.float32)] if smoothed else []
        self._softmax()
        return torch.stack([self.own_lse, label_logit, *sums]).squeeze(-1)

    def settle(self, lse: torch.Tensor) -> None:
        """See `PartialCrossEntropy.settle`."""
        if self.own_lse is None:
            self._softmax()
        self.share = (self.own_lse - lse.unsqueeze(-1)).exp_()                   # [n, 1]
        self.own_lse = None

    def gradient_(self, dloss: torch.Tensor, on_label: float, on_all: float) -> torch.Tensor:
        """See `PartialCrossEntropy.gradient_`."""
        gradient, dloss = self.p, dloss.unsqueeze(-1)
        factor, everywhere = self.share * dloss / KEPT_TIMES.get(gradient.dtype, 1.0), dloss * on_all
        at_label = (self.label_p * self.share - on_label) * dloss - everywhere
        for rows in _blocks(gradient):
            part = gradient[rows]
            wide = part.float()                                                  # in fp32 itself
            wide.mul_(factor[rows])
            if on_all:
                wide[:, :self.valid].sub_(everywhere[rows])
            values = torch.where(self.elsewhere[rows], wide.gather(-1, self.column[rows]), at_label[rows])
            wide.scatter_(-1, self.column[rows], values)
            if wide is not part:
                part.copy_(wide)
        return gradient

    def _softmax(self) -> None:
        """Replace the logits by the softmax over this rank's columns, times KEPT_TIMES.

        Sets the probability of the label and the log of the sum of exponentials, both fp32 [n, 1].
        """
        logits, valid = self.p, self.valid
        logits[:, valid:] = -torch.inf
        at_column, lse = (logits.new_empty(len(logits), 1, dtype=torch.float32) for _ in range(2))
        self.label_p, self.own_lse = at_column, lse
        if valid == 0:
            logits.zero_()
            at_column.zero_()
            lse.fill_(-torch.inf)
            return
        for rows in _blocks(logits):
            part = logits[rows]
            largest = part.amax(-1, keepdim=True).float()
            in_place = part.dtype == torch.float32
            p = (torch.softmax(part, dim=-1, out=part) if in_place
                 else torch.softmax(part, dim=-1, dtype=torch.float32))
            # p_max = exp(max - lse) is at least 1 / columns, so its logarithm is accurate.
            lse[rows] = largest - p.amax(-1, keepdim=True).log_()
            at_column[rows] = p.gather(-1, self.column[rows])
            if not in_place:
                times = KEPT_TIMES.get(part.dtype)
                part.copy_(p.mul_(times) if times else p)


def _blocks(t: torch.Tensor) -> list[slice]:
    rows = max(1, (CPU_BLOCK if t.device.type == "cpu" else GPU_BLOCK) // t.shape[1])
    return [slice(start, start + rows) for start in range(0, t.shape[0], rows)]
