"""`EvaluationTasks`: what --eval-tasks asks for during training, made by an extension."""

from collections.abc import Mapping
from typing import Any, Protocol

from ..data.tokenizers import Tokenizer
from ..errors import ConfigError
from ..features import Provided, missing_wings
from .build import Replica

EVALUATION_CHECK: Provided[Any] = Provided("evaluation check")
EVALUATION_TASKS: Provided[Any] = Provided("evaluation tasks")


class EvaluationTasks(Protocol):
    """Tasks that are loaded once and evaluated as often as asked."""

    def results(self) -> Mapping[str, Mapping[str, Any]]:
        """The metrics of each task, by name. Collective over the world."""


def check_evaluation_tasks() -> None:
    """Raises ConfigError where a package that evaluation needs is not installed."""
    check = EVALUATION_CHECK.find()
    if check is None:
        raise ConfigError(
            f"--eval-tasks needs megatron_ds.extensions.{missing_wings()}"
        )
    check()


def evaluation_tasks(engine: Replica, tokenizer: Tokenizer) -> EvaluationTasks | None:
    """The tasks of --eval-tasks; None without any. Collective over the world."""
    if not engine.config.train.eval_tasks:
        return None
    return EVALUATION_TASKS.find()(engine, tokenizer)
