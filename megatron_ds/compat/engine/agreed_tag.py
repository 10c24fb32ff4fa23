"""The tag of a checkpoint, which all ranks must save under: "checkpoint.tag_validation" of the JSON.

"Fail", or no such key   ranks that give different tags are an error
"Warn", "Ignore"         the tag of rank 0 is that of all; "Warn" logs the tags
"""

import logging
from collections.abc import Mapping
from typing import Any

from ...errors import ArgumentError, ConfigError
from ...mpu.collectives import all_gather_object
from ...mpu.group import Group

KEY = "tag_validation"
logger = logging.getLogger(__name__)


def tag_rule(name: str, block: Mapping[str, Any]) -> str:
    """ "fail", "warn" or "ignore", of a JSON. Raises ConfigError for another value. name: for messages"""
    checkpoint = block.get("checkpoint")
    value = checkpoint.get(KEY) if isinstance(checkpoint, Mapping) else None
    rule = "fail" if value is None else str(value).lower()
    if rule not in ("fail", "warn", "ignore"):
        raise ConfigError(
            f'{name}: "checkpoint.{KEY}" is {value!r}. Write Ignore, Warn or Fail.'
        )
    return rule


def agreed_tag(tag: str | None, config: Mapping[str, Any], world: Group) -> str | None:
    """Return the tag under which all ranks save; None: that of the step. Collective over `world`.

    Raises ArgumentError on all ranks where their tags differ and the config asks for an error.
    """
    tags = all_gather_object(None if tag is None else str(tag), world)
    other = next((rank for rank, found in enumerate(tags) if found != tags[0]), None)
    if other is None:
        return tag
    rule = tag_rule("config", config)
    differ = (
        f"the ranks gave save_checkpoint different tags: {tags[0]} on rank {world.ranks[0]}, "
        f"{tags[other]} on rank {world.ranks[other]}"
    )
    if rule == "fail":
        error: Any = ArgumentError(
            f"{differ}. Each would hold a part of a checkpoint. Make the tag on one rank, and send it to "
            "the others."
        )
        error.on_all_ranks = True
        raise error
    if rule == "warn" and world.rank == 0:
        logger.warning("%s: all save under the first", differ)
    return tags[0]
