"""Words of the command line and values of files → values of an option's type.

YAML 1.1 reads `1e-4` as a text and JSON writes 5e8 for a count, so the option's type decides, not the file's.
"""

import math
import operator
import re
from typing import Any

from ..errors import ConfigError
from ..registry import did_you_mean
from .option import Option


def coerce(option: Option, raw: Any, where: str) -> Any:
    """`raw` as a value of the option's type. Raises a ConfigError whose message begins with `where`."""
    if not option.is_list:
        return _one(option, raw, where)
    items = tuple(raw) if isinstance(raw, list | tuple) else (raw,) if option.kind is str else tuple(str(raw).split())
    if option.count is not None and len(items) != option.count:
        raise ConfigError(f"{where} needs {option.noun}, not {len(items)}.")
    return tuple(_one(option, item, where) for item in items)


def _one(option: Option, raw: Any, where: str) -> Any:
    if isinstance(raw, bool) and shown(raw) in option.values:       # YAML reads the choice `on` as true
        raw = shown(raw)
    value = _CONVERT[option.kind](raw)
    if value is None:
        raise ConfigError(f"{where}: {shown(raw)} is not {option.noun}.")
    if option.strip and isinstance(value, str):
        value = value.strip(option.strip)
    value = option.values.get(value, value)
    if option.choices and value not in option.choices:
        near = did_you_mean(str(value), [*map(str, option.choices), *option.values])
        raise ConfigError(f"{where}: {shown(raw)} is not {option.noun}{near.replace(';', ':')}" + ("" if near else "."))
    for words, bound, fails in (("at least", option.at_least, operator.lt), ("above", option.above, operator.le),
                                ("at most", option.at_most, operator.gt), ("below", option.below, operator.ge)):
        if bound is not None and fails(value, bound):
            raise ConfigError(f"{where}: {raw} is out of range; it must be {words} {bound}.")
    return value


def shown(raw: Any) -> str:
    """A value as it was written, for messages."""
    if isinstance(raw, bool):
        return str(raw).lower()
    return "an empty value" if raw is None or raw == "" else repr(raw)


def _int(raw: Any) -> int | None:
    if isinstance(raw, bool):
        return None
    if isinstance(raw, str) and re.fullmatch(r"[+-]?[\d_]+", raw):
        return int(raw.replace("_", "")) if raw.strip("+-_") else None
    number = _float(raw)
    return int(number) if number is not None and number.is_integer() else None      # 5e8, 1e6


def _float(raw: Any) -> float | None:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        return None
    try:
        number = float(raw)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _bool(raw: Any) -> bool | None:
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    return raw if isinstance(raw, bool) else words.get(raw.lower()) if isinstance(raw, str) else None


def _str(raw: Any) -> str | None:
    if isinstance(raw, bool) or raw is None or raw == "" or isinstance(raw, list | tuple | dict):
        return None
    return str(raw)


_CONVERT = {int: _int, float: _float, bool: _bool, str: _str}
