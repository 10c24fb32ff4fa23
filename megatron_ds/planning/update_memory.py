"""Bytes that an update of the weights needs for a moment, where optimizers work on whole matrices.

The optimizers' own code runs once on tensors without memory, among simulated peers, with the leaves that a
rank of the layout has: parts of updates that travel, matrices that are whole at their owner, and what the
iterations need. Elementwise optimizers update in place and are not run.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..mpu.managed_parameter import spec_of
from ..optim import group_of
from ..zero.data_groups import DataGroups
from ..zero.set_plan import SetPlan
from ..zero.settings import ZeroSettings
from ..zero.shard_optimizer import Leaf, ShardOptimizer, make_leaf
from ..zero.whole_matrices import whole_matrices
from .fake_stages import LiveBytes, without_memory

# of the planned update, which leaves matrices unchanged
LR = 1.0
DECAY = 0.1
DIVISOR = 2.0


def bytes_of_update(
    plans: Sequence[SetPlan],
    parameters: Sequence[nn.Parameter],
    settings: ZeroSettings,
    groups: DataGroups,
    device: str,
) -> int:
    """Return the most bytes that are alive during an update besides the state; 0 without optimizers of matrices.

    parameters: to which the indices in the plans refer. device: planned, "cpu" or "cuda"
    """
    chosen = [group for group in settings.param_groups if group.traits.needs_matrices]
    if not chosen:
        return 0
    with without_memory(device) as where:
        matrices = whole_matrices(
            plans, parameters, settings.param_groups, groups, where
        )
        leaves = list(_leaves(plans, parameters, settings, groups, where))
        optimizer = ShardOptimizer(chosen, leaves, matrices=matrices)
        with LiveBytes(peak=True) as live:
            optimizer.step(LR, DECAY, DIVISOR)
    return live.peak


def _leaves(
    plans: Sequence[SetPlan],
    parameters: Sequence[nn.Parameter],
    settings: ZeroSettings,
    groups: DataGroups,
    device: torch.device,
) -> Iterator[Leaf]:
    """Return what this rank updates of the parameters of such an optimizer."""
    for plan in plans:
        rank = groups.ranks_of(plan.reduced_over).shard
        pieces = (
            plan.layout.slot_intersections(rank)
            if plan.policy.optimizer
            else plan.layout.whole_slots()
        )
        for piece in () if plan.frozen else pieces:
            p = parameters[plan.members[piece.slot]]
            if group_of(spec_of(p), settings.param_groups).traits.needs_matrices:
                master = torch.zeros(piece.padded_numel, device=device)
                grad = torch.zeros(
                    piece.padded_numel, dtype=settings.grad_dtype, device=device
                )
                yield make_leaf(spec_of(p), piece, master, grad)
