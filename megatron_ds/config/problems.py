"""Everything that is wrong, at once: problems are collected as lines and raised as one `ConfigError`."""

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ConfigError


class ConfigProblems(ConfigError):
    """A ConfigError that keeps its problems one by one."""

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        several = [f"{len(problems)} problems in the configuration:", *(f"  {i}. {p}" for i, p in enumerate(problems, 1))]
        super().__init__(problems[0] if len(problems) == 1 else "\n".join(several))

    def __reduce__(self):                    # it is pickled as its problems, not as the text made of them
        return ConfigProblems, (self.problems,)


def reject(problems: Sequence[str]) -> None:
    """Raise if there is any problem."""
    if problems:
        raise ConfigProblems(list(dict.fromkeys(problems)))


def attempt(problems: list[str], function: Callable, *arguments: Any) -> Any:
    """`function(*arguments)`, or None after appending the problems that it raised."""
    try:
        return function(*arguments)
    except ConfigProblems as error:
        problems += error.problems
    except ConfigError as error:
        problems.append(str(error))
    return None
