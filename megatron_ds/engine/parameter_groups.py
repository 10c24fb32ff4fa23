"""Which parameters an engine's optimizer trains, in groups with numbers of their own: from `model_parameters`, as in torch.

    None                                         all parameters of the module
    parameters, or (name, parameter) pairs       these, in one group
    [{"params": […], "weight_decay": 0.0}, …]    groups; numbers that a group does not have are the JSON's

A parameter that is in no group is not trained: it requires no gradient from then on.
"""

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..errors import ConfigError
from .client_optimizer import strange
from .engine_optimizer import Group
from .module_values import Decays

logger = logging.getLogger(__name__)


def make_groups(module: nn.Module, model_parameters: Any, decay: Decays | None) -> list[Group]:
    """The groups for the JSON's optimizer. decay: where it says no, a group of its own has the weight decay 0.

    Raises ConfigError when a parameter is not the module's, or in two groups.
    """
    given = list(module.parameters() if model_parameters is None else model_parameters)
    groups = [dict(group) for group in given] if given and isinstance(given[0], dict) else [{"params": given}]
    for group in groups:
        listed = [group["params"]] if isinstance(group["params"], nn.Parameter) else group["params"]
        group["params"] = list(dict.fromkeys(p[1] if isinstance(p, tuple) else p for p in listed))
    everything = [p for group in groups for p in group["params"]]
    strange(module, everything, "model_parameters=")
    if len(set(everything)) < len(everything):
        names = {p: name for name, p in module.named_parameters()}
        twice = next(names[p] for i, p in enumerate(everything) if p in set(everything[:i]))
        raise ConfigError(f"{twice} is in two groups of model_parameters=: it would be updated twice. Put each parameter into "
                          "one group.")
    return groups if decay is None else _split(module, groups, decay)


def freeze_others(module: nn.Module, groups: Iterable[Group]) -> None:
    """Parameters in no group require no gradient from now on."""
    trained = {id(p) for group in groups for p in group["params"]}
    left = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in trained]
    for p in module.parameters():
        if id(p) not in trained:
            p.requires_grad_(False)
    if left and trained:
        logger.warning("%d parameters are in no group of the optimizer and are not trained (first: %s)", len(left), left[0])


def _split(module: nn.Module, groups: list[Group], decay: Decays) -> list[Group]:
    names = {p: name for name, p in module.named_parameters()}
    result = []
    for group in groups:
        decayed = [p for p in group["params"] if decay(names[p], p)]
        others = [p for p in group["params"] if p not in set(decayed)]
        result += [{**group, "params": decayed}] if decayed else []
        result += [{**group, "params": others, "weight_decay": 0.0}] if others else []
    return result
