"""Rules of --plan-time."""

from collections.abc import Iterator

from ...config import RunConfig
from .options import PlanTimeConfig


def planned_time(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with --plan-time and --cluster."""
    wanted = config.of(PlanTimeConfig)
    if not wanted.plan_time:
        return
    if not config.plan.is_dry:
        yield "--plan-time adds seconds to a plan, and there is none: add --dry-run."
    if wanted.cluster is None:
        yield (
            "--plan-time needs devices and links: --cluster a100-80g, or the path of a file of YAML "
            "(megatron_ds/extensions/plan_time/cluster.py describes it)."
        )
