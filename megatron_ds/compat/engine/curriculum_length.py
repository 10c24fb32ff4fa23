"""`CurriculumLength`: "curriculum_learning" of an engine's JSON, which gives the module a sequence length.

While it trains, an engine calls a module with the keyword `curriculum_seqlen`, the length of the current update,
and the module shortens its sequences. A module whose forward has neither this argument nor **kwargs is called
without it: its program shortens the sequences.

The length is a function of the number of updates, so a loaded checkpoint continues with the right one.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...config.options.option import shown
from ...errors import ConfigError
from ...features import Provided, missing_wings
from ...progress.kept_tokens import Difficulty

DIFFICULTY: Provided[Any] = Provided("difficulty")

BLOCK = "curriculum_learning"
ARGUMENT = "curriculum_seqlen"
KEYS = (
    "enabled",
    "curriculum_type",
    "min_difficulty",
    "max_difficulty",
    "schedule_type",
    "schedule_config",
)


@dataclass(frozen=True)
class CurriculumLength:
    """difficulty: the length as a function of the update, counted from 1; None: no length is passed"""

    difficulty: Difficulty | None = None

    def arguments(self, updates: int, is_training: bool) -> dict[str, int]:
        """Return the keywords that a forward gets. updates: before it."""
        if self.difficulty is None or not is_training:
            return {}
        return {ARGUMENT: self.difficulty.at(updates + 1)}


def curriculum_length(
    name: str, block: Mapping[str, Any], module: nn.Module
) -> CurriculumLength:
    """Return the length that a JSON asks for, where the module takes it. Raises ConfigError for a wrong block."""
    # Whether the block is there and enabled, and the module takes a length.
    found = block.get(BLOCK)
    if not isinstance(found, Mapping) or found.get("enabled") is not True:
        return CurriculumLength()
    if not takes_length(module):
        return CurriculumLength()
    # Its keys; the values are checked by the schedule.
    for key in found:
        if key not in KEYS:
            raise ConfigError(
                f'{name}: unknown key "{BLOCK}.{key}". The block has {", ".join(KEYS)}.'
            )
    kind = found.get("curriculum_type", "seqlen")
    if kind != "seqlen":
        raise ConfigError(
            f'{name}: "{BLOCK}.curriculum_type" is {shown(kind)}; it must be "seqlen".'
        )
    make_difficulty = DIFFICULTY.find()
    if make_difficulty is None:
        raise ConfigError(
            f'{name}: "{BLOCK}" is enabled, which this package does not have.{missing_wings()}'
        )
    return CurriculumLength(make_difficulty(found, f'{name}: "{BLOCK}"'))


def takes_length(module: nn.Module) -> bool:
    """Return whether the forward of a module, compiled or not, accepts `curriculum_seqlen`."""
    forward = getattr(module, "_orig_mod", module).forward
    parameters = inspect.signature(forward).parameters
    takes_any = any(
        each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()
    )
    return takes_any or ARGUMENT in parameters
