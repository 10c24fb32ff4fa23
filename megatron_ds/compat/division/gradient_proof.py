"""The comparison of gradients of a divided model with those of the whole one, on the small inputs of the model.

A parameter that stays whole on every rank has one of two gradients there:

    the gradient        its input and output are whole: embeddings, norms between layers
    a part of it        it is applied to the heads of the rank: a norm of queries. The sum over ranks is the gradient

Plans and names do not always contain which, so it is measured. A model with a gradient that is neither is refused.
The pieces of cut parameters follow: what comes into a layer is compared by split_proof.py, and what comes back to it
by the gradients of the parameters below it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from ...errors import ConfigError
from ...mpu.collectives import all_gather_object, all_reduce_
from ...mpu.group import Group
from .split_layers import is_cut, mark_partial
from .split_plan import PARTIAL, ROW, SLICED, SUMMED, Plan
from .split_proof import ADVICE, small_inputs

# Largest difference by rounding, as a part of the norm of the gradient.
BOUNDS = {torch.float32: 1e-3, torch.float16: 0.2, torch.bfloat16: 0.2}
# Below this part of the largest norm of a gradient there is nothing but rounding.
NOTHING = 1e-5
SEED = 5

Gradients = Mapping[str, torch.Tensor]


class _Distance(NamedTuple):
    """How far the gradient of one rank, and the sum over ranks, are from that of the whole model."""

    alone: float
    summed: float


def gradients_of(model: nn.Module, plan: Plan) -> Gradients | None:
    """Return the gradients of parameters that the plan leaves whole, on the CPU; None without dummy inputs.

    They are those of a weighted sum of the model's first result, with weights of a fixed seed. Parameters that the
    small inputs do not use are left out.
    """
    inputs = small_inputs(model)
    if inputs is None:
        return None
    chosen = {
        name: p
        for name, p in model.named_parameters()
        if _stays_whole(name, plan) and not is_cut(p) and p.is_floating_point()
    }
    every = [p for p in model.parameters() if p.is_floating_point()]
    trained = [p.requires_grad for p in every]
    # Frozen parameters may be trained later. All of them, before and after the division: kernels of attention for a
    # mask with a gradient are others, and differ in rows that are masked as a whole.
    for p in every:
        p.requires_grad_(True)
    try:
        with torch.enable_grad():
            result = model(**inputs)[0].float()
            found = torch.autograd.grad(
                (result * _weights_like(result)).sum(),
                list(chosen.values()),
                allow_unused=True,
            )
    finally:
        for p, is_trained in zip(every, trained):
            p.requires_grad_(is_trained)
    return {
        name: gradient.float().cpu()
        for name, gradient in zip(chosen, found)
        if gradient is not None
    }


def _stays_whole(name: str, plan: Plan) -> bool:
    owner, _, last = name.rpartition(".")
    style = plan.get(owner)
    is_bias_of_sum = last == "bias" and style in (ROW, SLICED)
    return name not in plan and (style in (None, PARTIAL, SUMMED) or is_bias_of_sum)


def _weights_like(result: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    weights = torch.randn(result.shape, generator=generator)
    return weights.to(result.device) / result.numel() ** 0.5


def mark_partial_gradients(
    model: nn.Module, whole: Gradients, plan: Plan, group: Group
) -> None:
    """Mark parameters whose gradients are partial sums over `group`. Collective.

    whole  the gradients before the model was divided
    Raises ConfigError, on all ranks, for a gradient that neither a rank has nor the sum over ranks is.
    """
    # What each rank finds; ranks decide by the largest distance.
    found = gradients_of(model, plan) or {}
    distances = {
        name: _distance(gradient, found.get(name), model, group)
        for name, gradient in whole.items()
        if not is_cut(model.get_parameter(name))
    }
    of_ranks = all_gather_object(distances, group)
    floor = NOTHING * max((float(g.norm()) for g in whole.values()), default=0.0)
    bound = BOUNDS[next(model.parameters()).dtype]
    for name in distances:
        most = max(float(whole[name].norm()), floor, 1e-30)
        alone = max(theirs[name].alone for theirs in of_ranks) / most
        summed = max(theirs[name].summed for theirs in of_ranks) / most
        _decide(model, name, _Distance(alone, summed), bound)


def _distance(
    whole: torch.Tensor, found: torch.Tensor | None, model: nn.Module, group: Group
) -> _Distance:
    """Collective. A rank without a gradient has one of zeros."""
    here = torch.zeros_like(whole) if found is None else found
    total = here.to(next(model.parameters()).device, copy=True)
    all_reduce_(total, group)
    alone = float((here - whole).norm())
    return _Distance(alone, float((total.cpu() - whole).norm()))


def _decide(model: nn.Module, name: str, distance: _Distance, bound: float) -> None:
    """Mark one parameter by its distances, as parts of its norm; without a gradient, the plan's mark stays."""
    is_whole = distance.alone <= bound
    is_sum = distance.summed <= bound
    if is_whole and is_sum:
        return
    if not is_whole and not is_sum:
        raise ConfigError(
            f"the gradient of {name} in {type(model).__name__} differs from that of the whole model after its layers "
            f"were divided over tensor-parallel ranks: by {distance.alone:.2g} of its norm on a rank, and by "
            f"{distance.summed:.2g} in the sum over ranks; rounding explains {bound:g}. {ADVICE}"
        )
    mark_partial(model.get_parameter(name), is_sum)
