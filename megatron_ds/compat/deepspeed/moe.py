"""`deepspeed.moe.utils`: parameter groups of modules with experts. An engine recognizes parameters of experts
by their attribute `allreduce`, so groups need not separate them.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .moe_layer import MoE

Groups = dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """(whether the module has layers `MoE`, the number of experts of the first)"""
    first = next((layer for layer in m.modules() if isinstance(layer, MoE)), None)
    return first is not None, 0 if first is None else first.num_experts


def is_moe_param(param: torch.Tensor) -> bool:
    """Return whether a parameter is one of experts that differ between data-parallel ranks."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Return whether a parameter group is marked as one of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(parameters that all data-parallel ranks share, parameters of experts)"""
    given = list(params)
    return [p for p in given if not is_moe_param(p)], [
        p for p in given if is_moe_param(p)
    ]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[nn.Parameter],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients of both."""
    shared, experts = split_params_into_shared_and_expert_params(group)
    return _gradients(shared), _gradients(experts)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [grad for p in parameters if (grad := p.grad) is not None]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Groups, max_group_size: int | None = None
) -> list[dict[str, Any]]:
    """Return the parameter groups, with those of experts apart and marked `moe`. max_group_size has no effect.

    Not needed for an engine of this package, which takes groups with experts and others together.
    """
    given = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    shared = []
    experts = []
    for group in given:
        parts = split_params_into_shared_and_expert_params(group["params"])
        shared.append({**group, "params": parts[0]})
        names = sorted({getattr(p, "group_name", "experts") for p in parts[1]})
        experts += [
            {
                **group,
                "params": [
                    p for p in parts[1] if getattr(p, "group_name", "experts") == name
                ],
                "name": name,
                "moe": True,
            }
            for name in names
        ]
    return shared + experts


def configure_moe_param_groups(model_parameters: Iterable[Any]) -> list[Any]:
    """`model_parameters` as a list: experts need no groups of their own."""
    return list(model_parameters)
