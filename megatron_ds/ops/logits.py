"""What a rank contributes to the cross entropy of logits whose columns are split over ranks.

    kept = keep_logits(logits, labels, valid)
    facts = kept.facts(smoothed)              numbers of this rank; the caller combines those of all ranks
    kept.settle(lse)                          the log of the sum of exponentials over all ranks
    dlogits = kept.gradient_(dloss, on_label, on_all)

The gradient overwrites the logits: no buffer of their size is allocated.

Implementations of the two operations: torch's operations on some rows at a time; on GPUs kernels that read
the logits once each way. On a CPU `keep_logits` keeps probabilities in place of the logits.
"""

from collections.abc import Iterator

import torch

from .kept_probabilities import CPU_BLOCK, ProbabilitiesKept, row_blocks
from .kernel_table import VOCABULARY_SIZES, Operation, random_tensors

GPU_BLOCK = (
    2**24
)  # elements processed at once in torch's operations, to keep a GPU busy


@Operation
def cross_entropy_facts(
    logits: torch.Tensor, labels: torch.Tensor, valid: int, smoothed: bool
) -> torch.Tensor:
    """logits [n, columns], of which those from `valid` on are padding → fp32 [2, n], [3, n] if `smoothed`.

    labels  int64 [n], counted from this rank's first column; outside [0, valid) where another rank has it

    The results: the log of the sum of exponentials, -inf without valid columns; the label's logit, 0 where
    another rank has it; the sum of the logits.
    """
    elsewhere, column = _own_labels(labels, valid)
    facts = logits.new_zeros(3 if smoothed else 2, len(logits), dtype=_wide(logits))
    if valid == 0:
        facts[0].fill_(-torch.inf)
        return facts
    facts[1] = logits.gather(-1, column).masked_fill_(elsewhere, 0).squeeze(-1)
    for rows, part in row_parts(logits[:, :valid]):
        torch.logsumexp(part.to(facts.dtype), dim=-1, out=facts[0, rows])
    if smoothed:
        torch.sum(logits[:, :valid], dim=-1, dtype=facts.dtype, out=facts[2])
    return facts


@Operation
def cross_entropy_gradient_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    dloss: torch.Tensor,
    valid: int,
    on_label: float,
    on_all: float,
) -> torch.Tensor:
    """Overwrites the logits by (exp(logit - lse) - on_all - [label] on_label) dloss, 0 in padding.

    lse, dloss fp32 [n]: the log of the sum of exponentials over all ranks; the gradient of the loss. Other
    arguments: as of `cross_entropy_facts`. Returns the logits.
    """
    elsewhere, column = _own_labels(labels, valid)
    lse = lse.unsqueeze(-1)
    dloss = dloss.unsqueeze(-1)
    at_label = torch.where(elsewhere, 0.0, -on_label).to(lse.dtype)
    for rows, part in row_parts(logits):
        wide = part.to(_wide(part))  # in fp32 itself
        wide.sub_(lse[rows]).exp_()
        if on_all:
            wide.sub_(on_all)
        wide[:, valid:] = 0
        if valid:
            wide.scatter_add_(-1, column[rows], at_label[rows])
        wide.mul_(dloss[rows])
        if wide is not part:
            part.copy_(wide)
    return logits


cross_entropy_facts.benchmark_sizes = cross_entropy_gradient_.benchmark_sizes = (
    VOCABULARY_SIZES
)


@cross_entropy_facts.example
def _facts_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    (logits,) = random_tensors(dtype, device, (rows, width))
    return logits.detach(), _labels(rows, width, device), width - 1, True


@cross_entropy_gradient_.example
def _gradient_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    logits, dloss = (
        t.detach() for t in random_tensors(dtype, device, (rows, width), (rows,))
    )
    lse = logits[:, : width - 1].float().logsumexp(-1)
    return (
        logits,
        _labels(rows, width, device),
        lse,
        dloss.float(),
        width - 1,
        0.9,
        0.1 / width,
    )


def _labels(rows: int, width: int, device: torch.device) -> torch.Tensor:
    """Some of them on other ranks."""
    return torch.arange(rows, device=device) * 5 % (width + 2) - 1


class LogitsKept:
    """Logits between forward and backward, with 12 bytes a row. Arguments: as of `cross_entropy_facts`."""

    def __init__(self, logits: torch.Tensor, labels: torch.Tensor, valid: int):
        self.logits = logits
        self.labels = labels
        self.valid = valid

    def facts(self, smoothed: bool) -> torch.Tensor:
        """`cross_entropy_facts`, once."""
        return cross_entropy_facts(self.logits, self.labels, self.valid, smoothed)

    def settle(self, lse: torch.Tensor) -> None:
        """lse fp32 [n]: the log of the sum of exponentials over all ranks."""
        self.lse = lse

    def gradient_(
        self, dloss: torch.Tensor, on_label: float, on_all: float
    ) -> torch.Tensor:
        """`cross_entropy_gradient_`, where the logits were, once. dloss fp32 [n]."""
        return cross_entropy_gradient_(
            self.logits, self.labels, self.lse, dloss, self.valid, on_label, on_all
        )


def keep_logits(
    logits: torch.Tensor, labels: torch.Tensor, valid: int
) -> LogitsKept | ProbabilitiesKept:
    """Return what is kept of logits from forward to backward. Arguments: as of `cross_entropy_facts`."""
    return (ProbabilitiesKept if logits.device.type == "cpu" else LogitsKept)(
        logits, labels, valid
    )


def _own_labels(labels: torch.Tensor, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(where another rank has the label, the label's column, 0 there), both [n, 1]."""
    column = labels.unsqueeze(-1)
    elsewhere = (column < 0) | (column >= valid)
    return elsewhere, column.masked_fill(elsewhere, 0)


def _wide(t: torch.Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def row_parts(logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields (rows, their logits), as many as are processed at once."""
    for rows in row_blocks(
        logits, CPU_BLOCK if logits.device.type == "cpu" else GPU_BLOCK
    ):
        yield rows, logits[rows]
