"""The text of a shell script → its words, as written, and operators."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import ConfigError

# around a value that only a run of the script could know
OPEN = "\x01"
CLOSE = "\x02"
# A gap that the reader of a recipe fills: DATA_PATH=<Specify path>_text_document
GAP = re.compile(
    r"(?m)(^[ \t]*(?:export[ \t]+)?\w+=|(?<![\w-])--[\w-]+ )"
    r"<(?=[A-Z]|path|specify|slurm|megatron)([^<>\n]+)>"
)
ARRAY = re.compile(r"[A-Za-z_]\w*\+?=$")
# Characters that no shell gives a meaning outside of `$`: a long word is read in few steps.
UNMARKED = re.compile(r"[A-Za-z0-9_./:,-]*")
CLOSING = {"(": ")", "{": "}", "[": "]"}


class ShellError(ConfigError):
    """The text is not a shell script that can be read. The message has the line number."""


@dataclass(frozen=True)
class Token:
    """text: a word as written, or an operator; body: of a here-document, and whether it is expanded."""

    text: str
    line: int
    is_operator: bool = False
    body: str | None = None
    is_expanded: bool = True


OPERATORS = (
    "&>>",
    "<<<",
    "<<-",
    "&>",
    ">>",
    "<<",
    "&&",
    "||",
    ";;",
    ">&",
    "<&",
    "|&",
    "\n",
    ";",
    "|",
    "&",
    "(",
    ")",
    "<",
    ">",
)


def tokens_of(text: str) -> Iterator[Token]:
    """Yield the words and operators, in order. A here-document is the body of its `<<`."""
    at = 0
    line = 1
    waiting = []
    # Line ends are unified, and gaps are marked as open values.
    text = GAP.sub(rf"\1{OPEN}<\2>{CLOSE}", text.replace("\r\n", "\n"))
    # Each branch reads one blank, comment, operator or word.
    while at < len(text):
        if text[at] in " \t":
            at += 1
        elif text.startswith("\\\n", at):
            at = at + 2
            line = line + 1
        elif text[at] == "#":
            at = _line_end(text, at)
        elif text.startswith("((", at):  # arithmetic
            end = _closing(text, at, line)
            yield Token(text[at:end], line)
            line += text.count("\n", at, end)
            at = end
        # Operators. Here-documents begin after the end of their line.
        elif operator := next((o for o in OPERATORS if text.startswith(o, at)), None):
            at += len(operator)
            if operator in ("<<", "<<-"):
                last, at = scan_word(text, _skip_blanks(text, at), line)
                waiting.append((last, operator == "<<-"))
            elif operator == "\n":
                line += 1
                for last, strips in waiting:
                    body, at = _document(text, at, last, strips)
                    is_quoted = any(quote in last for quote in "'\"\\")
                    yield Token("<<", line, True, body, not is_quoted)
                    line += body.count("\n") + 1
                waiting = []
                yield Token("\n", line, True)
            else:
                yield Token(operator, line, True)
        else:
            # A word; a number before a redirection is none, as in 2>&1.
            word, after = scan_word(text, at, line)
            # Part of a redirection, as in 2>&1.
            if word.isdecimal() and text[after : after + 1] in (
                "<",
                ">",
            ):
                at = after
                continue
            yield Token(word, line)
            line += text.count("\n", at, after)
            at = after


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _skip_blanks(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t"):
        at += 1
    return at


def _document(text: str, at: int, end: str, strips: bool) -> tuple[str, int]:
    """Return (the lines up to the word `end`, the place after them)."""
    end = end.strip("'\"").replace("\\", "")
    lines = []
    while at < len(text):
        stop = _line_end(text, at)
        line = text[at:stop]
        at = stop + 1
        line = line.lstrip("\t") if strips else line
        if line == end:
            break
        lines.append(line)
    return "\n".join(lines), min(at, len(text)) - (
        at <= len(text) and text[at - 1 : at] == "\n"
    )


def scan_word(text: str, at: int, line: int = 0) -> tuple[str, int]:
    """Return (the word that begins at `at`, as written, the place after it). An array `NAME=(…)` is one word."""
    start = at
    while at < len(text) and text[at] not in " \t\n;|&<>)":
        if text[at] == "(":
            if not ARRAY.fullmatch(text[start:at]):
                break
            at = _closing(text, at, line)
        else:
            at = skip_unit(text, at, line)
    return text[start:at], at


def skip_unit(text: str, at: int, line: int = 0) -> int:
    """Return the place after the quoted text, the expansion or the plain characters at `at`."""
    character = text[at]
    if character == OPEN:
        end = text.find(CLOSE, at)
        return len(text) if end < 0 else end + 1
    if character == "\\":
        return min(at + 2, len(text))
    if character in "'`":
        end = text.find(character, at + 1)
        if end < 0:
            raise ShellError(f"line {line}: {character} is not closed.")
        return end + 1
    if character == '"':
        at += 1
        while at < len(text) and text[at] != '"':
            at = at + 1 if text[at] == "'" else skip_unit(text, at, line)
        if at >= len(text):
            raise ShellError(f'line {line}: " is not closed.')
        return at + 1
    # Expansions in brackets, and runs of plain characters.
    if character == "$" and text[at + 1 : at + 2] in ("(", "{"):
        return _closing(text, at + 1, line)
    return end_of_run(UNMARKED, text, at + 1)


def end_of_run(characters: re.Pattern[str], text: str, at: int) -> int:
    """Return the place after the characters at `at`; `at` if there are none."""
    run = characters.match(text, at)
    return at if run is None else run.end()


def _closing(text: str, at: int, line: int) -> int:
    """Return the place after the bracket that closes the one at `at`; comments count in an array only."""
    opening = text[at]
    closing = CLOSING[text[at]]
    depth = 0
    while at < len(text):
        if text[at] == opening:
            depth = depth + 1
            at = at + 1
        elif text[at] == closing:
            depth = depth - 1
            at = at + 1
            if depth == 0:
                return at
        elif text[at] == "#" and opening == "(" and text[at - 1] in " \t\n":
            at = _line_end(text, at)
        else:
            at = skip_unit(text, at, line)
    raise ShellError(f"line {line}: {opening} is not closed.")
