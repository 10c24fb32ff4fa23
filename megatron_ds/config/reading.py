"""`Setting`: one value given by a source. `Reading`: all that one source gave, and all that is wrong with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from .run import Source


@dataclass(frozen=True)
class Setting:
    """`value` is of the option's type already, or a `PartOf`."""

    path: str
    value: Any
    source: Source


@dataclass(frozen=True)
class PartOf:
    """A value that is a part of another option's, known only when all sources are merged."""

    path: str
    part: float

    def __str__(self) -> str:
        return f"{self.part:g} × {self.path.split('.')[1]}"


@dataclass
class Reading:
    """What the command line or one file says; filled in while it is read, so that one mistake does not hide
    the others.

    unread          paths of the options that were given, but with a value or name that cannot be used
    is_complete     False for a file that could not be read at all: it might have given any option
    without_effect  what was accepted although there is nothing to do, as written → why
    """

    settings: list[Setting] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    is_complete: bool = True
    without_effect: dict[str, str] = field(default_factory=dict)

    def refuse(self, problem: object, path: str | None = None) -> None:
        """Note a problem, and the option whose value is therefore unknown."""
        self.problems.append(str(problem))
        if path is not None:
            self.unread.add(path)

    def settings_or_error(self) -> list[Setting]:
        """Raises one ConfigError with all problems."""
        reject(self.problems)
        return self.settings


class ConfigProblems(ConfigError):
    """A ConfigError that keeps its problems one by one."""

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        several = [f"{len(problems)} problems in the configuration:", *(f"  {i}. "
                                                                        f"{p}" for i,
                                                                        p in enumerate(problems, 1))]
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
