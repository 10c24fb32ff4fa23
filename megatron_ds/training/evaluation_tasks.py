"""`check_evaluation_tasks`: whether --eval-tasks can be had. An observer of the extension evaluates them."""

from typing import Any

from ..errors import ConfigError
from ..features import Provided, missing_wings

EVALUATION_CHECK: Provided[Any] = Provided("evaluation check")


def check_evaluation_tasks() -> None:
    """Raises ConfigError where a package that evaluation needs is not installed."""
    check = EVALUATION_CHECK.find()
    if check is None:
        raise ConfigError(
            f"--eval-tasks needs megatron_ds.extensions.{missing_wings()}"
        )
    check()
