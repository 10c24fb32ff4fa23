"""`RowOptimizer`: torch's interface to operations that update many flat tensors at once (`ops/`)."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..host.large_pages import huge_page_zeros
from .part_optimizer import PartOptimizer, gradient_of


class RowOptimizer(PartOptimizer):
    """An optimizer of contiguous fp32 parameters whose update is an operation on rows of tensors.

    A subclass has the names of its state, `update` and `row`. A step makes few launches for each parameter
    group, and the host does not wait for a GPU.

    grad_scale            None, a number, or an fp32 scalar on the parameters' device, where `update` takes
                          one: each gradient is divided by it while it is read, and not written
    parameter.low         optional, a 16-bit tensor of the same length: receives the updated value, rounded
    parameter.low_grad    optional, a 16-bit tensor of the same length, used instead of `grad`
    """

    # Torch's name for support of `grad_scale` and `found_inf`.
    _step_supports_amp_scaling = True
    takes_numbers = True  # as grad_scale
    writes_low = True
    reads_low_grad = True

    def __init__(self, params: Iterable, **defaults: Any):
        super().__init__(params, defaults)
        self.grad_scale: float | torch.Tensor | None = None
        self.found_inf: torch.Tensor | None = None

    def make_step(self) -> None:
        divisor = 1.0 if self.grad_scale is None else self.grad_scale
        for group in self.param_groups:
            for rows in self._rows_by_device(group["params"]).values():
                self.update(rows, group, divisor)

    def update(
        self, rows: Sequence, group: dict[str, Any], divisor: float | torch.Tensor
    ) -> None:
        """Update rows of one device with the numbers of their parameter group."""
        raise NotImplementedError

    def row(self, p: torch.Tensor, grad: torch.Tensor) -> Any:
        """Return the row of a parameter, for `update`."""
        raise NotImplementedError

    def zeros(self, p: torch.Tensor) -> torch.Tensor:
        """Return the first value of a state of `p`, on huge pages: a step passes through all of it once."""
        return huge_page_zeros(p.numel(), device=p.device).view(p.shape)

    def _rows_by_device(
        self, parameters: Iterable[torch.Tensor]
    ) -> dict[torch.device, list]:
        rows = defaultdict(list)
        for p in parameters:
            if (grad := gradient_of(p)) is not None:
                rows[p.device].append(self.row(p, grad))
        return rows
