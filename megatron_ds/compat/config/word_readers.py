"""How the words of other programs become settings of options here.

A reader is a pair: the flag here whose value is unknown if the words are, and a function (words, flag) → settings. Those
of a fork's own forms are functions of `block_words.py`, `rotary_words.py` and `hybrid_pattern.py`; all are loaded when a
command line has the flag.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...config.run import Source
from ...config.sources.flags import read_flags, spellings
from ...config.sources.reading import Deferred, Setting
from ...errors import ConfigError

Words = Callable[[Sequence[str], str], list[str]]


def settings_of(flag: str, argv: Sequence[str]) -> list[Setting]:
    """Return the settings of a command line, as those of one flag. Raises ConfigError."""
    source = Source("flag", flag)
    found = read_flags(argv).settings_or_error()
    return [replace(setting, source=source) for setting in found]


def deferred(flag: str, option: str, value: Deferred) -> Setting:
    """Return a setting whose value follows from other options. option: its flag here."""
    path = spellings()[option].option.path
    source = Source("flag", flag)
    return Setting(path, value, source)


def word_of(words: Sequence[str], flag: str, what: str) -> str:
    """Return the only word after a flag, without quotes. what: it is, for the message. Raises ConfigError."""
    if len(words) != 1:
        raise ConfigError(f"{flag} needs {what} after it, and {len(words)} words are.")
    return words[0].strip("'\"")


def number_of(words: Sequence[str], flag: str) -> int:
    """Return the whole number after a flag. Raises ConfigError."""
    word = word_of(words, flag, "a whole number")
    # The longest number that any option takes here.
    if not word.isdecimal() or len(word) > 6:
        raise ConfigError(
            f"{flag} {word[:40]}: this is not a whole number from 0 to 999,999."
        )
    return int(word)


def one_of(flags: Mapping[str, str], words: Sequence[str], flag: str) -> list[Setting]:
    """Return the settings of a word that stands for several flags here.

    flags  word → the flags here, between spaces; "" for none, where the word asks for the default
    words  after the flag of the fork, together one word

    Raises ConfigError for another word, with those that are known.
    """
    value = " ".join(words).strip("'\"")
    if value not in flags:
        known = ", ".join(flags)
        raise ConfigError(f"{flag} {value} is not available. It may be {known}.")
    return settings_of(flag, flags[value].split())


def in_words(
    option: str, read: Words, words: Sequence[str], flag: str
) -> list[Setting]:
    """Return the settings of words that an option here has in another form.

    option  its flag here
    read    (words, flag) → the words of that flag
    """
    found = read(words, flag)
    return settings_of(flag, [option, *found])
