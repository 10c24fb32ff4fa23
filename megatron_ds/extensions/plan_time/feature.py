"""Seconds of a planned step: the declaration of the feature."""

from functools import partial

from ...commands import Command
from ...features import Feature, Later
from .options import PlanTimeConfig

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "plan_time",
        title="Planned time",
        options=PlanTimeConfig,
        is_on=lambda config: config.of(PlanTimeConfig).plan_time,
        rules=(own(".rules:planned_time"),),
        planned=own(".time_text:TimeText"),
        commands={
            "search": Command(
                "megatron_ds.extensions.plan_time.search_layouts",
                "find the fastest layouts of a training, by planned seconds",
            )
        },
    )
]
