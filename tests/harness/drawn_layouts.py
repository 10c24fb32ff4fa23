"""Layouts that are drawn: each value on its own, until the rules of the configuration accept all of them."""

import random
from collections.abc import Sequence

from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from tests.harness.layout_comparison import parse_layout

MOST_RANKS = 8
RANKS = {"tp": (1, 2), "pp": (1, 2), "dp": (1, 2), "cp": (1, 2)}
PARTS = {
    "zero": (0, 1, 2, 3),
    "recompute": (None, "full", "selective"),
    "offload": (None, None, "cpu"),
    "logits": (1, 1, 3),
}
SCHEDULES = (None, "zb-h1", "zb-v")
COMM_TYPES = ("p2p", "all_gather", "a2a")


def drawn_layout(draw: random.Random, has_experts: bool) -> str:
    """Return a layout, legal or not."""
    sizes = {name: draw.choice(values) for name, values in RANKS.items()}
    found = dict(sizes) | {name: draw.choice(v) for name, v in PARTS.items()}
    if sizes["tp"] > 1:
        found["sp"] = draw.choice((0, 1))
    if sizes["pp"] > 1:
        found["schedule"] = draw.choice(SCHEDULES)
    if sizes["cp"] > 1:
        found["comm_type"] = draw.choice(COMM_TYPES)
    if has_experts and sizes["dp"] > 1:
        found["ep"] = draw.choice((1, 2))
    return ",".join(f"{name}={v}" for name, v in found.items() if v is not None)


def is_legal(job: Sequence[str], layout: str) -> bool:
    """Return whether a job can be trained in a layout of several ranks."""
    request = parse_layout(layout, mbs="1")
    if not 1 < request.world_size <= MOST_RANKS:
        return False
    try:
        parse([*job, *request.flags], world_size=request.world_size)
    except ConfigError:
        return False
    return True
