"""Learning from a frozen teacher: the declaration of the feature."""

from functools import partial
from typing import Any

from ...features import Feature, Later, Objective, rules_if
from .options import DistillationConfig

own = partial(Later, __package__)


def _is_on(config: Any) -> bool:
    return config.of(DistillationConfig).is_on


FEATURES = [
    Feature(
        "distillation",
        title="Distillation",
        options=DistillationConfig,
        rules=rules_if(_is_on, own(".rules:distillation")),
        objective=Objective(
            is_on=_is_on,
            data=own(".teacher_data:with_blank_teacher"),
            loss=own(".distilled_loss:distillation_loss"),
            start=own(".teacher:open_teacher"),
            plan=own(".teacher_plan:plan_teacher"),
        ),
    )
]
