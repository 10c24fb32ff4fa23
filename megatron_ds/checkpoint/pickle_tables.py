"""The dicts of a pickle, with keys that are checked before they are hashed.

Python hashes a tuple by visiting its elements each time, in C and without a limit: with t1 = (t0, t0),
t2 = (t1, t1), … a key of a hundred bytes takes 2**50 steps, and one of a million levels overflows the stack.
Keys with equal hashes are compared with each other.

The unpickler fills a plain dict in C. Therefore `Opcodes.check` inserts BINPERSID after each opcode that
makes a dict or a set, and `persistent_load` of the unpickler replaces the empty one by a `Table`, to which C
adds items by calling `__setitem__` or `add`.
"""

import pickle
from collections.abc import Callable, Iterable
from typing import Any

MOST_PARTS = 64  # elements of a tuple that is a key
MOST_TUPLES = 10_000  # keys that are tuples: all of them can have one hash


class Table(dict):
    """A dict that calls `check(key)` before it hashes a key that is not a text."""

    __slots__ = ("_check",)

    def __init__(self, check: Callable[[Any], None]):
        self._check = check

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(key) is not str:
            self._check(key)
        dict.__setitem__(self, key, value)

    def __setstate__(self, state: Any) -> None:
        """Drop the attributes: an OrderedDict that torch saved has some, which each of its copies would hold."""

    def __reduce__(self) -> tuple:
        return dict, (dict(self),)

    def add(self, key: Any) -> None:
        """Add an element: where a pickle has a set, its elements become keys."""
        self[key] = None


class Keys:
    """The check of the keys of one pickle, whose dicts `table` makes.

    types   of keys; their hashes take constant time
    parts   types of the elements of tuples that are keys. Empty: no tuple is a key
    """

    def __init__(self, types: tuple[type, ...], parts: tuple[type, ...] = ()):
        self._types = types
        self._parts = parts
        self._tuples = 0

    def check(self, key: Any) -> None:
        """Raise UnpicklingError for a key whose hash could take long."""
        if isinstance(key, tuple) and self._parts:
            self._check_tuple(key)
        elif not isinstance(key, self._types):
            raise pickle.UnpicklingError(
                f"a key of a table in it is of the type {type(key).__name__}"
            )

    def _check_tuple(self, key: tuple) -> None:
        self._tuples += 1
        if self._tuples > MOST_TUPLES:
            raise pickle.UnpicklingError(
                f"more than {MOST_TUPLES:,} keys of its tables are tuples"
            )
        if len(key) > MOST_PARTS:
            raise pickle.UnpicklingError(
                f"a key of a table in it is a tuple of {len(key):,} elements; the "
                f"most is {MOST_PARTS}"
            )
        for part in key:
            if not isinstance(part, self._parts):
                raise pickle.UnpicklingError(
                    f"a key of a table in it is a tuple that holds a "
                    f"{type(part).__name__}"
                )

    def table(self, items: Iterable = ()) -> Table:
        """Return a table of the items: a mapping, or pairs."""
        made = Table(self.check)
        for key, value in items.items() if isinstance(items, dict) else items:
            made[key] = value
        return made

    def elements(self, elements: Iterable = ()) -> Table:
        """Return a table whose keys are the elements of a set."""
        made = Table(self.check)
        for element in elements:
            made.add(element)
        return made
