"""What an unpickler may call and build, bounded and unable to change this process.

A pickle keeps an object under a number and passes it to any number of calls. Where each call copies it, 400
kB ask for 24 GB; so calls take the elements that they copy from an `Allowance`, which has as many as the
pickle has bytes. `BUILD` sets attributes of whatever stands on the stack, a class or function of this process
included; so names resolve to a `Function` or to a class of this one pickle, which refuse it.
"""

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch

COPIED = (str, bytes, tuple, list, dict, set, frozenset)
SPARE = 1000  # elements beyond the size of the pickle
MOST_DIMENSIONS = 64


def reason_of(error: Exception) -> str:
    """Return why a pickle was not read. The text is never empty, although that of a MemoryError is."""
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    return str(error) or type(error).__name__


class Allowance:
    """The number of elements that the calls in a pickle may still copy. One that a program wrote has at least a
    byte for each of them.
    """

    def __init__(self, content: bytes):
        self._left = len(content) + SPARE

    def take(self, count: int) -> None:
        """Take elements. Raises UnpicklingError when none are left."""
        self._left -= count
        if self._left < 0:
            raise pickle.UnpicklingError(
                "its calls ask for more memory than it has bytes"
            )


def size_of(numbers: Any = ()) -> torch.Size:
    """Return a torch.Size of at most 64 numbers: keys that hold one are hashed often."""
    if not isinstance(numbers, tuple | list) or len(numbers) > MOST_DIMENSIONS:
        raise pickle.UnpicklingError(
            f"a shape in it is no tuple of at most {MOST_DIMENSIONS} numbers"
        )
    return torch.Size(numbers)


class Function:
    """A function that a pickle may call, and cannot change."""

    __slots__ = ("function", "_allowance")

    def __init__(self, function: Callable, allowance: Allowance):
        self.function = function
        self._allowance = allowance

    def __call__(self, *args: Any) -> Any:
        self._allowance.take(
            1 + sum(len(arg) for arg in args if isinstance(arg, COPIED))
        )
        return self.function(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it sets attributes of a function or class")


class Constant:
    """A value that a pickle refers to and cannot change, such as the member of an enumeration."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it sets attributes of a constant")


class Records:
    """Classes with the fields of dataclasses, for the objects of one pickle.

    BUILD sets the state of an object, whose fields must have the declared types. The object becomes one of the
    dataclass only in `finish`, since BUILD may follow again. Comparisons take from the allowance: a dict compares
    keys of equal hash, of which a harmless pickle has few.
    """

    def __init__(self, allowance: Allowance) -> None:
        self._made: list[tuple[Any, type]] = []
        self._allowance = allowance

    def class_of(
        self, kind: type, fields: Mapping[str, type | tuple[type, ...]]
    ) -> type:
        """Return the class for objects of `kind`."""
        made = self._made
        allowance = self._allowance

        def __eq__(self: Any, other: Any) -> bool:
            allowance.take(1)
            return kind.__eq__(self, other)  # type: ignore[call-arg]  # mypy takes it for that of the metaclass

        def __setstate__(self: Any, state: Any) -> None:
            if not isinstance(state, dict):
                raise pickle.UnpicklingError(
                    f"the state of a {kind.__name__} is no table of fields"
                )
            for name, value in state.items():
                if name not in fields or not isinstance(value, fields[name]):
                    raise pickle.UnpicklingError(
                        f"a {kind.__name__} has another field, or one of another "
                        f"type, than {', '.join(fields)}"
                    )
            self.__dict__.update(state)
            made.append((self, kind))

        # The name and the base stay: pickles and isinstance see the same class.
        return type(
            kind.__name__,
            (kind,),
            {"__setstate__": __setstate__, "__eq__": __eq__, "__hash__": kind.__hash__},
        )

    def finish(self) -> None:
        """Make all objects those of their dataclasses."""
        for made, kind in self._made:
            object.__setattr__(made, "__class__", kind)
