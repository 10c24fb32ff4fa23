"""The JSON's "log_level": the level of the lines of this package, as in DeepSpeed."""

import logging
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError

KEY = "log_level"
LEVELS = ("debug", "info", "warning", "error", "critical")


def log_level_of(name: str, block: Mapping[str, Any]) -> str | None:
    """Return the level as the JSON spells it; None: programs set it. Raises ConfigError for another word.

    name: of the config, for messages
    """
    level = block.get(KEY)
    if level is not None and str(level).lower() not in LEVELS:
        raise ConfigError(
            f'{name}: "{KEY}" is {level!r}, which is no level of logging. Use '
            f"{', '.join(LEVELS[:-1])} or {LEVELS[-1]}."
        )
    return level


def set_log_level(level: str | None) -> None:
    """Set the level of the package's logger. None leaves it as it is."""
    if level is not None:
        logging.getLogger("megatron_ds").setLevel(level.upper())
