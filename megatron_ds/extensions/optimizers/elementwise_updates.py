"""Lion's and Adagrad's update of flat fp32 tensors, whose one tensor of state has the weight's size.

Implementations: a pass over memory on CPUs; elsewhere torch's multi-tensor operations,
some ten launches for all rows of a parameter group. Every product and sum is rounded by itself, so the bits
do not depend on where tensors are cut.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ...ops.kernel_table import Operation, random_generator
from ...ops.update_rows import UpdateRow, fp32

AT_A_TIME = 1 << 26  # elements whose temporaries exist at once, about


@dataclass(frozen=True)
class LionStep:
    """The numbers of one update of all rows. divisor: of the gradients."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    divisor: float = 1.0


@dataclass(frozen=True)
class AdagradStep:
    """The numbers of one update of all rows. divisor: of the gradients."""

    lr: float
    eps: float
    weight_decay: float
    divisor: float = 1.0


# Lion ------------------------------------------------------------------------------------------------------
@Operation
@torch.no_grad()
def lion(grad: torch.Tensor, rows: Sequence[UpdateRow], how: LionStep) -> None:
    """Update the rows in place. grad: of the first row; its device chooses the implementation.

    Chen et al. 2023 (arXiv:2302.06675), algorithm 2; the state is the momentum. The sign of zero is zero: a
    row of an embedding that never has a gradient stays as it is.
    """
    beta1, beta2 = how.betas
    for ps, change, moments, part in _parts(rows, how.divisor):
        torch._foreach_sub_(change, moments)
        update = torch._foreach_mul(change, fp32(1 - beta1))
        torch._foreach_add_(update, moments)
        torch._foreach_sign_(update)
        torch._foreach_mul_(update, fp32(how.lr))
        torch._foreach_mul_(ps, fp32(1 - how.lr * how.weight_decay))
        torch._foreach_sub_(ps, update)
        torch._foreach_mul_(change, fp32(1 - beta2))
        torch._foreach_add_(moments, change)
        _write_low(part)


@lion.example
def _lion_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    made = _example_rows(rows, width, dtype, device)
    return made[0].grad, made, LionStep(0.1, (0.9, 0.99), 0.1, divisor=1.5)


# Adagrad ---------------------------------------------------------------------------------------------------
@Operation
@torch.no_grad()
def adagrad(grad: torch.Tensor, rows: Sequence[UpdateRow], how: AdagradStep) -> None:
    """Update the rows in place. grad: of the first row; its device chooses the implementation.

    Duchi et al. 2011 (JMLR 12, section 1.3, diagonal form), weight decay added to the gradient; the state is
    the sum of squares.
    """
    for ps, grads, sums, part in _parts(rows, how.divisor):
        torch._foreach_add_(grads, torch._foreach_mul(ps, fp32(how.weight_decay)))
        torch._foreach_add_(sums, torch._foreach_mul(grads, grads))
        divisors = roots(sums)
        torch._foreach_add_(divisors, fp32(how.eps))
        torch._foreach_div_(grads, divisors)
        torch._foreach_mul_(grads, fp32(how.lr))
        torch._foreach_sub_(ps, grads)
        _write_low(part)


@adagrad.example
def _adagrad_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    made = _example_rows(rows, width, dtype, device)
    return made[0].grad, made, AdagradStep(0.1, 1e-10, 0.1, divisor=1.5)


# Both ------------------------------------------------------------------------------------------------------
Part = tuple[
    list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[UpdateRow]
]


def _parts(rows: Sequence[UpdateRow], divisor: float) -> Iterator[Part]:
    """(weights, divided gradients, a copy, states, rows) of some rows at a time."""
    part: list[UpdateRow] = []
    for i, row in enumerate(rows):
        part.append(row)
        if i + 1 == len(rows) or sum(r.p.numel() for r in part) >= AT_A_TIME:
            grads = torch._foreach_mul(
                [r.grad.to(r.p.dtype) for r in part], inverse(divisor)
            )
            yield [r.p for r in part], list(grads), [r.state for r in part], part
            part = []


def roots(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the square roots, whose bits do not depend on where tensors are cut."""
    if values[0].device.type == "cpu":
        # In double: torch's root of a long fp32 tensor may be MKL's, which is not rounded to nearest.
        return [v.double().sqrt().to(v.dtype) for v in values]
    return list(torch._foreach_sqrt(values))


def inverse(divisor: float) -> float:
    """1 / divisor in fp32."""
    return fp32(1.0 / fp32(divisor))


def _write_low(rows: Sequence[UpdateRow]) -> None:
    low: list[torch.Tensor] = []
    wide: list[torch.Tensor] = []
    for row in rows:
        if row.low is not None:
            low.append(row.low)
            wide.append(row.p)
    if low:
        torch._foreach_copy_(low, wide)


def _example_rows(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> list[UpdateRow]:
    draw = random_generator(device, 3 * rows * width)
    is_wide = dtype == torch.float32
    made = []
    for n in (rows * width, width):
        p, grad, state = (
            torch.rand(n, generator=draw, device=draw.device).to(device)
            for _ in range(3)
        )
        row = UpdateRow(p, grad, state)
        if not is_wide:
            low = torch.zeros(n, dtype=dtype, device=device)
            row = row._replace(low=low)
        made.append(row)
    return made
