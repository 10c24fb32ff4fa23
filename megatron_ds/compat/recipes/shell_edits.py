"""Edits of a value in an expansion, and the patterns that they share with `case` and tests.

${A%x}  ${A%%x}     without the shortest or the longest end that fits the pattern x
${A#x}  ${A##x}     without such a beginning
${A/x/y}  ${A//x/y} with y in place of the first x, or of all
${A^^}  ${A,,}      in upper or lower case
${A:1:3}            characters from number 1 on, three of them
"""

import fnmatch

from .budget import LONGEST_PATTERN, Budget, whole
from .shell_tokens import ShellError


def edited_value(value: str, action: str, word: str, budget: Budget) -> str | None:
    """Return the value after its edit; None for an interval whose bounds are no numbers.

    action: the operator, such as "%%"; word: what follows it, expanded
    """
    if action == "^^":
        return value.upper()
    if action == ",,":
        return value.lower()
    # Texts in place of others, and texts without a beginning or an end.
    if action[0] == "/":
        old, _, new = word.partition("/")
        if not old:
            return value
        most = -1 if action == "//" else 1
        return budget.replaced(value, old, new, most)
    if action[0] in "%#":
        return _cut(value, action, word, budget)
    # An interval of the characters.
    start, _, count = word.partition(":")
    begin = whole(start.strip())
    length = whole(count.strip()) if count else len(value)
    if begin is None or length is None:
        return None
    return value[begin : begin + length]


def _cut(value: str, action: str, pattern: str, budget: Budget) -> str:
    """Return the text without the shortest end (`${A%pattern}`) or beginning (`${A#pattern}`) that fits; without
    the longest where the sign is doubled."""
    lengths = range(len(value) + 1)
    is_longest = len(action) == 2
    for length in reversed(lengths) if is_longest else lengths:
        budget.spend(length // 16)  # comparing costs less than making
        kept = len(value) - length
        if action[0] == "%" and matches(value[kept:], pattern):
            return value[:kept]
        if action[0] == "#" and matches(value[:length], pattern):
            return value[length:]
    return value


def matches(text: str, pattern: str) -> bool:
    """Return whether a pattern of the shell fits the text. Raises ShellError for a pattern of unusual length."""
    if len(pattern) > LONGEST_PATTERN:
        raise ShellError(
            f"a pattern has {len(pattern):,} characters: this is not a recipe."
        )
    return fnmatch.fnmatchcase(text, pattern)
