"""The corpora and their parts: from the data flags, the files that they name, and --split.

    --data-path 0.3 a 0.7 b
    --data-args-path FILE             the same in a file, on any number of lines
    --train-data-path a --valid-…     a path for each part
    --per-split-data-args-path FILE   {"train": ["0.3", "a", "0.7", "b"], "valid": ["c"], "test": []}
"""

import json
import math
import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...errors import ConfigError, DataError

if TYPE_CHECKING:
    from ...config import DataConfig

PARTS = ("train", "valid", "test")


class DataPath(NamedTuple):
    """The weights and prefixes of a data path, and its flag for messages. No values: not given."""

    flag: str
    values: tuple[str, ...]


class Sources(NamedTuple):
    """Either `whole`, which --split divides, or `parts`, one path for each of train, valid and test."""

    whole: DataPath | None
    parts: tuple[DataPath, ...]


def read_sources(data: "DataConfig") -> Sources:
    """Reads only the files of --(per-split-)data-args-path. Raises DataError for a wrong one."""
    if data.per_split_data_args_path:
        flag, path = "--per-split-data-args-path", data.per_split_data_args_path
        found = _json_values(flag, path)
        return Sources(None, tuple(DataPath(f"{flag} {path}, {part}", found[part]) for part in PARTS))
    if data.has_split_paths:
        paths = {part: tuple(getattr(data, f"{part}_data_path")) for part in PARTS}
        return Sources(None, tuple(DataPath(f"--{part}-data-path", values) for part, values in paths.items()))
    if data.data_args_path:
        flag, path = "--data-args-path", data.data_args_path
        values = _text(flag, path).split()
        if not values:
            raise _unfit(flag, path, "it is empty", "weights and prefixes, as for --data-path")
        return Sources(DataPath(f"{flag} {path}", tuple(values)), ())
    return Sources(DataPath("--data-path", tuple(data.data_path)), ())


def parse_split(text: str) -> tuple[float, ...]:
    """`"969, 30, 1"` → (0.969, 0.03, 0.001): the share of each of PARTS; missing shares are 0.

    Any proportions, separated by commas, spaces or "/". Raises ConfigError for other text.
    """
    try:
        numbers = [float(number) for number in re.split(r"[\s,/]+", text.strip(" ,/"))]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= len(PARTS) or min(numbers) < 0 or not 0 < sum(numbers) < math.inf:
        raise ConfigError(f"--split {text!r} is not a list of up to three proportions, none negative and not "
                          "all zero: write for example 969,30,1 or 98,2,0.")
    numbers += [0.0] * (len(PARTS) - len(numbers))
    return tuple(n / sum(numbers) for n in numbers)


def cut(num_documents: int, shares: Sequence[float]) -> tuple[range, ...]:
    """The documents of each part: contiguous ranges, as in Megatron.

    Bounds are running sums of the shares, rounded to a whole document (half to even).
    """
    bounds = [round(share * num_documents) for share in accumulate(shares, initial=0.0)]
    return tuple(range(first, last) for first, last in zip(bounds, bounds[1:]))


def _json_values(flag: str, path: str) -> dict[str, tuple[str, ...]]:
    form = '{"train": ["0.3", "a", "0.7", "b"], "valid": ["c"], "test": []}'
    try:
        found = json.loads(_text(flag, path))
    except ValueError as error:
        raise _unfit(flag, path, f"it is not valid JSON: {error}", form) from None
    if not isinstance(found, dict) or not found.get("train"):
        raise _unfit(flag, path, "it names no training data", form)
    if unknown := sorted(set(found) - set(PARTS)):
        raise _unfit(flag, path, f"it has a part {unknown[0]!r}", form)
    values = {part: found.get(part) or [] for part in PARTS}
    for part, listed in values.items():
        if not isinstance(listed, list) or not all(isinstance(value, str | int | float) for value in listed):
            raise _unfit(flag, path, f"{part} is not a list of weights and prefixes", form)
    return {part: tuple(map(str, listed)) for part, listed in values.items()}


def _text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise _unfit(flag, path, f"it is not text: {error}", "weights and prefixes") from None


def _unfit(flag: str, path: str, what: str, form: str) -> DataError:
    return DataError(f"{flag} {path}: {what}. It must hold {form}.")
