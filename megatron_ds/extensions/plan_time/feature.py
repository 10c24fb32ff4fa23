"""Seconds of a planned step: the declaration of the feature."""

from functools import partial

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
    )
]
