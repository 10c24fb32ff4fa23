"""`ForeignWords`: what the command line and files may have of other programs' dialects.

The tables are those of compat/config, which is loaded when the first command line is read. Without that
package, a run has the options of this one and no other names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ...errors import ConfigError
from ...features import Provided
from .answers import Answer
from .reading import Setting, SourceReading

FOREIGN_WORDS: Provided[Any] = Provided("foreign words")

Reader = Callable[[Sequence[str], str], list[Setting]]


def _no_answer(flag: str) -> Answer | None:
    return None


def _no_json(path: str) -> SourceReading:
    raise ConfigError(
        f"{path}: DeepSpeed's JSON is read by megatron_ds.compat, which is not installed. "
        "Install the whole package, or write flags."
    )


@dataclass(frozen=True)
class ForeignWords:
    """Names and files of other programs.

    names           flag → the flag here, or for a switch the flag and its value
    projects        flag of `names` → the project that has it
    readers         flag → (flag here, whose value is unknown if the words are, function (words, flag) → settings)
    answer_to_flag  flag without an option here → `Answer`; None for an unknown one
    read_yamls      files of --config → readings; None: each file is one of this package
    read_deepspeed  file of --deepspeed_config → reading
    """

    names: Mapping[str, str] = field(default_factory=dict)
    projects: Mapping[str, str] = field(default_factory=dict)
    readers: Mapping[str, tuple[str, Reader]] = field(default_factory=dict)
    answer_to_flag: Callable[[str], Answer | None] = _no_answer
    read_yamls: Callable[[Sequence[str]], list[SourceReading]] | None = None
    read_deepspeed: Callable[[str], SourceReading] = _no_json


NONE = ForeignWords()


@cache
def foreign_words() -> ForeignWords:
    """Return the words of all dialects that are installed."""
    return FOREIGN_WORDS.find() or NONE
