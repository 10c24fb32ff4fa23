"""The text of a shell script → its words, as written, and operators."""

import re
from dataclasses import dataclass, replace

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
# Characters that neither end a word nor begin a part of it: a long word is read in few steps.
UNMARKED = re.compile(rf"[^{OPEN}\\'\"`$ \t\n;|&<>(){{}}#]*+")
CLOSING = {"(": ")", "{": "}"}


class ShellError(ConfigError):
    """The text is not a shell script that can be read. The message has the line number."""


@dataclass(frozen=True)
class Token:
    """text: a word as written, or an operator; body: of the here-document after a `<<`, and whether it is expanded."""

    text: str
    line: int
    is_operator: bool = False
    body: str | None = None
    is_expanded: bool = True


OPERATORS = (
    "&>>",
    ";;&",
    "<<<",
    "<<-",
    "&>",
    ">>",
    "<<",
    "&&",
    "||",
    ";;",
    ";&",
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


def tokens_of(text: str) -> list[Token]:
    """Return the words and operators, in order. Raises ShellError for a quote or a bracket that is not closed."""
    at = 0
    line = 1
    tokens: list[Token] = []
    waiting: list[tuple[int, str]] = []  # places of `<<`, and the words that end them
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
        # Arithmetic, and commands in place of a file.
        elif text.startswith(("((", "<(", ">("), at):
            end = _closing(text, text.index("(", at), line)
            tokens.append(Token(text[at:end], line))
            line += text.count("\n", at, end)
            at = end
        # Operators. The body of a here-document begins after the end of its line.
        elif operator := next((o for o in OPERATORS if text.startswith(o, at)), None):
            at += len(operator)
            if operator in ("<<", "<<-"):
                last, at = scan_word(text, _skip_blanks(text, at), line)
                waiting.append((len(tokens), last))
            tokens.append(Token(operator, line, True))
            if operator == "\n":
                line += 1
                for place, last in waiting:
                    begin = at
                    start = tokens[place]
                    body, at = _document(text, at, last, start.text == "<<-")
                    line += text.count("\n", begin, at)
                    # Quotes around its last word keep the values as they are written.
                    is_quoted = any(quote in last for quote in "'\"\\")
                    tokens[place] = replace(
                        start,
                        body=body,
                        is_expanded=not is_quoted,
                    )
                waiting = []
        else:
            # A word; a number before a redirection is none, as in 2>&1.
            word, after = scan_word(text, at, line)
            is_number = word.isdecimal() and text[after : after + 1] in ("<", ">")
            if not is_number:
                tokens.append(Token(word, line))
                line += text.count("\n", at, after)
            at = after
    return tokens


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _skip_blanks(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t"):
        at += 1
    return at


def _document(text: str, at: int, end: str, strips: bool) -> tuple[str, int]:
    """Return (the lines up to the word `end`, the place after its line)."""
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
    return "\n".join(lines), min(at, len(text))


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
