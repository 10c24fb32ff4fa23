"""Name → thing, with a helpful error for a name that nobody registered.

Models, schedules, tokenizers and optimizers each keep one `Registry`; `tests/contracts/` run over them,
so an entry is tested by existing.
"""

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from .errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of named things of one noun, filled by a decorator.

    >>> colours = Registry("colour")
    >>> @colours.register("red", "rouge")
    ... def red(): return "#f00"
    >>> colours["rouge"]()
    '#f00'
    """

    def __init__(self, noun: str):
        self.noun = noun
        self._things: dict[str, T] = {}
        self._aliases: dict[str, str] = {}

    def register(self, name: str, *aliases: str) -> Callable[[T], T]:
        """Decorator that files a thing under `name`; `aliases` find it too, but are not listed."""

        def add(thing: T) -> T:
            for key in (name, *aliases):
                assert key not in self._things and key not in self._aliases, f"{self.noun} {key!r} registered twice"
            self._things[name] = thing
            self._aliases.update(dict.fromkeys(aliases, name))
            return thing

        return add

    def __getitem__(self, name: str) -> T:
        """Raises ConfigError naming the nearest known name."""
        try:
            return self._things[self._aliases.get(name, name)]
        except KeyError:
            raise ConfigError(f"unknown {self.noun} "
                              f"{name!r}{did_you_mean(name, [*self._things, *self._aliases]) or '.'} Known: "
                              f"{', '.join(sorted(self._things))}.") from None

    def name_of(self, name: str) -> str:
        """The listed name of what `name`, perhaps an alias, finds."""
        return self._aliases.get(name, name)

    def __contains__(self, name: str) -> bool:
        return name in self._things or name in self._aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def names(self) -> tuple[str, ...]:
        return tuple(self._things)


def did_you_mean(name: str, known: list[str]) -> str:
    """`"; did you mean 'x'?"`, or nothing when no known name is near."""
    folded = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6)
    return f"; did you mean {folded[near[0]]!r}?" if near else ""
