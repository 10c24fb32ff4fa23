"""Which state a ZeRO stage splits over the data-parallel ranks: one row of a table per stage.

Rajbhandari et al. 2020 (arXiv:1910.02054), section 5: P_os, P_os+g, P_os+g+p.
"""

from dataclasses import dataclass
from typing import Literal

Axis = Literal["dp", "inner"]      # all data-parallel ranks; or each run of them, of a given size (hierarchy.py)


@dataclass(frozen=True)
class ShardPolicy:
    """The axis over which a kind of state is split; None = every rank holds the whole."""

    optimizer: Axis | None
    gradient: Axis | None
    parameter: Axis | None


STAGES = {
    0: ShardPolicy(None, None, None),
    1: ShardPolicy("dp", None, None),
    2: ShardPolicy("dp", "dp", None),
    3: ShardPolicy("dp", "dp", "dp"),
}
HIERARCHICAL = ShardPolicy("dp", "dp", "inner")      # a stage 3 whose gathers stay inside a node


def policy_of(stage: int, inner_size: int = 1) -> ShardPolicy:
    """inner_size: data-parallel ranks of an inner group; 1: there are none."""
    return HIERARCHICAL if stage == 3 and inner_size > 1 else STAGES[stage]
