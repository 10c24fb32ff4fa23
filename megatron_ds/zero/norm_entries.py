"""The parameters whose optimizers ask for norms."""

from collections.abc import Sequence

from torch import nn

from ..mpu.managed_parameter import spec_of
from ..optim import group_of
from .data_groups import DataGroups
from .parameter_norms import NormEntry
from .set_plan import SetPlan, is_tied
from .settings import ZeroSettings


def norm_entries(
    plans: Sequence[SetPlan],
    parameters: Sequence[nn.Parameter],
    settings: ZeroSettings,
    groups: DataGroups,
) -> list[NormEntry]:
    """Return the parameters whose optimizers ask for norms. parameters: to which the indices in the plans refer."""
    trained = []
    for plan in plans:
        if not plan.frozen:
            trained += [(plan, parameters[i]) for i in plan.members]
    return [
        NormEntry(
            spec_of(p),
            plan.reduced_over,
            plan.policy.optimizer is not None,
            is_tied(p, groups),
        )
        for plan, p in trained
        if group_of(spec_of(p), settings.param_groups).traits.needs_norms
    ]
