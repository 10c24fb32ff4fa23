"""`Registry`: name → entry, with a suggestion for unknown names.

Models, schedules, tokenizers and optimizers have one `Registry` each. `tests/contracts/` test every entry.
"""

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from types import FrameType
from typing import Generic, TypeVar

from .errors import ConfigError
from .features import Feature, features, missing_wings, watch_names

T = TypeVar("T")
PACKAGE = __name__.partition(".")[0]


class Registry(Generic[T]):
    """A table of named entries of one kind, filled by a decorator and by what features declare.

    An alias finds an entry, and is not listed.

    >>> colours = Registry("colour")
    >>> @colours.register("red", "rouge")
    ... def red(): return "#f00"
    >>> colours["rouge"]()
    '#f00'
    """

    def __init__(self, noun: str):
        """noun: for messages, and under which features name their entries."""
        self.noun = noun
        self._things: dict[str, T] = {}
        self._modules: dict[str, str] = {}
        self._aliases: dict[str, str] = {}
        self._owners: dict[str, str] = {}
        watch_names(self._of_others)

    def register(self, name: str, *aliases: str) -> Callable[[T], T]:
        """Decorator that adds an entry under `name`. Aliases find it, too, but are not listed."""
        owner = _caller()
        own = self._of_package(owner)

        def add(thing: T) -> T:
            self._check(name, thing)
            for key in (name, *aliases):
                known = key in self._things or self._aliases.get(key, name) != name
                assert not known and key not in own, (
                    f"{self.noun} {key!r} is registered twice"
                )
            self._things[name] = thing
            self._aliases.update(dict.fromkeys(aliases, name))
            self._owners[name] = owner
            return thing

        return add

    def _of_package(self, owner: str) -> set[str]:
        """Return the names that the package declares, which another owner may not take.

        The package itself registers them later, when they are used.
        """
        if owner == PACKAGE:
            return set()
        # Names of wings count, too.
        named = self._modules | self._of(features())
        return {
            name
            for name, module in named.items()
            if module.partition(".")[0] == PACKAGE
        }

    def declare(
        self, module: str, *names: str, aliases: Mapping[str, str] | None = None
    ) -> None:
        """Name entries that a module registers, which is imported when the first of them is used.

        aliases: alias → name
        """
        self._modules.update(dict.fromkeys(names, module))
        self._aliases.update(aliases or {})

    def _check(self, name: str, thing: T) -> None:
        """Raise TypeError for a thing that is no entry of this registry."""

    def _of_others(self) -> Iterator[tuple[str, str]]:
        """Yield (module, "noun name") of the entries that other packages have registered."""
        # Entries of features may not have been used yet.
        for name, owner in {**self._of_modules(), **self._owners}.items():
            if owner.partition(".")[0] != PACKAGE:
                yield owner, f"{self.noun} {name}"

    def __getitem__(self, name: str) -> T:
        """Return an entry. Raises ConfigError with the most similar name."""
        # Plans of large models look up the same entries thousands of times.
        if name in self._things:
            return self._things[name]
        modules = self._of_modules()
        listed = self.name_of(name)
        if listed not in self._things and listed in modules:
            import_module(modules[listed])
            # The module may register the name as an alias.
            listed = self._aliases.get(listed, listed)
        if listed in self._things:
            return self._things[listed]
        known = [*self.names(), *self._all_aliases()]
        raise ConfigError(
            f"unknown {self.noun} {name!r}{did_you_mean(name, known) or '.'} Known: "
            f"{', '.join(sorted(self.names()))}.{missing_wings()}"
        )

    def name_of(self, name: str) -> str:
        """Return the listed name for a name or an alias."""
        if name in self._things:
            return name
        return self._all_aliases().get(name, name)

    def __contains__(self, name: str) -> bool:
        listed = self.name_of(name)
        return listed in self._things or listed in self._of_modules()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def names(self) -> tuple[str, ...]:
        """Return all listed names: the package's, then those of features and of scripts."""
        declared = self._of_modules()
        names = dict.fromkeys((*declared, *self._things))
        return tuple(name for name in names if name not in self._aliases)

    def _of_modules(self) -> dict[str, str]:
        """Return the mapping name → module of the declared entries, those of features included."""
        named = self._of(features())
        modules = {name: to for name, to in named.items() if to not in named}
        return self._modules | modules

    def _all_aliases(self) -> dict[str, str]:
        """Return the mapping alias → listed name, with those that features declare."""
        named = self._of(features())
        return {name: to for name, to in named.items() if to in named} | self._aliases

    def _of(self, those: Iterable[Feature]) -> dict[str, str]:
        """Return what features declare: name → module, and alias → name."""
        found: dict[str, str] = {}
        for feature in those:
            found.update(feature.registers.get(self.noun, {}))
        return found


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
