"""Tasks and benchmarks: the declaration of the feature."""

from functools import partial
from typing import Any

from ...features import Feature, Later
from .options import TaskOptions

own = partial(Later, __package__)
HARNESS = own(".harness:check_outputs")
TASKS_OF_RUN = own(".tasks_of_run:TasksOfRun")


def _check(config: Any, mesh: Any) -> None:
    """Check that --eval-tasks can be evaluated."""
    if config.train.eval_tasks:
        HARNESS(config, mesh)


def tasks_of_run(config: Any) -> Any | None:
    """Return the observer of --eval-tasks."""
    return TASKS_OF_RUN() if config.train.eval_tasks else None


FEATURES = [
    Feature(
        "evaluation",
        extends={"train": TaskOptions},
        outputs=_check,
        observers=[tasks_of_run],
    )
]
