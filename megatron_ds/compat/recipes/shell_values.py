"""Expansion of words: `$NAME`, `${NAME:-x}`, arrays, `$((…))`, quotes; and tests such as `[[ $A -gt 0 ]]`.

A value that only a run of the script could know, such as `$1`, `$(date)` or a variable that is not set, is
*open*: its text stands between two marks. In a test it is empty, as in a shell that was given no argument.
"""

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .budget import LONGEST_EXPRESSION, LONGEST_PATTERN, Budget, whole
from .shell_tokens import CLOSE, OPEN, ShellError, skip_unit, tokens_of

IS_OPEN = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")
NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
PARAMETER = re.compile(
    r"(#|!)?([A-Za-z_]\w*|\d+|[@*#?])(\[[^\]]*\])?"
    r"(:?[-+=?]|%%?|##?|//?|\^\^?|,,?|:|$)(.*)",
    re.S,
)
PLAIN = re.compile(
    r"[^\\$`]*+"
)  # characters that stand for themselves inside of double quotes
LARGEST = 10**30  # of arithmetic


def opened(text: str) -> str:
    """An open value that is shown as `text`."""
    return OPEN + re.sub(f"[{OPEN}{CLOSE}]", "", text) + CLOSE


def shown(text: str) -> str:
    """The text without marks."""
    return IS_OPEN.sub(r"\1", text)


def closed(text: str) -> str:
    """The text with open values empty."""
    return IS_OPEN.sub("", text)


@dataclass
class Scope:
    """Variables of a script. arguments: of the script, $1 first; removed: names that it has unset; budget: of
    the characters of all values; output_of: what commands would print, None if that is not known.
    """

    variables: dict[str, str | list[str]] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    removed: set[str] = field(default_factory=set)
    budget: Budget = field(default_factory=Budget)
    output_of: Callable[[str], str | None] = lambda text: (
        None
    )  # of the commands in a `$(…)`

    def get(self, name: str) -> str | list[str] | None:
        """The value of a variable or an argument; None if it is not set."""
        if name in "@*":
            return self.arguments
        if name == "#":
            return str(len(self.arguments))
        if (number := whole(name)) is not None:
            return (
                self.arguments[number - 1]
                if 0 < number <= len(self.arguments)
                else None
            )
        return self.variables.get(name)

    def text(self, name: str) -> str:
        """The value as one word; an open value if it is not set, unless the script has unset it."""
        value = self.get(name)
        if isinstance(value, list):
            return " ".join(value)
        if value is None:
            return "" if name in self.removed else opened(f"${name}")
        return value

    def unset(self, name: str) -> None:
        """Remove a variable, which is then known to be empty."""
        self.variables.pop(name, None)
        self.removed.add(name)


# ------------------------------------------------------------------------------------------------- words
def fields_of(word: str, scope: Scope) -> list[str]:
    """The words that a word as written becomes; without quotes, values are split at blanks."""
    done: list[str] = []
    current: str | None = None
    # Quoted texts join the current word; other values end it at each blank.
    for text, is_quoted, is_list in _units(word, scope):
        if is_list:  # "${A[@]}": one field for each element
            for number, element in enumerate(text):
                if number and current is not None:
                    done.append(current)
                    current = None
                current = (current or "") + element
            continue
        if is_quoted:
            current = (current or "") + text
            continue
        # Blanks at the ends of an unquoted value separate it from its neighbours.
        parts = _split(text)
        if text[:1].isspace() and current is not None:
            done.append(current)
            current = None
        for number, part in enumerate(parts):
            if number:
                done.append(current)
                current = None
            current = (current or "") + part
        if text[-1:].isspace() and current is not None:
            done.append(current)
            current = None
    return done if current is None else [*done, current]


def value_of(word: str, scope: Scope) -> str:
    """The value of a word that is not split, as in an assignment."""
    return "".join(
        " ".join(text) if is_list else text for text, _, is_list in _units(word, scope)
    )


def array_of(word: str, scope: Scope) -> list[str]:
    """The elements of `(a "$B" …)`."""
    inner = word[1:-1]
    words = [token.text for token in tokens_of(inner) if not token.is_operator]
    return [element for text in words for element in fields_of(text, scope)]


def _split(text: str) -> list[str]:
    """The text at its blanks, except those inside of open values."""
    return re.findall(rf"(?:{OPEN}[^{OPEN}{CLOSE}]*{CLOSE}|[^\s])+", text)


def _units(word: str, scope: Scope) -> list[tuple]:
    """(text, is it quoted, is it a list) of each part of the word."""
    units = []
    at = 0
    scope.budget.spend(len(word))
    while at < len(word):
        end = skip_unit(word, at)
        part = word[at:end]
        if part[0] == "'":
            units.append((part[1:-1], True, False))
        elif part[0] == '"':
            units += _double_quoted(part[1:-1], scope)
        elif part[0] == "\\":
            units.append(("" if part == "\\\n" else part[1:], True, False))
        elif part[0] in "$`":
            value, at = _expansion(word, at, scope)
            units.append(
                (" ".join(value) if isinstance(value, list) else value, False, False)
            )
            continue
        else:
            units.append((part, True, False))
        at = end
    return units


def _double_quoted(inner: str, scope: Scope) -> list[tuple]:
    units = []
    text = ""
    at = 0
    while at < len(inner):
        if inner[at] == "\\" and at + 1 < len(inner) and inner[at + 1] in '$`"\\\n':
            text += inner[at + 1].replace("\n", "")
            at += 2
        elif inner[at] in "$`":
            value, at = _expansion(inner, at, scope)
            if isinstance(value, list):
                units += [(text, True, False)] * bool(text) + [(value, True, True)]
                text = ""
            else:
                text += value
        else:
            end = PLAIN.match(inner, at + 1).end()
            text += inner[at:end]
            at = end
    return [*units, (text, True, False)] if text or not units else units


def _expansion(text: str, at: int, scope: Scope) -> tuple[str | list[str], int]:
    """(the value of the expansion at `at`, the place after it)."""
    value, end = _unbounded_expansion(text, at, scope)
    scope.budget.spend(
        len(value) if isinstance(value, str) else len(value) + sum(map(len, value))
    )
    return value, end


def _unbounded_expansion(
    text: str, at: int, scope: Scope
) -> tuple[str | list[str], int]:
    if text[at] == "`" or text.startswith("$(", at) and not text.startswith("$((", at):
        end = skip_unit(text, at)
        return _command_value(text[at:end], scope), end
    if text.startswith("$((", at):
        end = skip_unit(text, at)
        return arithmetic(text[at + 3 : end - 2], scope), end
    if text.startswith("${", at):
        end = skip_unit(text, at)
        return _parameter(text[at + 2 : end - 1], scope), end
    name = NAME.match(text, at + 1)
    if name is None:
        return "$", at + 1
    value = scope.get(name[0])
    if isinstance(value, list) and name[0] not in "@*":
        value = value[0] if value else ""
    return scope.text(name[0]) if value is None else value, name.end()


def _command_value(text: str, scope: Scope) -> str:
    """`$(…)`: known for the folder of the script and for what `echo` prints, open otherwise."""
    words = text.strip("$()`").split()
    if words[:1] == ["basename"] and len(words) == 2:
        return value_of(words[1].strip('"'), scope).rpartition("/")[2]
    if words == ["pwd"]:
        return "."
    printed = scope.output_of(text[2:-1] if text.startswith("$(") else text.strip("`"))
    return opened(text) if printed is None else printed


def _parameter(inner: str, scope: Scope) -> str | list[str]:
    """The value of `${inner}`."""
    match = PARAMETER.fullmatch(inner)
    if match is None:
        return opened("${" + inner + "}")
    prefix, name, index, action, word = match.groups()
    value = scope.get(name)
    if prefix == "!":
        target = scope.get(closed(scope.text(name)) or "0")
        return target if target is not None else opened("${" + inner + "}")
    if index in ("[@]", "[*]"):
        value = [value] if isinstance(value, str) else value
        value = [] if value is None else value
    elif isinstance(value, list) and name not in "@*":
        place = closed(arithmetic(index[1:-1], scope)) if index else "0"
        number = whole(place)
        value = value[number] if number is not None and number < len(value) else None
    if prefix == "#":
        return str(len(value or ""))
    if action in ("", ":") and not word:
        return scope.text(name) if value is None else value
    return _acted(value, name, action, word, inner, scope)


def _acted(
    value: str | list[str] | None,
    name: str,
    action: str,
    word: str,
    inner: str,
    scope: Scope,
) -> str | list[str]:
    """The value after `:-word` and the like. An open value counts as not set."""
    # Without a colon, an empty value counts as set.
    is_set = bool(closed(value)) if isinstance(value, str) else bool(value)
    if action.endswith(("-", "=", "+", "?")):
        if (
            not action.startswith(":")
            and isinstance(value, str)
            and not IS_OPEN.search(value)
        ):
            is_set = True
        # Each operator chooses between the value and the word.
        if action.endswith("+"):
            return " ".join(fields_of(word, scope)) if is_set else ""
        if is_set:
            return value
        if action.endswith("?"):
            return scope.text(name)
        default = value_of(word, scope)
        if action.endswith("="):
            scope.variables[name] = default
        return default
    # The remaining operators edit texts and leave lists as they are.
    if not isinstance(value, str):
        return opened("${" + inner + "}") if value is None else value
    return _edited(
        value,
        action,
        value_of(word, scope) if action != ":" else word,
        inner,
        scope.budget,
    )


def _edited(value: str, action: str, word: str, inner: str, budget: Budget) -> str:
    """`${A%x}`, `${A##x}`, `${A/x/y}`, `${A^^}`, `${A:0:3}`."""
    if action in ("^^", ",,"):
        return value.upper() if action == "^^" else value.lower()
    if action[0] == "/":
        old, _, new = word.partition("/")
        if not old:
            return value
        count = -1 if action == "//" else 1
        return budget.replaced(value, old, new, count)
    if action[0] in "%#":
        return _cut(value, action, word, budget)
    start, _, count = word.partition(":")
    begin = whole(start.strip())
    length = whole(count.strip()) if count else len(value)
    if begin is None or length is None:
        return opened("${" + inner + "}")
    return value[begin : begin + length]


def _cut(value: str, action: str, pattern: str, budget: Budget) -> str:
    """`${A%pattern}` and `${A#pattern}`: without the shortest end or beginning that fits, or the longest."""
    lengths = range(len(value) + 1)
    for length in reversed(lengths) if len(action) == 2 else lengths:
        budget.spend(length // 16)  # comparing costs less than making
        kept = len(value) - length
        if action[0] == "%" and matches(value[kept:], pattern):
            return value[:kept]
        if action[0] == "#" and matches(value[:length], pattern):
            return value[length:]
    return value


def matches(text: str, pattern: str) -> bool:
    """Whether a pattern of the shell fits the text. Raises ShellError for a pattern of unusual length."""
    if len(pattern) > LONGEST_PATTERN:
        raise ShellError(
            f"a pattern has {len(pattern):,} characters: this is not a recipe."
        )
    return fnmatch.fnmatchcase(text, pattern)


# --------------------------------------------------------------------------------------------- arithmetic
BINARY: Mapping[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def arithmetic(text: str, scope: Scope) -> str:
    """The value of `$((text))`; open if a part of it is, or if it cannot be computed."""

    def named(match: re.Match) -> str:
        value = scope.text(match[0])
        # A name whose value is no number is open. `_number` reads no long ones.
        return (closed(value) if len(value) <= LONGEST_EXPRESSION else "") or "x"

    expanded = value_of(text, scope)
    if len(expanded) > LONGEST_EXPRESSION:
        return opened(f"$(({shown(text)[:20]}…))")
    numbers = re.sub(
        r"[A-Za-z_]\w*", named, shown(expanded) if not IS_OPEN.search(expanded) else "x"
    )
    ternary = re.fullmatch(r"(.*)\?(.*):(.*)", numbers, re.S)
    if ternary:
        numbers = f"({ternary[2]}) if ({ternary[1]}) else ({ternary[3]})"
    numbers = re.sub(r"/+", "//", numbers).replace("&&", " and ").replace("||", " or ")
    try:
        return str(int(_number(ast.parse(numbers.strip(), mode="eval").body)))
    except (
        SyntaxError,
        ValueError,
        ZeroDivisionError,
        OverflowError,
        RecursionError,
        MemoryError,
    ):
        return opened(f"$(({shown(text)}))")


def _number(node: ast.AST) -> int:
    """The value of a tree of numbers and operators. Raises ValueError for anything else."""
    # Powers are limited before they are computed, since their numbers grow fastest.
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        value = node.value
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base = _number(node.left)
        power = _number(node.right)
        if not 0 <= power <= 64 or abs(base) > 2**16:
            raise ValueError("too large")
        value = base**power
    elif isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        value = BINARY[type(node.op)](_number(node.left), _number(node.right))
    elif (
        isinstance(node, ast.Compare)
        and len(node.ops) == 1
        and type(node.ops[0]) in BINARY
    ):
        value = BINARY[type(node.ops[0])](
            _number(node.left), _number(node.comparators[0])
        )
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_number(node.operand)
    elif isinstance(node, ast.IfExp):
        value = _number(node.body) if _number(node.test) else _number(node.orelse)
    elif isinstance(node, ast.BoolOp):
        values = [bool(_number(value)) for value in node.values]
        value = all(values) if isinstance(node.op, ast.And) else any(values)
    else:
        raise ValueError("not arithmetic")
    # Every intermediate value is limited.
    if abs(value) > LARGEST:
        raise ValueError("too large")
    return value


# -------------------------------------------------------------------------------------------------- tests
NUMERIC = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-lt": operator.lt,
    "-ge": operator.ge,
    "-le": operator.le,
}


def is_true(words: Sequence[str], scope: Scope) -> bool:
    """The result of a test: the words of `[ … ]`, `[[ … ]]` or `((…))`, as written. Files do not exist."""
    if words[0].startswith("(("):
        return closed(arithmetic(words[0][2:-2], scope)) not in ("", "0")
    inner = [word for word in words[1:] if word not in ("]", "]]", "(", ")")]
    for joint, combine in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
        if joint in inner[1:]:
            at = inner.index(joint, 1)
            return combine(
                is_true([words[0], *part], scope)
                for part in (inner[:at], inner[at + 1 :])
            )
    return _condition(inner, scope)


def _condition(words: Sequence[str], scope: Scope) -> bool:
    # The number of words gives the kind of test: a text, a unary or a binary operator.
    if words[:1] == ["!"]:
        return not _condition(words[1:], scope)
    values = [closed(value_of(word, scope)) for word in words]
    if len(values) == 1:
        return values[0] != ""
    if len(values) == 2:
        return {
            "-n": values[1] != "",
            "-z": values[1] == "",
            "-v": words[1] in scope.variables,
        }.get(values[0], False)
    if len(values) != 3:
        return False
    # Numbers compare by value, where a text that is no number counts as 0.
    left, relation, right = values
    if relation in NUMERIC:
        texts = (left.strip(), right.strip())
        numbers = [
            int(text) if re.fullmatch(r"[+-]?[0-9]{1,30}", text) else 0
            for text in texts
        ]
        return NUMERIC[relation](*numbers)
    if relation in ("=", "==", "!="):
        pattern = right.replace('"', "")
        is_equal = matches(left, pattern) if "*" in pattern else left == pattern
        return is_equal != (relation == "!=")
    return {"<": left < right, ">": left > right}.get(relation, False)
