"""The rounds of a `for` loop of a shell script: the values that its variable takes."""

import re
from collections.abc import Iterator, Sequence

from .shell_syntax import COUNTING
from .shell_values import Scope, arithmetic, fields_of

MOST_ROUNDS = 100  # of one loop; the rest is not read
NUMBER = re.compile(r"-?[0-9]+")
COUNTED = re.compile(
    r"\(\(\s*(\w+)\s*=\s*([^;]+);\s*\1\s*(<=?)\s*([^;]+);"
    r"\s*(?:\1\s*\+\+|\+\+\s*\1|\1\s*\+=\s*([^;]+?))\s*\)\)"
)


def rounds(name: str, words: Sequence[str], scope: Scope) -> Iterator[tuple[str, str]]:
    """Yield (variable, value) of each round, at most MOST_ROUNDS. The variable is "" for a group in braces."""
    if name == COUNTING:
        yield from _counted(words[0], scope)
        return
    # A word can expand to several values.
    values = [value for word in words for value in fields_of(word, scope)]
    for value in values[:MOST_ROUNDS]:
        yield name, value


def _counted(text: str, scope: Scope) -> Iterator[tuple[str, str]]:
    """Yield the rounds of `((i=first; i<end; i++))`; none if a number is not known, or for another form."""
    match = COUNTED.fullmatch(text)
    if match is None:
        return
    # The three numbers must be known.
    name, first, relation, end, step = match.groups()
    texts = (first, end, step or "1")
    numbers = [arithmetic(part, scope) for part in texts]
    if not all(NUMBER.fullmatch(number) for number in numbers):
        return
    begin, bound, by = map(int, numbers)
    if by <= 0:
        return
    if relation == "<=":
        bound += 1
    counted = range(begin, bound, by)
    for value in counted[:MOST_ROUNDS]:
        yield name, str(value)
