"""`ConfigBlock`: a block of DeepSpeed's JSON as an object with an attribute for each of its keys.

    class Offload(ConfigBlock):
        KEYS = {"device": BlockKey("none", one_of("none", "cpu")), "buffer_count": BlockKey(5, whole)}

    Offload(buffer_count=2).device              "none"
    Offload(buffer_counts=2)                    ConfigError

Values are checked when a block is made and when an attribute is set. The value "auto" is left out, so the
default stays.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

from ...errors import ConfigError

Read = Callable[[Any], Any]
"""The value of a key, from what was given for it. Raises ValueError with what is expected."""
B = TypeVar("B", bound="ConfigBlock")


class BlockKey(NamedTuple):
    """A key: its value where the block does not have it, how a value is read, and another spelling."""

    default: Any
    read: Read
    alias: str | None = None


class ConfigBlock:
    """Has an attribute for each of the keys of a block.

    KEYS  the keys, by the names of the attributes
    """

    KEYS: ClassVar[Mapping[str, BlockKey]]

    def __init__(self, strict: bool = False, **given: Any):
        """Take the values of a block. strict: "auto" is a value like others."""
        names = {}
        values = {}
        for name, key in self.KEYS.items():
            values[name] = key.default
            names[key.alias] = name
        for spelled, value in given.items():
            if value != "auto" or strict:
                values[names.get(spelled, spelled)] = value
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self).__name__
        key = self.KEYS.get(name)
        if key is None:
            known = ", ".join(self.KEYS)
            raise ConfigError(f"{kind} has no key {name!r}. Its keys are {known}.")
        try:
            read = key.read(value)
        except ConfigError:
            raise  # of an inner block, which names the key
        except ValueError as error:
            raise ConfigError(f"{kind}: {name} is {value!r}, not {error}.") from error
        super().__setattr__(name, read)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}(**{self.model_dump()})"

    def model_dump(self) -> dict[str, Any]:
        """Return the values as a dict, of inner blocks, too."""
        return {name: _dumped(value) for name, value in vars(self).items()}


def _dumped(value: Any) -> Any:
    return value.model_dump() if isinstance(value, ConfigBlock) else value


# -------------------------------------------------------------------- how values are read
def flag(value: Any) -> bool:
    """Read true or false, also as 0 and 1 and as text."""
    known = {"true": True, "1": True, "false": False, "0": False}
    text = str(value).lower()
    if text not in known:
        raise ValueError("true or false")
    return known[text]


def whole(value: Any) -> int:
    """Read a whole number, also as 5e8 and as text."""
    number = _number(value)
    if not number.is_integer():
        raise ValueError("a whole number")
    return int(value) if isinstance(value, int) else int(number)


def count(value: Any) -> int:
    """Read a whole number that is not negative."""
    if whole(value) < 0:
        raise ValueError("a number from 0 on")
    return whole(value)


def share(value: Any) -> float:
    """Read a number between 0 and 1."""
    if not 0.0 <= _number(value) <= 1.0:
        raise ValueError("a number between 0 and 1")
    return _number(value)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError("a number") from None


def texts(value: Any) -> list[str]:
    """Read a list of texts, each once; a text alone is a list of one."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple):
        raise ValueError("a text or a list of texts")
    return list(dict.fromkeys(map(str, listed)))


def one_of(*values: Any) -> Read:
    """Return how one of these values is read."""

    def read(value: Any) -> Any:
        if value not in values:
            raise ValueError(f"one of {', '.join(map(str, values))}")
        return next(known for known in values if known == value)

    return read


def block(kind: type[B]) -> Callable[[Any], B]:
    """Return how an inner block is read: from a dict, or an object that was made already."""

    def read(value: Any) -> B:
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            raise ValueError("a block")
        return kind(**value)

    return read


def optional(read: Read) -> Read:
    """Return how a value is read that may be None."""
    return lambda value: None if value is None else read(value)
