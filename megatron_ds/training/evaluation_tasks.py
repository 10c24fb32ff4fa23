"""`EvaluationTasks`: what --eval-tasks asks for during training, made by an extension."""

from collections.abc import Mapping
from typing import Any, Protocol

from ..data.tokenizers import Tokenizer
from ..errors import ConfigError
from ..features import Tasks, features, missing_wings
from .build import Replica


class EvaluationTasks(Protocol):
    """Tasks that are loaded once and evaluated as often as asked."""

    def results(self) -> Mapping[str, Mapping[str, Any]]:
        """The metrics of each task, by name. Collective over the world."""


def check_evaluation_tasks() -> None:
    """Raises ConfigError where a package that evaluation needs is not installed."""
    _tasks().check()


def _tasks() -> Tasks:
    """Return what a feature evaluates. Raises ConfigError without such a feature."""
    for feature in features():
        if feature.tasks is not None:
            return feature.tasks
    raise ConfigError(f"--eval-tasks needs megatron_ds.extensions.{missing_wings()}")


def evaluation_tasks(engine: Replica, tokenizer: Tokenizer) -> EvaluationTasks | None:
    """The tasks of --eval-tasks; None without any. Collective over the world."""
    if not engine.config.train.eval_tasks:
        return None
    return _tasks().make(engine, tokenizer)
