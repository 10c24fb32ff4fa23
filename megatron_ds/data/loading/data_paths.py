"""Which corpora the data flags name: on the command line, or in a file where they are too many for it.

    --data-path 0.3 a 0.7 b           --data-args-path FILE             the same words in a file, on any number of lines
    --train-data-path a … --valid-…   --per-split-data-args-path FILE   {"train": ["0.3", "a", …], "valid": […], "test": […]}

Reads those files and nothing else.
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
    pass

PARTS = ("train", "valid", "test")


class Named(NamedTuple):
    """Words of a data path, and the flag to name in a message. No words: nothing was given."""

    flag: str
    words: tuple[str, ...]


class Sources(NamedTuple):
    """Either `whole`, which --split divides, or `parts`, one Named for each of train, valid and test."""

    whole: Named | None
    parts: tuple[Named, ...]


def read_sources(data) -> Sources:
    """data: a DataConfig.  Raises DataError for a file that is missing or does not hold what it should."""
    if data.per_split_data_args_path:
        flag, path = "--per-split-data-args-path", data.per_split_data_args_path
        found = _json_words(flag, path)
        return Sources(None, tuple(Named(f"{flag} {path}, {part}", found[part]) for part in PARTS))
    if data.has_split_paths:
        return Sources(None, tuple(Named(f"--{part}-data-path", tuple(getattr(data, f"{part}_data_path"))) for part in PARTS))
    if data.data_args_path:
        flag, path = "--data-args-path", data.data_args_path
        words = _text(flag, path).split()
        if not words:
            raise _unfit(flag, path, "it is empty", "weights and prefixes, as for --data-path")
        return Sources(Named(f"{flag} {path}", tuple(words)), ())
    return Sources(Named("--data-path", tuple(data.data_path)), ())


def _json_words(flag: str, path: str) -> dict[str, tuple[str, ...]]:
    form = '{"train": ["0.3", "a", "0.7", "b"], "valid": ["c"], "test": []}'
    try:
        found = json.loads(_text(flag, path))
    except ValueError as error:
        raise _unfit(flag, path, f"it is not valid JSON: {error}", form) from None
    if not isinstance(found, dict) or not found.get("train"):
        raise _unfit(flag, path, "it names no training data", form)
    if unknown := sorted(set(found) - set(PARTS)):
        raise _unfit(flag, path, f"it has a part {unknown[0]!r}", form)
    words = {part: found.get(part) or [] for part in PARTS}
    for part, listed in words.items():
        if not isinstance(listed, list) or not all(isinstance(word, str | int | float) for word in listed):
            raise _unfit(flag, path, f"{part} is not a list of weights and prefixes", form)
    return {part: tuple(map(str, listed)) for part, listed in words.items()}


def _text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise _unfit(flag, path, f"it is not text: {error}", "weights and prefixes") from None


def _unfit(flag: str, path: str, what: str, form: str) -> DataError:
    return DataError(f"{flag} {path}: {what}. It must hold {form}.")


def parse_split(text: str) -> tuple[float, ...]:
    """`"969, 30, 1"` → (0.969, 0.03, 0.001): one share for each of PARTS; what is left out is 0.

    Any proportions will do, also separated by "/". Raises ConfigError for other text.
    """
    try:
        numbers = [float(word) for word in re.split(r"[\s,/]+", text.strip(" ,/"))]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= len(PARTS) or min(numbers) < 0 or not 0 < sum(numbers) < math.inf:
        raise ConfigError(f"--split {text!r} is not a list of up to three proportions, none negative and not all zero: "
                          "write for example 969,30,1 or 98,2,0.")
    numbers += [0.0] * (len(PARTS) - len(numbers))
    return tuple(n / sum(numbers) for n in numbers)


def cut(num_documents: int, shares: Sequence[float]) -> tuple[range, ...]:
    """The documents of each part; bounds are running sums of the shares, rounded to a whole document (half to even)."""
    bounds = [round(share * num_documents) for share in accumulate(shares, initial=0.0)]
    return tuple(range(first, last) for first, last in zip(bounds, bounds[1:]))
