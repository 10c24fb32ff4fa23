"""Tests of a shell script: `[ -n "$A" ]`, `[[ $A -gt 0 && $B == x* ]]`, `((A > 0))`.

Open values count as empty, and files as absent.
"""

import operator
import re
from collections.abc import Sequence

from .budget import MOST_CONDITIONS
from .shell_edits import matches
from .shell_tokens import ShellError
from .shell_values import Scope, arithmetic, closed, value_of

NUMBER = re.compile(r"[+-]?[0-9]{1,30}")
NUMERIC = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-lt": operator.lt,
    "-ge": operator.ge,
    "-le": operator.le,
}


JOINTS = {
    "||": any,
    "-o": any,
    "&&": all,
    "-a": all,
}


def is_true(words: Sequence[str], scope: Scope) -> bool:
    """Return the result of a test: the words of `[ … ]`, `[[ … ]]` or `((…))`, as written. Files do not exist.
    Raises ShellError for more than MOST_CONDITIONS words.
    """
    if len(words) > MOST_CONDITIONS:
        raise ShellError(
            f"a test has {len(words):,} words: this is not a recipe, its conditions are nested too deep."
        )
    # A number is true unless it is 0 or open.
    first = words[0]
    if first.startswith("(("):
        result = closed(arithmetic(first[2:-2], scope))
        return result not in ("", "0")
    inner = [word for word in words[1:] if word not in ("]", "]]", "(", ")")]
    # A test is divided at its first "or", or else at its first "and".
    for joint, combine in JOINTS.items():
        if joint in inner[1:]:
            at = inner.index(joint, 1)
            parts = (inner[:at], inner[at + 1 :])
            return combine(is_true([first, *part], scope) for part in parts)
    return _condition(inner, scope)


def _condition(words: Sequence[str], scope: Scope) -> bool:
    """Return the result of a test without "and" and "or"."""
    # The number of words gives the kind of test: a text, a unary or a binary operator.
    if words[:1] == ["!"]:
        return not _condition(words[1:], scope)
    values = [closed(value_of(word, scope)) for word in words]
    if len(values) == 1:
        return values[0] != ""
    if len(values) == 2:
        results = {
            "-n": values[1] != "",
            "-z": values[1] == "",
            "-v": words[1] in scope.variables,
        }
        return results.get(values[0], False)
    if len(values) != 3:
        return False
    # Numbers compare by value, where a text that is no number counts as 0.
    left, relation, right = values
    if relation in NUMERIC:
        texts = (left.strip(), right.strip())
        numbers = [int(text) if NUMBER.fullmatch(text) else 0 for text in texts]
        return NUMERIC[relation](*numbers)
    # An asterisk makes a pattern of the text at the right.
    if relation in ("=", "==", "!="):
        pattern = right.replace('"', "")
        is_equal = matches(left, pattern) if "*" in pattern else left == pattern
        return is_equal != (relation == "!=")
    if relation == "<":
        return left < right
    return relation == ">" and left > right
