"""The data paths of a run, from the data flags, the files that they name, and --split.

--data-path 0.3 a 0.7 b
--data-path 0.3 0:0.6 a 0.7 b     of a the first 60 % of its documents
--data-path @FILE                 the words in a file, also in the form of BigScience's fork
--data-args-path FILE             the same in a file, on any number of lines
--train-data-path a --valid-…     a path for each part
--per-split-data-args-path FILE   {"train": ["0.3", "a", "0.7", "b"], "valid": ["c"], "test": []}
"""

import json
import math
import re
from typing import TYPE_CHECKING, NamedTuple

from ...errors import ConfigError, DataError
from ...host.regular_file import read_text

if TYPE_CHECKING:
    from ...config import DataConfig


PARTS = ("train", "valid", "test")


class DataPath(NamedTuple):
    """The weights and prefixes of a data path, and its flag for messages. No values: not given."""

    flag: str
    values: tuple[str, ...]


class BlendSources(NamedTuple):
    """Either `whole`, which --split divides, or `parts`, one path for each of train, valid and test."""

    whole: DataPath | None
    parts: tuple[DataPath, ...]


def read_sources(data: "DataConfig") -> BlendSources:
    """Return the data paths of a run. Reads only the files of --(per-split-)data-args-path and of @FILE. Raises
    DataError for a malformed one."""
    if data.per_split_data_args_path:
        flag = "--per-split-data-args-path"
        path = data.per_split_data_args_path
        found = _json_values(flag, path)
        return BlendSources(
            None,
            tuple(DataPath(f"{flag} {path}, {part}", found[part]) for part in PARTS),
        )
    # Rules of the configuration admit one of these ways only.
    if data.has_split_paths:
        paths = {part: tuple(getattr(data, f"{part}_data_path")) for part in PARTS}
        return BlendSources(
            None,
            tuple(
                _written_out(f"--{part}-data-path", words)
                for part, words in paths.items()
            ),
        )
    if data.data_args_path:
        flag = "--data-args-path"
        path = data.data_args_path
        values = _text(flag, path).split()
        if not values:
            raise _unfit(
                flag, path, "it is empty", "weights and prefixes, as for --data-path"
            )
        return BlendSources(DataPath(f"{flag} {path}", tuple(values)), ())
    return BlendSources(_written_out("--data-path", tuple(data.data_path)), ())


def _written_out(flag: str, words: tuple[str, ...]) -> DataPath:
    """Return the data path with the words of the file in place of @FILE."""
    if len(words) != 1 or not words[0].startswith("@"):
        return DataPath(flag, words)
    path = words[0][1:]
    flag = f"{flag} {words[0]}"
    from .weighted_splits import words_of_file

    found = words_of_file(_text(flag, path), flag)
    if not found:
        raise _unfit(
            flag, path, "it is empty", "weights and prefixes, as for --data-path"
        )
    return DataPath(flag, tuple(found))


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
        if not isinstance(listed, list) or not all(
            isinstance(value, str | int | float) for value in listed
        ):
            raise _unfit(
                flag, path, f"{part} is not a list of weights and prefixes", form
            )
    return {part: tuple(map(str, listed)) for part, listed in values.items()}


def _text(flag: str, path: str) -> str:
    try:
        return read_text(path, DataError, f"{flag} {path}")
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise _unfit(
            flag, path, f"it is not text: {error}", "weights and prefixes"
        ) from None


def _unfit(flag: str, path: str, what: str, form: str) -> DataError:
    return DataError(f"{flag} {path}: {what}. It must hold {form}.")


def parse_split(text: str) -> tuple[float, ...]:
    """Return `"969, 30, 1"` → (0.969, 0.03, 0.001): the share of each of PARTS; missing shares are 0.

    Any proportions, separated by commas, spaces or "/". Raises ConfigError for other text.
    """
    try:
        numbers = [float(number) for number in re.split(r"[\s,/]+", text.strip(" ,/"))]
    except ValueError:
        numbers = []
    if (
        not 1 <= len(numbers) <= len(PARTS)
        or min(numbers) < 0
        or not 0 < sum(numbers) < math.inf
    ):
        raise ConfigError(
            f"--split {text!r} is not a list of up to three proportions, none negative and not "
            "all zero: write for example 969,30,1 or 98,2,0."
        )
    numbers += [0.0] * (len(PARTS) - len(numbers))
    return tuple(n / sum(numbers) for n in numbers)
