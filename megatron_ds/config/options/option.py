"""`option(...)` declares a field of the configuration, with its flag, file keys, help and documentation.

    field      hidden_dropout: float = option(0.1, help="…", json="…")
    flag       --hidden-dropout 0.2               and every spelling in `flags` and `switches`
    YAML       hidden_dropout: 0.2                bare, or inside its section `model:`
    JSON       the DeepSpeed key in `json`
    docs       a row of docs/reference/flags.md

Terms: a *section* is one dataclass (`model`, `train`, …); a *path* is `section.field`; a *switch* is a flag
without a value, which sets its field to one fixed value (`--swiglu` sets model.activation to "swiglu").

`coerce` converts the words of the command line and the values of files to the type of the option. The type
decides, not the file: YAML 1.1 reads `1e-4` as a string, and JSON may have 5e8 for a count.
"""

import dataclasses
import math
import operator
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ...errors import ConfigError
from ...features import own_features
from ...registry import did_you_mean
from .need import Need

# Name in options → name in torch.
DTYPE_NAMES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}
# torch and numpy hold no larger whole number
LARGEST = 2**63 - 1
MOST_DIGITS = 40
NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class Option:
    """A declared field. `section`, `name`, `kind` and `is_list` are filled in by `options_of`.

    kind       type of one value: int, float, bool or str;  is_list: the field is a tuple of them
    count      number of values of a list, where it is fixed
    example    such a list, for messages
    flag       the main spelling, `--name-with-hyphens` unless it differs
    flags      more spellings that take a value
    switches   spellings that take no value → the value that each sets
    values     other spellings of a value → the value
    alone      the value of the flag without a value after it, where that is allowed
    strip      characters that are removed from both ends of a string
    separators  characters that separate the values of a list, besides spaces
    repeats    of a list: flags that occur several times add their values
    avoid      when *not* to use the option
    json       its key in a DeepSpeed JSON
    unit       of its values, for help and placeholders
    at_least, above, at_most, below   the range of valid values
    least      what the value `at_least` means, for messages: "which is no limit"
    per_host   ranks may have different values: a path of one machine, or a setting that changes neither
               numbers nor communication; all other options are compared between ranks (compared_values.py)
    needs      other options without which it has no effect
    """

    default: Any
    help: str
    avoid: str = ""
    flag: str = ""
    flags: tuple[str, ...] = ()
    switches: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    alone: Any = None
    choices: tuple = ()
    json: str = ""
    strip: str = ""
    separators: str = ""
    repeats: bool = False
    unit: str = ""
    required: bool = False
    count: int | None = None
    example: str = ""
    at_least: float | None = None
    least: str = ""
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    per_host: bool = False
    needs: Need | None = None
    section: str = ""
    name: str = ""
    kind: type = str
    is_list: bool = False

    @property
    def path(self) -> str:
        """The full name of the option: `section.name`."""
        return f"{self.section}.{self.name}"

    @property
    def noun(self) -> str:
        """The kind of value, for messages: "a whole number", "3 whole numbers", "one of a, b"."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        if self.is_list:
            many = {int: "whole numbers", float: "numbers", str: "words"}[self.kind]
            example = f", such as {self.example}" if self.example else ""
            return (
                f"{self.count} {many}{example}" if self.count else f"one or more {many}"
            )
        return NOUNS[self.kind]

    @property
    def negative(self) -> str:
        """The switch that turns a boolean field off: `--no-x` for `--x`, and `--x` for `--no-x`."""
        return (
            "--" + self.flag[5:]
            if self.flag.startswith("--no-")
            else "--no-" + self.flag[2:]
        )


def option(default: Any = None, *, help: str, **more: Any) -> Any:
    """Return a dataclass field with the `Option` in its metadata. A required one is None until a source gives it."""
    more["flags"] = tuple(more.get("flags", ()))
    return field(
        default=default, metadata={"option": Option(default=default, help=help, **more)}
    )


def json_key(kind: type, help: str, **more: Any) -> Option:
    """Return a key of a DeepSpeed JSON that is translated to other options. help: its meaning, for
    docs/reference/flags.md."""
    return Option(None, help, kind=kind, **more)


def options_of(section: str, cls: type) -> tuple[Option, ...]:
    """Return the options of a section's dataclass, in the order of declaration; those of base classes come last."""
    hints = typing.get_type_hints(cls)
    own = cls.__annotations__
    declared = sorted(dataclasses.fields(cls), key=lambda f: f.name not in own)
    return tuple(
        _bind(f.metadata["option"], section, f.name, hints[f.name])
        for f in declared
        if "option" in f.metadata
    )


def _bind(declared: Option, section: str, name: str, hint: Any) -> Option:
    # `int | None` → int, `tuple[…] | None` → tuple.
    if isinstance(hint, types.UnionType):
        hint = next(t for t in typing.get_args(hint) if t is not types.NoneType)
    is_list = typing.get_origin(hint) is tuple
    kind = typing.get_args(hint)[0] if is_list else hint
    assert kind in NOUNS, (
        f"{section}.{name}: {hint} is not int, float, bool, str or a tuple of one of them"
    )
    return dataclasses.replace(
        declared,
        section=section,
        name=name,
        kind=kind,
        is_list=is_list,
        flag=declared.flag or "--" + name.replace("_", "-"),
    )


def _separated(items: Iterable[Any], separators: str) -> Iterator[Any]:
    """Yield the items; text is divided at the separators and at spaces."""
    spaces = str.maketrans(dict.fromkeys(separators, " "))
    for item in items:
        if isinstance(item, str):
            yield from item.translate(spaces).split()
        else:
            yield item


def coerce(option: Option, raw: Any, where: str) -> Any:
    """Return `raw` as a value of the option's type. Raises a ConfigError whose message begins with `where`."""
    if not option.is_list:
        return _one(option, raw, where)
    if isinstance(raw, list | tuple):
        items = tuple(raw)
    elif option.separators:
        items = (raw,)
    else:
        items = (raw,) if option.kind is str else tuple(str(raw).split())
    if option.separators:
        items = tuple(_separated(items, option.separators))
    if option.count is not None and len(items) != option.count:
        raise ConfigError(f"{where} needs {option.noun}, not {len(items)}.")
    return tuple(_one(option, item, where) for item in items)


def _one(option: Option, raw: Any, where: str) -> Any:
    # YAML reads the choice `on` as true.
    if isinstance(raw, bool) and shown(raw) in option.values:
        raw = shown(raw)
    # A word may stand for a number, such as "optim" for stage 1.
    if option.kind is not str and isinstance(raw, str) and raw in option.values:
        return option.values[raw]
    value = _CONVERT[option.kind](raw)
    if value is None:
        raise ConfigError(f"{where}: {shown(raw)} is not {option.noun}.")
    if isinstance(value, str):
        value = value.strip(option.strip) if option.strip else value
        value = option.values.get(value, value)
    if option.choices and value not in option.choices:
        near = did_you_mean(str(value), [*map(str, option.choices), *option.values])
        raise ConfigError(
            f"{where}: {shown(raw)} is not "
            f"{option.noun}{near.replace(';', ':')}" + ("" if near else ".")
        )
    _check_range(option, value, raw, where)
    return value


def _check_range(option: Option, value: Any, raw: Any, where: str) -> None:
    least = f", {option.least}" if option.least else ""
    largest = (
        LARGEST if option.kind is int and option.at_most is None else option.at_most
    )
    bounds = (
        ("at least", option.at_least, operator.lt, least),
        ("above", option.above, operator.le, ""),
        ("at most", largest, operator.gt, ""),
        ("below", option.below, operator.ge, ""),
    )
    for relation, bound, fails, meaning in bounds:
        if bound is not None and fails(value, bound):
            written = (
                raw if len(str(raw)) <= MOST_DIGITS else f"{str(raw)[:MOST_DIGITS]}…"
            )
            raise ConfigError(
                f"{where}: {written} is out of range; it must be {relation} {bound}{meaning}."
            )


def shown(raw: Any) -> str:
    """Return a value as it was written, for messages."""
    if isinstance(raw, bool):
        return str(raw).lower()
    if isinstance(raw, list):  # all items of a list in a YAML file are strings
        return f"[{', '.join(map(str, raw))}]"
    return "an empty value" if raw is None or raw == "" else repr(raw)


def _int(raw: Any) -> int | None:
    if isinstance(raw, bool):
        return None
    if isinstance(raw, str) and re.fullmatch(r"[+-]?[\d_]+", raw):
        # int() itself refuses numbers of 5,000 digits.
        digits = raw.replace("_", "").lstrip("0")[:MOST_DIGITS]
        return int(digits or "0") if raw.strip("+-_") else None
    number = _float(raw)
    # 5e8 and 1e6 are whole, too.
    return int(number) if number is not None and number.is_integer() else None


def _float(raw: Any) -> float | None:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        return None
    try:
        number = float(raw)
    except (ValueError, OverflowError):  # of an int of more than 308 digits
        return None
    return number if math.isfinite(number) else None


SWITCH_WORDS = MappingProxyType(
    {
        "true": True,
        "yes": True,
        "on": True,
        "false": False,
        "no": False,
        "off": False,
    }
)


def _bool(raw: Any) -> bool | None:
    if isinstance(raw, bool):
        return raw
    return SWITCH_WORDS.get(raw.lower()) if isinstance(raw, str) else None


def _str(raw: Any) -> str | None:
    if (
        isinstance(raw, bool)
        or raw is None
        or raw == ""
        or isinstance(raw, list | tuple | dict)
    ):
        return None
    return str(raw)


_CONVERT = {int: _int, float: _float, bool: _bool, str: _str}


def added_options(section: str) -> tuple[type, ...]:
    """Return the dataclasses of options that features of the wings add to a section, as base classes of it."""
    return tuple(
        feature.extends[section]
        for feature in own_features()
        if section in feature.extends
    )
