"""The command line → settings.

Unlike argparse, this scanner reports all mistakes at once, keeps the spelling that was used for messages, and
explains flags of Megatron that have no option here.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import ConfigError
from ...features import FLAG as IMPORT_FLAG
from ...features import missing_wings, per_features
from ..options.option import Option, coerce
from ..run import Source, all_options
from .foreign_words import foreign_words
from .reading import Setting, SourceReading, is_deferred

CONFIG_FLAG = "--config"
DEEPSPEED_FLAG = "--deepspeed-config"
STRICT_FLAG = "--strict-flags"  # what changes nothing is an error
# Appended by torch.distributed.launch and DeepSpeed's launcher.
LOCAL_RANK_FLAG = "--local-rank"
# Flags that print a text and exit → the text.
ASKING = {
    "--help": "help",
    "-h": "help",
    "--help-short": "short help",
    "--version": "version",
    "--print-config": "config",
}
# Flags about the command line itself.
OF_THE_LINE = (CONFIG_FLAG, DEEPSPEED_FLAG, IMPORT_FLAG, STRICT_FLAG, *ASKING)
# Switches that exclude a value of an option: other flags override them with these values, as in Megatron.
OVERRIDDEN = {
    "--no-position-embedding": ("rope",),
    "--use-distributed-optimizer": (2, 3),
}


@dataclass
class CommandLine(SourceReading):
    """The reading of the command line, before its files are read.

    asks_for: the text that is to be printed instead of a run, "help", "short help", "version" or "config".
    """

    yaml_files: list[str] = field(default_factory=list)
    deepspeed_files: list[str] = field(default_factory=list)
    asks_for: str | None = None
    local_rank: int | None = None
    is_strict: bool = False


@dataclass(frozen=True)
class Spelling:
    """A flag of an option. A switch sets the option to `value`; any other flag takes the words after it."""

    option: Option
    is_switch: bool = False
    value: Any = None


@per_features
def spellings() -> Mapping[str, Spelling]:
    """All flags of options → what they set."""
    table: dict[str, Spelling] = {}

    def add(flag: str, spelling: Spelling) -> None:
        if flag in table:
            raise ConfigError(
                f"{table[flag].option.path} and {spelling.option.path} both declare {flag}. Rename the option of the "
                "feature."
            )
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
    for name, meaning in foreign_words().names.items():
        flag, _, value = meaning.partition(" ")
        if flag not in table:
            continue  # an option of a wing that is not installed
        add(name, Spelling(table[flag].option, True, value) if value else table[flag])
    return table


def read_flags(argv: Sequence[str]) -> CommandLine:
    """Return the settings and problems of a command line.

    If a flag occurs twice, the later one wins; values of an option that repeats are added up.
    """
    # All problems are collected, so an error of one flag does not end the loop.
    line = CommandLine()
    foreign = foreign_words()
    files = {CONFIG_FLAG: line.yaml_files, DEEPSPEED_FLAG: line.deepspeed_files}
    for typed, words in flags_with_words(argv, line):
        flag = canonical(typed)
        try:
            # Flags about the command line itself.
            if flag == STRICT_FLAG:
                line.is_strict = True
            elif flag == IMPORT_FLAG:
                continue  # imported before the flags are read
            elif flag in ASKING:
                line.asks_for = line.asks_for or ASKING[flag]
            elif flag == LOCAL_RANK_FLAG:
                line.local_rank = coerce(
                    _LOCAL_RANK, _one_word(flag, words, _LOCAL_RANK), flag
                )
            elif flag in files:
                if not words:
                    raise ConfigError(f"{flag} needs the name of a file after it.")
                files[flag].extend(words)
            # Options, under their own names and under those of others.
            elif flag in spellings():
                line.settings.append(_setting(flag, words))
            elif flag in foreign.readers:
                if not (found := foreign.readers[flag][1](words, flag)):
                    line.without_effect[flag] = "its value asks for the default"
                line.settings += found
            else:
                _without_option(line, typed, words)
        except ConfigError as error:
            known = foreign.readers[flag][0] if flag in foreign.readers else flag
            line.refuse(
                error, spellings()[known].option.path if known in spellings() else None
            )
    return settled(line)


def settled(line: CommandLine) -> CommandLine:
    """Return the line without settings that other flags override, and with its contradictions as problems."""
    line.settings = list(_with_lists(line.settings))
    line.settings = _with_padded_vocabulary(line.settings)
    given = {(setting.path, setting.value) for setting in line.settings}
    line.settings = [
        setting
        for setting in line.settings
        if not any(
            (setting.path, value) in given
            for value in OVERRIDDEN.get(setting.source.name, ())
        )
    ]
    line.problems += _contradictions(line.settings)
    return line


PADDED = "--padded-vocab-size"  # rows of the embedding, at least as many as --vocab-size has tokens


def _with_padded_vocabulary(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings without a --vocab-size that --padded-vocab-size exceeds. NullTokenizer takes its end of
    document from --vocab-size; for it the two remain a contradiction.
    """
    sizes = [setting for setting in settings if setting.path == "model.vocab_size"]
    padded = max(
        (size.value for size in sizes if size.source.name in _padded_names()), default=0
    )
    is_bare = any(setting.value == "NullTokenizer" for setting in settings)
    if not padded or is_bare:
        return list(settings)
    return [
        setting
        for setting in settings
        if setting not in sizes or setting.value >= padded
    ]


def _padded_names() -> set[str]:
    """--padded-vocab-size and its names in forks."""
    return {
        PADDED,
        *(name for name, meaning in foreign_words().names.items() if meaning == PADDED),
    }


def _with_lists(settings: Sequence[Setting]) -> Iterator[Setting]:
    """Yield the settings, those of an option that repeats as one."""
    lists: dict[str, Setting] = {}
    for setting in settings:
        if not all_options()[setting.path].repeats:
            yield setting
        elif setting.path in lists:
            lists[setting.path] = replace(
                setting, value=lists[setting.path].value + setting.value
            )
        else:
            lists[setting.path] = setting
    yield from lists.values()


def canonical(flag: str) -> str:
    """Return the flag with hyphens: --hidden-size for --hidden_size."""
    return flag.replace("_", "-")


_LOCAL_RANK = Option(None, "", kind=int, flag=LOCAL_RANK_FLAG)


def flags_with_words(
    argv: Sequence[str], line: CommandLine
) -> Iterator[tuple[str, list[str]]]:
    """(flag, the words after it): `--lr 1 --bf16 --x=2` → ("--lr", ["1"]), ("--bf16", []), ("--x", ["2"])."""
    flag = None
    words = []
    is_misspelt = False
    for word in argv:
        # A flag ends the words of the one before it.
        if word.startswith("--") and len(word) > 2 or word == "-h":
            if flag:
                yield flag, words
            name, equals, value = word.partition("=")
            flag = name
            words = [value] if equals else []
            is_misspelt = False
        elif re.match("[-–—]+[A-Za-z]", word):  # -lr, or dashes of a word processor
            _misspelt(line, word)
            is_misspelt = True
        elif is_misspelt:
            continue  # its value
        elif flag is None:
            line.refuse(
                f"{word!r} is not preceded by a flag. Every setting is a flag and its value, such as "
                "--num-layers 12."
            )
        else:
            words.append(word)
    # The last flag.
    if flag:
        yield flag, words


def _setting(flag: str, words: list[str]) -> Setting:
    spelling = spellings()[flag]
    option = spelling.option
    source = Source("flag", flag)
    if spelling.is_switch:
        if words:
            other = f"{option.flag} takes one"
            if option.kind is bool:
                other = (
                    f"use {option.flag} to enable it"
                    if spelling.value is False
                    else (f"use {option.negative} to disable it")
                )
            raise ConfigError(
                f"{flag} takes no value, but {' '.join(words)!r} follows it; {other}."
            )
        return Setting(option.path, spelling.value, source)
    if not words and option.alone is not None:
        return Setting(option.path, option.alone, source)
    raw = words if option.is_list and words else _one_word(flag, words, option)
    return Setting(option.path, coerce(option, raw, flag), source)


def _one_word(flag: str, words: list[str], option: Option) -> str:
    if not words:
        raise ConfigError(f"{flag} needs {option.noun} after it.")
    if len(words) > 1:
        raise ConfigError(
            f"{flag} takes one value, but {len(words)} words follow it: {' '.join(words)!r}. "
            "Put quotes around a value that contains spaces."
        )
    return words[0]


def _near(flag: str, known: Iterable[str]) -> str:
    from .suggest import near_flag  # tables of names, for messages alone

    return near_flag(flag, known)


def _misspelt(line: CommandLine, word: str) -> None:
    flag = "--" + canonical(word.partition("=")[0]).lstrip("-–—")
    near = (
        f"; did you mean {flag!r}?" if flag in spellings() else _near(flag, spellings())
    )
    _refuse(
        line,
        f"{word!r} is not a flag: flags begin with two plain hyphens{near or '.'}",
        near,
    )


def _refuse(line: CommandLine, problem: str, near: str) -> None:
    """Add a problem. The values of the options that its suggestion `near` mentions are unknown."""
    line.refuse(problem)
    line.unread |= {
        spelling.option.path
        for name, spelling in spellings().items()
        if repr(name) in near
    }


def _without_option(line: CommandLine, typed: str, words: list[str]) -> None:
    """A flag of Megatron that has no option here, or an unknown one."""
    flag = canonical(typed)
    value = " ".join(words)
    answer = foreign_words().answer_to_flag(flag)
    if answer is None:
        near = _near(flag, [*spellings(), *OF_THE_LINE])
        _refuse(
            line,
            f"unknown flag {typed}{near or '.'} All flags: --help.{missing_wings()}",
            near,
        )
    elif answer.accepts(value):
        line.without_effect[flag] = answer.note
    else:
        line.refuse(
            f"{flag}{' ' if value else ''}{value}, a flag of Megatron, is not supported: "
            f"{answer.refusal}"
        )


def _contradictions(settings: Sequence[Setting]) -> list[str]:
    """Return a problem for each two flags that set an option to different values. `--no-x` may follow `--x`."""
    wrong = []
    last: dict[str, Setting] = {}
    for setting in settings:
        if is_deferred(setting):
            continue
        option = all_options()[setting.path]
        before = last.get(setting.path)
        pair = {option.flag, option.negative, *option.flags}
        if (
            before
            and before.value != setting.value
            and before.source != setting.source
            and not ({before.source.name, setting.source.name} <= pair)
        ):
            wrong.append(
                f"{before.source} and {setting.source} contradict each other: the first sets "
                f"{option.name} to {before.value!r}, the second to {setting.value!r}. Give only "
                "one."
            )
        last[setting.path] = setting
    return wrong
