"""WarmupDecayLR without "warmup_max_lr": an engine's rate rises to DeepSpeed's default, whatever the optimizer's is."""

import logging
from collections.abc import Mapping
from typing import Any

KIND = "WarmupDecayLR"
KEY = "warmup_max_lr"
DEFAULT = 0.001
logger = logging.getLogger(__name__)


def with_decay_default(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block with the default written out, and a warning where the optimizer has another rate."""
    scheduler = block.get("scheduler")
    if not isinstance(scheduler, Mapping) or scheduler.get("type") != KIND:
        return dict(block)
    params = scheduler.get("params") or {}
    if not isinstance(params, Mapping) or KEY in params:
        return dict(block)
    optimizer = block.get("optimizer")
    own = optimizer.get("params") if isinstance(optimizer, Mapping) else None
    rate = own.get("lr") if isinstance(own, Mapping) else None
    if rate not in (None, "auto", DEFAULT):
        logger.warning(
            "%s without \"%s\" rises to %g, DeepSpeed's default, not to the optimizer's lr %s",
            KIND,
            KEY,
            DEFAULT,
            rate,
        )
    return {**block, "scheduler": {**scheduler, "params": {**params, KEY: DEFAULT}}}
