"""Cross entropy of a rank's columns that replaces the logits by probabilities in forward, so that backward
computes no exponentials.

Implementations of the two operations: compiled ones, which read and write each row once
(compiled_cross_entropy.py); torch's operations on some rows at a time.
"""

from collections.abc import Iterator

import torch

from .kernel_table import Operation, random_tensors
from .meta_tensors import has_memory
from .work import each_stands_for

# fp32 elements processed at once, in whole rows: as many as fit a CPU's cache.
CPU_BLOCK = 2**18
# fp16 has no exponents for unlikely tokens: probabilities are kept times the largest power of two that fits.
KEPT_TIMES = {torch.float16: 2.0**15}


@Operation
def probabilities_(
    logits: torch.Tensor, column: torch.Tensor, valid: int, times: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace the logits [n, columns] by `times` the softmax over the first `valid`; others by 0.

    column  int64 [n, 1] in [0, valid)

    Returns the probability of `column` and the log of the sum of exponentials, both fp32 [n, 1].
    """
    wide_dtype = torch.promote_types(logits.dtype, torch.float32)
    at_column, lse = (
        logits.new_empty(len(logits), 1, dtype=wide_dtype) for _ in range(2)
    )
    logits[:, valid:] = -torch.inf
    if valid == 0:
        logits.zero_()
        return at_column.zero_(), lse.fill_(-torch.inf)
    for rows in row_blocks(logits, CPU_BLOCK):
        part = logits[rows]
        largest = part.amax(-1, keepdim=True).to(wide_dtype)
        in_place = part.dtype == wide_dtype
        p = (
            torch.softmax(part, dim=-1, out=part)
            if in_place
            else torch.softmax(part, dim=-1, dtype=wide_dtype)
        )
        # p_max = exp(max - lse) is at least 1 / columns, so its logarithm is accurate.
        lse[rows] = largest - p.amax(-1, keepdim=True).log_()
        at_column[rows] = p.gather(-1, column[rows])
        if times != 1:
            p.mul_(times)
        if not in_place:
            part.copy_(p)
    return at_column, lse


@Operation
def probability_gradient_(
    p: torch.Tensor,
    column: torch.Tensor,
    elsewhere: torch.Tensor,
    factor: torch.Tensor,
    everywhere: torch.Tensor,
    at_label: torch.Tensor,
    valid: int,
) -> torch.Tensor:
    """p[:, :valid] = p[:, :valid] factor - everywhere, with `at_label` in `column`. Returns p.

    column, elsewhere  int64, bool [n, 1]: the label's column, not written where it is `elsewhere`
    factor, everywhere, at_label  fp32 [n, 1]
    """
    for rows in row_blocks(p, CPU_BLOCK):
        part = p[rows]
        wide = part.to(torch.promote_types(part.dtype, torch.float32))  # in fp32 itself
        wide[:, :valid].mul_(factor[rows]).sub_(everywhere[rows])
        values = torch.where(
            elsewhere[rows], wide.gather(-1, column[rows]), at_label[rows]
        )
        wide.scatter_(-1, column[rows], values)
        if wide is not part:
            part.copy_(wide)
    return p


probabilities_.benchmark_sizes = probability_gradient_.benchmark_sizes = (
    (2048, 50304),
)


@probabilities_.example
def _probabilities_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    (logits,) = random_tensors(dtype, device, (rows, width))
    column = torch.arange(rows, device=device).unsqueeze(-1) % (width - 1)
    return logits.detach(), column, width - 1, KEPT_TIMES.get(dtype, 1.0)


@probability_gradient_.example
def _gradient_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    p, *factors = (
        t.detach()
        for t in random_tensors(dtype, device, (rows, width), *[(rows, 1)] * 3)
    )
    column = torch.arange(rows, device=device).unsqueeze(-1) % (width - 1)
    return p, column, column % 3 == 1, *(t.float() for t in factors), width - 1


class ProbabilitiesKept:
    """What `ops.logits.LogitsKept` is, with the same arguments.

    The arithmetic is fp32. In 16 bits the probabilities are kept, not their differences from the target; the
    label's probability is also kept in fp32, because its difference is small where the label is predicted
    well.
    """

    def __init__(self, logits: torch.Tensor, labels: torch.Tensor, valid: int):
        column = labels.unsqueeze(-1)  # [n, 1]
        self.elsewhere = (column < 0) | (column >= valid)
        self.column = column.masked_fill(self.elsewhere, 0)
        self.p = logits
        self.valid = valid

    def facts(self, smoothed: bool) -> torch.Tensor:
        """`ops.logits.cross_entropy_facts`. Replaces the logits by this rank's softmax, times KEPT_TIMES."""
        p = self.p
        valid = self.valid
        label_logit = p.gather(-1, self.column).float().masked_fill_(self.elsewhere, 0)
        sums = (
            [p[:, :valid].sum(-1, keepdim=True, dtype=torch.float32)]
            if smoothed
            else []
        )
        self.label_p, self.own_lse = probabilities_(
            p, self.column, valid, KEPT_TIMES.get(p.dtype, 1.0)
        )
        return torch.stack([self.own_lse, label_logit, *sums]).squeeze(-1)

    def settle(self, lse: torch.Tensor) -> None:
        """lse fp32 [n]: the log of the sum of exponentials over all ranks."""
        self.share = (self.own_lse - lse.unsqueeze(-1)).exp_()  # [n, 1]
        self.own_lse = None

    def gradient_(
        self, dloss: torch.Tensor, on_label: float, on_all: float
    ) -> torch.Tensor:
        """`ops.logits.cross_entropy_gradient_`, where the logits were. dloss fp32 [n]."""
        dloss = dloss.unsqueeze(-1)
        factor = self.share * dloss / KEPT_TIMES.get(self.p.dtype, 1.0)
        everywhere = dloss * on_all
        at_label = (self.label_p * self.share - on_label) * dloss - everywhere
        return probability_gradient_(
            self.p,
            self.column,
            self.elsewhere,
            factor,
            everywhere,
            at_label,
            self.valid,
        )


def row_blocks(t: torch.Tensor, elements: int) -> Iterator[slice]:
    """Yield runs of rows of t [n, columns] with about so many elements, at least one row each. Without memory the
    first run stands for all, as no other needs more: plans of long sequences would have thousands."""
    rows = max(1, elements // max(1, t.shape[1]))
    total = t.shape[0]
    if has_memory(t) or total <= rows:
        yield from (slice(start, start + rows) for start in range(0, total, rows))
        return
    with each_stands_for(total / rows):
        yield slice(0, rows)
