"""The ranks of an engine compare their settings, versions and optimizers before they build anything."""

import hashlib
from collections.abc import Sequence
from typing import Any

from ...config import RunConfig
from ...config.compared_values import compared_values
from ...config.options.option import Option
from ...mpu.agreement import require_agreement
from ..deepspeed.external_groups import DataParallelWorld
from .json_settings import KEYS
from .module_specs import is_expert

PROBLEM = "the ranks gave initialize different settings"
ADVICE = (
    "Such an engine trains neither of the two. Give the same config, arguments and installation on all "
    "ranks."
)
COMPARED = (int, float, str, bool, type(None))  # types of an optimizer's numbers


def require_same_settings(settings: RunConfig, world: DataParallelWorld) -> None:
    """Raises ConfigError on all ranks unless settings and versions are equal. Collective over all ranks."""
    require_agreement(
        world.world, lambda: compared_values(settings, _key), PROBLEM, ADVICE
    )


def require_same_groups(
    groups: Sequence[dict[str, Any]], world: DataParallelWorld
) -> None:
    """Raises ConfigError unless data-parallel ranks have equal parameter groups. Collective over them.

    Ranks of tensor parallelism may have different ones.
    """
    require_agreement(world.data, lambda: _numbers_of(groups), PROBLEM, ADVICE)


def _key(option: Option) -> str:
    return option.json or KEYS.get(option.path) or option.path


def _numbers_of(groups: Sequence[dict[str, Any]]) -> dict[str, tuple[Any, str]]:
    """Return the numbers of each parameter group: learning rate, weight decay, …"""
    found: dict[str, tuple[Any, str]] = {
        "the number of parameter groups": (len(groups), "")
    }
    for at, group in enumerate(groups):
        for name, value in group.items():
            if name == "params":
                found[f"parameter group {at}"] = (_members(value), "")
            elif isinstance(value, COMPARED) or _is_plain_tuple(value):
                found[f"{name} of parameter group {at}"] = (value, "")
    return found


def _members(parameters: Sequence[Any]) -> str:
    """Return the number of parameters and a hash of their names, without experts, which ranks may divide."""
    names = [p.spec.name for p in parameters if not is_expert(p)]
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
    return f"{len(names)} parameters, hash of names {digest[:12]}"


def _is_plain_tuple(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(
        isinstance(item, COMPARED) for item in value
    )
