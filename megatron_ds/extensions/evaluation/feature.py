"""Tasks and benchmarks: the declaration of the feature."""

from functools import partial
from typing import Any

from ...features import Feature, Later
from .options import TaskOptions

own = partial(Later, __package__)
TASKS_OF_RUN = own(".tasks_of_run:TasksOfRun")
CHECK_HARNESS = own(".harness:check_harness")


def tasks_of_run(config: Any) -> Any | None:
    """Return the observer of --eval-tasks."""
    return TASKS_OF_RUN() if config.train.eval_tasks else None


def check_outputs(config: Any, mesh: Any) -> None:
    """Raises ConfigError on rank 0 where --eval-tasks needs a package that is not installed."""
    if mesh.rank == 0 and config.train.eval_tasks:
        CHECK_HARNESS()


FEATURES = [
    Feature(
        "evaluation",
        extends={"train": TaskOptions},
        outputs=check_outputs,
        observers=[tasks_of_run],
    )
]
