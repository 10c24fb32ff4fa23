"""Learning from a frozen teacher: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later, Objective
from .options import DistillationConfig

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "distillation",
        title="Distillation",
        options=DistillationConfig,
        rules=(own(".rules:distillation"),),
        objective=Objective(
            is_on=lambda config: config.of(DistillationConfig).is_on,
            data=own(".teacher_data:with_blank_teacher"),
            loss=own(".distilled_loss:distillation_loss"),
            start=own(".teacher:open_teacher"),
            plan=own(".teacher_plan:plan_teacher"),
        ),
    )
]
