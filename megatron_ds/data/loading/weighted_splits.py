"""BigScience's weighted split paths, as words of a data path.

    "TRAIN: 0.3 0:0.6 a, 0.7 0:1 b"   →   0.3 0:0.6 a 0.7 0:1 b

A group has a name, and for each corpus a weight, the range of its documents, and its prefix. The fork
evaluates several groups one after the other, each under its name; here a part of the data is one group.
"""

import shlex
from collections.abc import Sequence

from ...errors import ConfigError

FORM = '"NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX"'


def words_of_groups(groups: Sequence[str], flag: str) -> list[str]:
    """Return the words of the only group. Raises ConfigError for several groups, and for another form."""
    if len(groups) > 1:
        names = ", ".join(group.partition(":")[0] for group in groups)
        raise ConfigError(
            f"{flag} has {len(groups)} groups ({names}), but a part of the data is one blend. "
            "Give one group; evaluate each of the others in a run of its own, with "
            "--skip-train, --load and this flag."
        )
    # The group has a name, and three words for each corpus.
    name, colon, corpora = "".join(groups).partition(":")
    each = [corpus.split() for corpus in corpora.split(",")]
    has_name = colon and len(name.split()) == 1
    if not has_name or any(len(words) != 3 for words in each):
        given = " ".join(groups)[:200]
        raise ConfigError(
            f"{flag} {given!r} does not have the form {FORM}. Put quotes "
            "around the group, and a comma after each prefix but the last."
        )
    return [word for words in each for word in words]


def file_of_groups(words: Sequence[str], flag: str) -> list[str]:
    """Return the data path "@FILE", which stands for the words in a file. The file is read when the data are
    opened."""
    if len(words) != 1:
        raise ConfigError(f"{flag} needs the name of one file after it.")
    return [f"@{words[0]}"]


def words_of_file(text: str, flag: str) -> list[str]:
    """Return the words of a file: those of a group in quotes, or weights, ranges and prefixes. Raises ConfigError."""
    if not text.lstrip().startswith('"'):
        return text.split()
    try:
        groups = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}. It must hold one line, {FORM}.") from None
    return words_of_groups(groups, flag)
