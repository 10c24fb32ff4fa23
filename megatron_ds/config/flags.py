"""The command line → settings.

A scanner of our own over the table of options, not argparse: it reports every wrong word at once, remembers the spelling
that was used, and explains flags of Megatron that have no meaning here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..errors import ConfigError
from ..registry import did_you_mean
from .coerce import coerce
from .option import Option
from .refused import REFUSED_FLAGS
from .run import Source, all_options
from .setting import Setting

CONFIG_FLAG, DEEPSPEED_FLAG = "--config", "--deepspeed-config"
HELP_FLAGS = ("--help", "-h")


@dataclass(frozen=True)
class CommandLine:
    """What the command line says, before any file is read."""

    settings: tuple[Setting, ...]
    yaml_files: tuple[str, ...] = ()
    deepspeed_files: tuple[str, ...] = ()
    wants_help: bool = False
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spelling:
    """One way to write an option as a flag; a switch sets `value`, any other takes the following word."""

    option: Option
    is_switch: bool = False
    value: Any = None


@cache
def spellings() -> Mapping[str, Spelling]:
    """flag → what it does."""
    table: dict[str, Spelling] = {}

    def add(flag: str, spelling: Spelling) -> None:
        assert flag not in table, f"{flag} is declared by {table[flag].option.path} and {spelling.option.path}"
        table[flag] = spelling

    for option in all_options().values():
        if option.kind is bool:
            add(option.flag, Spelling(option, True, True))
            add(option.negative, Spelling(option, True, False))
        else:
            for flag in (option.flag, *option.flags):
                add(flag, Spelling(option))
        for flag, value in option.switches.items():
            add(flag, Spelling(option, True, value))
    return table


def read_flags(argv: Sequence[str]) -> CommandLine:
    """What the flags say; `problems` holds what is wrong with them. The same flag twice: the later wins."""
    settings: list[Setting] = []
    files: dict[str, list[str]] = {CONFIG_FLAG: [], DEEPSPEED_FLAG: []}
    wrong: list[str] = []
    wants_help = False
    for flag, words in _flags_with_words(argv, wrong):
        try:
            if flag in HELP_FLAGS:
                wants_help = True
            elif canonical(flag) in files:
                files[canonical(flag)].extend(_file_names(flag, words))
            else:
                settings.append(_setting(flag, words))
        except ConfigError as error:
            wrong.append(str(error))
    wrong += _contradictions(settings)
    return CommandLine(tuple(settings), tuple(files[CONFIG_FLAG]), tuple(files[DEEPSPEED_FLAG]), wants_help, tuple(wrong))


def canonical(flag: str) -> str:
    """`--hidden_size` is `--hidden-size`."""
    return flag.replace("_", "-")


def _flags_with_words(argv: Sequence[str], wrong: list[str]) -> Iterator[tuple[str, list[str]]]:
    """(flag, the words after it): `--lr 1 --bf16 --x=2` → ("--lr", ["1"]), ("--bf16", []), ("--x", ["2"])."""
    flag, words, is_misspelt = None, [], False
    for word in argv:
        if word.startswith("--") and len(word) > 2 or word == "-h":
            if flag:
                yield flag, words
            name, equals, value = word.partition("=")
            flag, words, is_misspelt = name, [value] if equals else [], False
        elif re.match("[-–—]+[A-Za-z]", word):                        # -lr, and dashes that a text processor made
            wrong.append(_misspelt(word))
            is_misspelt = True
        elif is_misspelt:
            continue                                                  # its value
        elif flag is None:
            wrong.append(f"{word!r} stands before any flag; everything here is said with flags, such as --num-layers 12.")
        else:
            words.append(word)
    if flag:
        yield flag, words


def _setting(typed: str, words: list[str]) -> Setting:
    flag = canonical(typed)
    spelling = spellings().get(flag)
    if spelling is None:
        raise ConfigError(_unknown(typed))
    option, source = spelling.option, Source("flag", flag)
    if spelling.is_switch:
        if words:
            raise ConfigError(f"{flag} takes no value, but {' '.join(words)!r} follows it{_other_way(option, spelling)}.")
        return Setting(option.path, spelling.value, source)
    if not words and option.alone is None:
        raise ConfigError(f"{flag} needs {option.noun} after it.")
    if not words:
        return Setting(option.path, option.alone, source)
    if option.is_list:
        return Setting(option.path, coerce(option, words, flag), source)
    if len(words) > 1:
        raise ConfigError(f"{flag} takes one value, but {len(words)} words follow it: {' '.join(words)!r}. Put quotes around "
                          "a value with blanks in it.")
    return Setting(option.path, coerce(option, words[0], flag), source)


def _misspelt(word: str) -> str:
    flag = "--" + canonical(word.partition("=")[0]).lstrip("-–—")
    near = f"; did you mean {flag!r}?" if flag in spellings() else did_you_mean(flag, list(spellings()))
    return f"{word!r} is not a flag: they begin with two plain hyphens{near or '.'}"


def _other_way(option: Option, spelling: Spelling) -> str:
    if option.kind is not bool:
        return f"; {option.flag} takes one"
    return f"; to say the contrary, write {option.flag if spelling.value is False else option.negative}"


def _file_names(flag: str, words: list[str]) -> list[str]:
    if not words:
        raise ConfigError(f"{flag} needs the name of a file after it.")
    return words


def _unknown(typed: str) -> str:
    flag = canonical(typed)
    if flag in REFUSED_FLAGS:
        return f"{flag}, a flag of Megatron, is refused: {REFUSED_FLAGS[flag]}"
    known = [*spellings(), CONFIG_FLAG, DEEPSPEED_FLAG, "--help"]
    return f"unknown flag {typed}{did_you_mean(flag, known) or '.'} All flags: --help."


def _contradictions(settings: Sequence[Setting]) -> list[str]:
    """Two flags that set one option to different values, unless they are `--x` and its own `--no-x`: then the later wins."""
    wrong, last = [], {}
    for setting in settings:
        option, before = all_options()[setting.path], last.get(setting.path)
        pair = {option.flag, option.negative, *option.flags}
        if before and before.value != setting.value and before.source != setting.source and not (
                {before.source.name, setting.source.name} <= pair):
            wrong.append(f"{before.source} and {setting.source} contradict each other: the first makes {option.name} "
                         f"{before.value!r}, the second {setting.value!r}. Keep one.")
        last[setting.path] = setting
    return wrong
