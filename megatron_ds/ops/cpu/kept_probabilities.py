"""Cross entropy of a rank's columns that replaces the logits by probabilities in forward, so that backward
computes no exponentials.
"""

import torch

# fp32 elements processed at once, in whole rows: as many as fit a CPU's cache.
CPU_BLOCK = 2**18
# fp16 has no exponents for unlikely tokens: probabilities are kept times the largest power of two that fits.
KEPT_TIMES = {torch.float16: 2.0**15}


class ProbabilitiesKept:
    """What `ops.logits.LogitsKept` is, with the same arguments.

    The arithmetic is fp32. In 16 bits the probabilities are kept, not their differences from the target; the
    label's probability is also kept in fp32, because its difference is small where the label is predicted
    well.
    """

    def __init__(self, logits: torch.Tensor, labels: torch.Tensor, valid: int):
        column = labels.unsqueeze(-1)                                            # [n, 1]
        self.elsewhere = (column < 0) | (column >= valid)
        self.column = column.masked_fill(self.elsewhere, 0)
        self.p, self.valid = logits, valid

    def facts(self, smoothed: bool) -> torch.Tensor:
        """`ops.logits.cross_entropy_facts`. Replaces the logits by this rank's softmax, times KEPT_TIMES."""
        p, valid = self.p, self.valid
        p[:, valid:] = -torch.inf
        label_logit = p.gather(-1, self.column).float().masked_fill_(self.elsewhere, 0)
        sums = [p[:, :valid].sum(-1, keepdim=True, dtype=torch.float32)] if smoothed else []
        self.label_p, self.own_lse = _softmax_(p, self.column, valid)
        return torch.stack([self.own_lse, label_logit, *sums]).squeeze(-1)

    def settle(self, lse: torch.Tensor) -> None:
        """lse fp32 [n]: the log of the sum of exponentials over all ranks."""
        self.share = (self.own_lse - lse.unsqueeze(-1)).exp_()                   # [n, 1]
        self.own_lse = None

    def gradient_(self, dloss: torch.Tensor, on_label: float, on_all: float) -> torch.Tensor:
        """`ops.logits.cross_entropy_gradient_`, where the logits were. dloss fp32 [n]."""
        gradient, dloss = self.p, dloss.unsqueeze(-1)
        factor, everywhere = self.share * dloss / KEPT_TIMES.get(gradient.dtype, 1.0), dloss * on_all
        at_label = (self.label_p * self.share - on_label) * dloss - everywhere
        for rows in row_blocks(gradient, CPU_BLOCK):
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


def _softmax_(logits: torch.Tensor, column: torch.Tensor, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace the logits [n, columns] by the softmax over them, times KEPT_TIMES.

    Returns the probability of `column` and the log of the sum of exponentials, both fp32 [n, 1].
    """
    at_column, lse = (logits.new_empty(len(logits), 1, dtype=torch.float32) for _ in range(2))
    if valid == 0:
        logits.zero_()
        return at_column.zero_(), lse.fill_(-torch.inf)
    for rows in row_blocks(logits, CPU_BLOCK):
        part = logits[rows]
        largest = part.amax(-1, keepdim=True).float()
        in_place = part.dtype == torch.float32
        p = (torch.softmax(part, dim=-1, out=part) if in_place
             else torch.softmax(part, dim=-1, dtype=torch.float32))
        # p_max = exp(max - lse) is at least 1 / columns, so its logarithm is accurate.
        lse[rows] = largest - p.amax(-1, keepdim=True).log_()
        at_column[rows] = p.gather(-1, column[rows])
        if not in_place:
            times = KEPT_TIMES.get(part.dtype)
            part.copy_(p.mul_(times) if times else p)
    return at_column, lse


def row_blocks(t: torch.Tensor, elements: int) -> list[slice]:
    """Runs of rows of t [n, columns] with about so many elements, at least one row each."""
    rows = max(1, elements // max(1, t.shape[1]))
    return [slice(start, start + rows) for start in range(0, t.shape[0], rows)]
