"""`Registry`: name → entry, with a suggestion for unknown names.

Models, schedules, tokenizers and optimizers have one `Registry` each. `tests/contracts/` test every entry.
"""

import difflib
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import FrameType
from typing import Generic, TypeVar

from .errors import ConfigError
from .features import features, missing_wings, watch_names

T = TypeVar("T")
PACKAGE = __name__.partition(".")[0]


class Registry(Generic[T]):
    """A table of named entries of one kind, filled by a decorator.

    >>> colours = Registry("colour")
    >>> @colours.register("red", "rouge")
    ... def red(): return "#f00"
    >>> colours["rouge"]()
    '#f00'
    """

    def __init__(self, noun: str):
        """noun: for messages, and under which features name modules that register entries."""
        self.noun = noun
        self._registering: set[str] = set()
        self._things: dict[str, T] = {}
        self._aliases: dict[str, str] = {}
        self._owners: dict[str, str] = {}
        watch_names(self._of_others)

    def register(self, name: str, *aliases: str) -> Callable[[T], T]:
        """Decorator that adds an entry under `name`. Aliases find it, too, but are not listed."""
        owner = _caller()

        def add(thing: T) -> T:
            self._check(name, thing)
            for key in (name, *aliases):
                assert key not in (*self._things, *self._aliases), (
                    f"{self.noun} {key!r} is registered twice"
                )
            self._things[name] = thing
            self._aliases.update(dict.fromkeys(aliases, name))
            self._owners[name] = owner
            return thing

        return add

    def _check(self, name: str, thing: T) -> None:
        """Raise TypeError for a thing that is no entry of this registry."""

    def _of_others(self) -> Iterator[tuple[str, str]]:
        """Yield (module, "noun name") of the entries that other packages have registered."""
        for name, owner in self._owners.items():
            if owner != PACKAGE:
                yield owner, f"{self.noun} {name}"

    def __getitem__(self, name: str) -> T:
        """Raises ConfigError with the most similar name."""
        self._load()
        try:
            return self._things[self._aliases.get(name, name)]
        except KeyError:
            raise ConfigError(
                f"unknown {self.noun} "
                f"{name!r}{did_you_mean(name, [*self._things, *self._aliases]) or '.'} Known: "
                f"{', '.join(sorted(self._things))}.{missing_wings()}"
            ) from None

    def name_of(self, name: str) -> str:
        """The listed name for a name or an alias."""
        self._load()
        return self._aliases.get(name, name)

    def __contains__(self, name: str) -> bool:
        self._load()
        return name in self._things or name in self._aliases

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(self._things)

    def names(self) -> tuple[str, ...]:
        """Return all listed names, in the order of registration."""
        self._load()
        return tuple(self._things)

    def _load(self) -> None:
        """Import the modules of features that register entries here, at the first look-up."""
        for feature in features():
            module = feature.registers.get(self.noun)
            if module is not None and module not in self._registering:
                # The module may look up entries, so it is noted before it is imported.
                self._registering.add(module)
                import_module(module)


def _caller() -> str:
    """Return the module outside of this package that registers something, or this package.

    A module of the package that is imported for the first time registers its own entries: what called it is the
    import system.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("importlib."):
            return PACKAGE
        if name.partition(".")[0] != PACKAGE:
            return name
        frame = frame.f_back
    return PACKAGE


def did_you_mean(name: str, known: list[str]) -> str:
    """Return `"; did you mean 'x'?"`, or an empty string if no known name is similar."""
    folded = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6)
    return f"; did you mean {folded[near[0]]!r}?" if near else ""
