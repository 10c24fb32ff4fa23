"""Expansion of words: `$NAME`, `${NAME:-x}`, arrays, `$((…))`, quotes.

A value that only a run of the script could know, such as `$1`, `$(date)` or a variable that is not set, is
*open*: its text stands between two marks. In a test it is empty, as in a shell that was given no argument.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .budget import LONGEST_EXPRESSION, Budget, whole
from .shell_arithmetic import NOT_COMPUTED, computed
from .shell_edits import edited_value
from .shell_tokens import CLOSE, OPEN, end_of_run, skip_unit, tokens_of

IS_OPEN = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")
NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
PARAMETER = re.compile(
    r"(#|!)?([A-Za-z_]\w*|\d+|[@*#?])(\[[^\]]*\])?"
    r"(:?[-+=?]|%%?|##?|//?|\^\^?|,,?|:|$)(.*)",
    re.S,
)
CHOOSING = ("-", "=", "+", "?")  # operators between a value and a word
# characters that stand for themselves inside of double quotes
PLAIN = re.compile(r"[^\\$`]*+")


def opened(text: str) -> str:
    """Return an open value that is shown as `text`."""
    return OPEN + re.sub(f"[{OPEN}{CLOSE}]", "", text) + CLOSE


def shown(text: str) -> str:
    """Return the text without marks."""
    return IS_OPEN.sub(r"\1", text)


def closed(text: str) -> str:
    """Return the text with open values empty."""
    return IS_OPEN.sub("", text)


# (a text or the elements of an array, is it quoted), of a part of a word.
Unit = tuple[str | list[str], bool]


@dataclass
class Scope:
    """Variables of a script.

    arguments  of the script, $1 first
    removed    names that it has unset
    budget     of the characters of all values
    output_of  text of the commands in a `$(…)` → what they would print; None if that is not known
    """

    variables: dict[str, str | list[str]] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    removed: set[str] = field(default_factory=set)
    budget: Budget = field(default_factory=Budget)
    output_of: Callable[[str], str | None] = lambda text: None

    def get(self, name: str) -> str | list[str] | None:
        """Return the value of a variable or an argument; None if it is not set."""
        if name in "@*":
            return self.arguments
        if name == "#":
            return str(len(self.arguments))
        number = whole(name)
        if number is not None:
            is_given = 0 < number <= len(self.arguments)
            return self.arguments[number - 1] if is_given else None
        return self.variables.get(name)

    def text(self, name: str) -> str:
        """Return the value as one word; an open value if it is not set, unless the script has unset it."""
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
class _Fields:
    """The words into which one word is split. The last of them may still grow."""

    def __init__(self):
        self.done: list[str] = []
        self._current: str | None = None

    def grow(self, text: str) -> None:
        """Add text to the current word, which may be empty."""
        self._current = (self._current or "") + text

    def end(self) -> None:
        """End the current word, if there is one."""
        if self._current is not None:
            self.done.append(self._current)
            self._current = None

    def grow_each(self, texts: Sequence[str]) -> None:
        """The first text joins the current word; each of the others begins a new one."""
        for number, text in enumerate(texts):
            if number:
                self.end()
            self.grow(text)


def fields_of(word: str, scope: Scope) -> list[str]:
    """Return the words that a word as written becomes. A value without quotes is split at its blanks."""
    fields = _Fields()
    for text, is_quoted in _units(word, scope):
        # "${A[@]}" is one field for each element.
        if isinstance(text, list):
            fields.grow_each(text)
            continue
        if is_quoted:
            fields.grow(text)
            continue
        # Blanks at the ends of an unquoted value separate it from its neighbours.
        if text[:1].isspace():
            fields.end()
        fields.grow_each(_split(text))
        if text[-1:].isspace():
            fields.end()
    fields.end()
    return fields.done


def value_of(word: str, scope: Scope) -> str:
    """Return the value of a word that is not split, as in an assignment."""
    texts = []
    for text, _ in _units(word, scope):
        if isinstance(text, list):
            text = " ".join(text)
        texts.append(text)
    return "".join(texts)


def array_of(word: str, scope: Scope) -> list[str]:
    """Return the elements of `(a "$B" …)`."""
    elements: list[str] = []
    for token in tokens_of(word[1:-1]):
        if not token.is_operator:
            elements += fields_of(token.text, scope)
    return elements


def _split(text: str) -> list[str]:
    """Return the text at its blanks, except those inside of open values."""
    return re.findall(rf"(?:{OPEN}[^{OPEN}{CLOSE}]*{CLOSE}|[^\s])+", text)


def _units(word: str, scope: Scope) -> list[Unit]:
    """Return the units of each part of the word."""
    units: list[Unit] = []
    at = 0
    scope.budget.spend(len(word))
    while at < len(word):
        end = skip_unit(word, at)
        part = word[at:end]
        first = part[0]
        # Its first character gives the kind of a part.
        if first == "'":
            units.append((part[1:-1], True))
        elif first == '"':
            units += _double_quoted(part[1:-1], scope)
        elif part == "\\\n":
            units.append(("", True))
        elif first == "\\":
            units.append((part[1:], True))
        elif first in "$`":
            # A list without quotes is one text, which is split at blanks later.
            value, at = _expansion(word, at, scope)
            if isinstance(value, list):
                value = " ".join(value)
            units.append((value, False))
            continue
        else:
            units.append((part, True))
        at = end
    return units


def _double_quoted(inner: str, scope: Scope) -> list[Unit]:
    """Return the units of the text inside of double quotes."""
    units: list[Unit] = []
    text = ""
    at = 0
    while at < len(inner):
        following = inner[at + 1 : at + 2]
        # Escaped characters, then values, then runs of plain characters.
        if inner[at] == "\\" and following and following in '$`"\\\n':
            # A backslash before a line break removes it.
            text += following.replace("\n", "")
            at += 2
        elif inner[at] in "$`":
            value, at = _expansion(inner, at, scope)
            if isinstance(value, str):
                text += value
                continue
            # A list ends the text before it.
            if text:
                units.append((text, True))
            units.append((value, True))
            text = ""
        else:
            end = end_of_run(PLAIN, inner, at + 1)
            text += inner[at:end]
            at = end
    if text or not units:
        units.append((text, True))
    return units


def _expansion(text: str, at: int, scope: Scope) -> tuple[str | list[str], int]:
    """Return (the value of the expansion at `at`, the place after it). Raises ShellError when the budget is spent."""
    value, end = _unbounded_expansion(text, at, scope)
    cost = len(value)
    if isinstance(value, list):
        cost += sum(map(len, value))
    scope.budget.spend(cost)
    return value, end


def _unbounded_expansion(
    text: str, at: int, scope: Scope
) -> tuple[str | list[str], int]:
    """Return the result of `_expansion` without taking from the budget."""
    # $((…))
    if text.startswith("$((", at):
        end = skip_unit(text, at)
        return arithmetic(text[at + 3 : end - 2], scope), end
    # $(…) and `…`
    if text[at] == "`" or text.startswith("$(", at):
        end = skip_unit(text, at)
        return _command_value(text[at:end], scope), end
    # ${…}
    if text.startswith("${", at):
        end = skip_unit(text, at)
        return _parameter(text[at + 2 : end - 1], scope), end
    # $NAME; a dollar sign before anything else is a character.
    match = NAME.match(text, at + 1)
    if match is None:
        return "$", at + 1
    name = match[0]
    value = scope.get(name)
    # The name of an array alone is its first element.
    if isinstance(value, list) and name not in "@*":
        value = value[0] if value else ""
    if value is None:
        value = scope.text(name)
    return value, match.end()


def _command_value(text: str, scope: Scope) -> str:
    """`$(…)`: known for the folder of the script and for what `echo` prints, open otherwise."""
    # Scripts compute the folder that they stand in, and names of files.
    words = text.strip("$()`").split()
    if words[:1] == ["basename"] and len(words) == 2:
        return value_of(words[1].strip('"'), scope).rpartition("/")[2]
    if words == ["pwd"]:
        return "."
    # Other commands are followed; what they print is known if all of them are.
    inner = text[2:-1] if text.startswith("$(") else text.strip("`")
    printed = scope.output_of(inner)
    return opened(text) if printed is None else printed


def _parameter(inner: str, scope: Scope) -> str | list[str]:
    """Return the value of `${inner}`."""
    match = PARAMETER.fullmatch(inner)
    if match is None:
        return _unknown(inner)
    prefix, name, index, action, word = match.groups()
    value = scope.get(name)
    # ${!NAME} is the value of the variable that NAME names.
    if prefix == "!":
        other = closed(scope.text(name)) or "0"
        target = scope.get(other)
        return _unknown(inner) if target is None else target
    # An index chooses all elements, or one of them.
    if index in ("[@]", "[*]"):
        value = _as_list(value)
    elif isinstance(value, list) and name not in "@*":
        value = _element(value, index, scope)
    # ${#NAME} is its length. Without an operator the value is returned as it is.
    if prefix == "#":
        return str(len(value or ""))
    if action in ("", ":") and not word:
        return scope.text(name) if value is None else value
    return _acted(value, name, action, word, inner, scope)


def _element(values: list[str], index: str, scope: Scope) -> str | None:
    """Return the element at an index such as "[2]", the first without one; None if there is none."""
    place = "0"
    if index:
        place = closed(arithmetic(index[1:-1], scope))
    number = whole(place)
    if number is None or number >= len(values):
        return None
    return values[number]


def _unknown(inner: str) -> str:
    """Return `${inner}` as an open value."""
    return opened("${" + inner + "}")


def _as_list(value: str | list[str] | None) -> list[str]:
    """Return the elements of a variable; one of a text, none of a variable that is not set."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    return value


def _acted(
    value: str | list[str] | None,
    name: str,
    action: str,
    word: str,
    inner: str,
    scope: Scope,
) -> str | list[str]:
    """Return the value after an operator such as `:-word`.

    value   of the variable `name`; an open one counts as not set
    action  the operator
    word    what follows it, as written
    inner   the whole expansion, for open values
    """
    # Without a colon, an empty value counts as set.
    is_set = bool(closed(value)) if isinstance(value, str) else bool(value)
    if action.endswith(CHOOSING):
        has_colon = action.startswith(":")
        if not has_colon and isinstance(value, str) and not IS_OPEN.search(value):
            is_set = True
        # Each operator chooses between the value and the word.
        if action.endswith("+"):
            return " ".join(fields_of(word, scope)) if is_set else ""
        if is_set and value is not None:
            return value
        if action.endswith("?"):
            return scope.text(name)
        default = value_of(word, scope)
        if action.endswith("="):
            scope.variables[name] = default
        return default
    # The remaining operators edit texts and leave lists as they are.
    if not isinstance(value, str):
        return _unknown(inner) if value is None else value
    if action != ":":
        word = value_of(word, scope)
    edited = edited_value(value, action, word, scope.budget)
    return _unknown(inner) if edited is None else edited


TERNARY = re.compile(r"(.*)\?(.*):(.*)", re.S)


def arithmetic(text: str, scope: Scope) -> str:
    """Return the value of `$((text))`; open if a part of it is, or if it cannot be computed."""

    def named(match: re.Match) -> str:
        value = scope.text(match[0])
        # A name whose value is no number is open. `computed` reads no long ones.
        if len(value) > LONGEST_EXPRESSION:
            return "x"
        return closed(value) or "x"

    # Long expressions are shown by their beginning.
    expanded = value_of(text, scope)
    if len(expanded) > LONGEST_EXPRESSION:
        beginning = shown(text)[:20]
        return opened(f"$(({beginning}…))")
    # Python's form of the expression, in which an open value is the name x.
    source = "x" if IS_OPEN.search(expanded) else shown(expanded)
    numbers = re.sub(r"[A-Za-z_]\w*", named, source)
    ternary = TERNARY.fullmatch(numbers)
    if ternary:
        condition, yes, no = ternary.groups()
        numbers = f"({yes}) if ({condition}) else ({no})"
    numbers = re.sub(r"/+", "//", numbers)
    numbers = numbers.replace("&&", " and ").replace("||", " or ")
    # Anything that is not arithmetic of numbers has no value.
    try:
        return str(computed(numbers.strip()))
    except NOT_COMPUTED:
        return opened(f"$(({shown(text)}))")
