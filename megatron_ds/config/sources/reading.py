"""What reading a source of options yields: `Setting`s, and problems, raised together as one error."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError
from ..run import Source


@dataclass(frozen=True)
class Setting:
    """A value that a source gives to an option. value: already of the option's type, or `Deferred`."""

    path: str
    value: Any
    source: Source


class Deferred:
    """A value that follows from other options, which are known when all sources are merged."""

    def of(self, config: Any) -> Any:
        """Return the value in a RunConfig with all other settings; None to leave the option as it is."""


@dataclass(frozen=True)
class PartOf(Deferred):
    """A fraction of the value of another option."""

    path: str
    part: float

    def of(self, config: Any) -> float | None:
        """Return the fraction; None without the other value, which `missing` reports."""
        whole = config.get(self.path)
        return None if whole is None else whole * self.part

    def __str__(self) -> str:
        return f"{self.part:g} × {self.path.split('.')[1]}"


def is_deferred(setting: Setting) -> bool:
    """Return whether the value follows from other options."""
    return isinstance(setting.value, Deferred)


@dataclass
class SourceReading:
    """The settings and problems of the command line or of one file. Reading continues after a problem.

    unread          paths of options that were given with a value or a name that cannot be used
    is_complete     False for a file that could not be read at all: it might have given any option
    without_effect  flag or key that was accepted although it changes nothing, as written → the reason
    """

    settings: list[Setting] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    is_complete: bool = True
    without_effect: dict[str, str] = field(default_factory=dict)

    def refuse(self, problem: object, path: str | None = None) -> None:
        """Add a problem. path: the option whose value is unknown because of it."""
        self.problems.append(str(problem))
        if path is not None:
            self.unread.add(path)

    def settings_or_error(self) -> list[Setting]:
        """Return the settings. Raises one ConfigError with all problems, if there are any."""
        reject(self.problems)
        return self.settings


class ConfigProblems(ConfigError):
    """A ConfigError with a list of problems, which its message numbers if there are several.

    problems: or the message of another one, which is raised again on all ranks
    """

    def __init__(self, problems: Sequence[str] | str):
        self.problems = problems = (
            (problems,) if isinstance(problems, str) else tuple(problems)
        )
        numbered = "\n".join(
            f"  {i}. {problem}" for i, problem in enumerate(problems, 1)
        )
        several = f"{len(problems)} problems in the configuration:\n{numbered}"
        super().__init__(problems[0] if len(problems) == 1 else several)

    def __reduce__(
        self,
    ):
        # Pickled with its problems, not with the message made of them.
        return ConfigProblems, (self.problems,)


def reject(problems: Sequence[str]) -> None:
    """Raise a ConfigError with all problems, each once, if there are any."""
    if problems:
        raise ConfigProblems(list(dict.fromkeys(problems)))


def attempt(problems: list[str], function: Callable, *arguments: Any) -> Any:
    """`function(*arguments)`; None if it raises a ConfigError, whose problems are appended to `problems`."""
    try:
        return function(*arguments)
    except ConfigProblems as error:
        problems += error.problems
    except ConfigError as error:
        problems.append(str(error))
    return None
