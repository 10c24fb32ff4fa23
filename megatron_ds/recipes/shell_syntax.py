"""The text of a shell script → its statements, as far as training recipes need them. Nothing is executed.

    Command   words as written, with quotes and `$`; the texts that redirections read and the files they write
    Pipe      commands joined by `|`
    If, For, Case, Function   with their bodies; a `while` is a For without words, whose body is not read

    AndOr     statements joined by `&&` and `||`
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import ConfigError

OPEN, CLOSE = "\x01", "\x02"            # around a value that only a run of the script could know
# A gap that the reader of a recipe fills: DATA_PATH=<Specify path>_text_document
GAP = re.compile(r"(?m)(^\s*(?:export\s+)?\w+=|--[\w-]+ )<(?=[A-Z]|path|specify|slurm|megatron)([^<>\n]+)>")
ARRAY = re.compile(r"[A-Za-z_]\w*\+?=$")
CLOSING = {"(": ")", "{": "}", "[": "]"}
ENDS = {"fi", "done", "esac", "then", "do", "elif", "else", "}", ";;", ")"}
DEEPEST = 60                             # nested blocks of a script; more is not a recipe


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


@dataclass(frozen=True)
class Command:
    """words as written; writes: the target of `>`; document: its here-document."""

    words: tuple[str, ...]
    line: int
    writes: str | None = None
    document: str | None = None
    is_literal: bool = False


@dataclass(frozen=True)
class Pipe:
    """Commands joined by `|`."""

    commands: tuple[Command, ...]


@dataclass(frozen=True)
class AndOr:
    """(operator before it, statement), the first with ""."""

    parts: tuple[tuple[str, "Statement"], ...]


@dataclass(frozen=True)
class If:
    """branches: (statements of the condition, body); the last condition is () for `else`."""

    branches: tuple[tuple[tuple, tuple], ...]


@dataclass(frozen=True)
class For:
    """name takes the values of the words; () for a `while`."""

    name: str
    words: tuple[str, ...]
    body: tuple


@dataclass(frozen=True)
class Case:
    """branches: (patterns, body)."""

    word: str
    branches: tuple[tuple[tuple[str, ...], tuple], ...]


@dataclass(frozen=True)
class Function:
    """A definition."""

    name: str
    body: tuple


Statement = Command | Pipe | AndOr | If | For | Case | Function


def statements_of(text: str) -> tuple[Statement, ...]:
    """The statements of a script. Raises ShellError."""
    return Parser(list(tokens_of(text))).script()


# ------------------------------------------------------------------------------------------------- tokens
OPERATORS = ("&>>", "<<<", "<<-", "&>", ">>", "<<", "&&", "||", ";;", ">&", "<&", "|&", "\n", ";", "|", "&",
             "(", ")", "<", ">")


def tokens_of(text: str) -> Iterator[Token]:
    """Words and operators, in order. A here-document is the body of its `<<`."""
    at, line, waiting = 0, 1, []
    text = GAP.sub(rf"\1{OPEN}<\2>{CLOSE}", text.replace("\r\n", "\n"))
    while at < len(text):
        if text[at] in " \t":
            at += 1
        elif text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif text[at] == "#":
            at = _line_end(text, at)
        elif text.startswith("((", at):                               # arithmetic
            end = _closing(text, at, line)
            yield Token(text[at:end], line)
            line += text.count("\n", at, end)
            at = end
        elif operator := next((o for o in OPERATORS if text.startswith(o, at)), None):
            at += len(operator)
            if operator in ("<<", "<<-"):
                end, at = scan_word(text, _skip_blanks(text, at), line)
                waiting.append((end, operator == "<<-", line))
            elif operator == "\n":
                line += 1
                for end, strips, _ in waiting:
                    body, at = _document(text, at, end, strips)
                    yield Token("<<", line, True, body, not any(quote in end for quote in "'\"\\"))
                    line += body.count("\n") + 1
                waiting = []
                yield Token("\n", line, True)
            else:
                yield Token(operator, line, True)
        else:
            word, after = scan_word(text, at, line)
            if word.isdigit() and text[after:after + 1] in ("<", ">"):    # of a redirection: 2>&1
                at = after
                continue
            yield Token(word, line)
            line += text.count("\n", at, after)
            at = after


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _skip_blanks(text: str, at: int) -> int:
    while text[at:at + 1] in (" ", "\t"):
        at += 1
    return at


def _document(text: str, at: int, end: str, strips: bool) -> tuple[str, int]:
    """(the lines up to the word `end`, the place after them)."""
    end, lines = end.strip("'\"").replace("\\", ""), []
    while at < len(text):
        stop = _line_end(text, at)
        line, at = text[at:stop], stop + 1
        line = line.lstrip("\t") if strips else line
        if line == end:
            break
        lines.append(line)
    return "\n".join(lines), min(at, len(text)) - (at <= len(text) and text[at - 1:at] == "\n")


def scan_word(text: str, at: int, line: int = 0) -> tuple[str, int]:
    """(the word that begins at `at`, as written, the place after it). An array `NAME=(…)` is one word."""
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
    """The place after the quoted text, the expansion or the character at `at`."""
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
    if character == "$" and text[at + 1:at + 2] in ("(", "{"):
        return _closing(text, at + 1, line)
    return at + 1


def _closing(text: str, at: int, line: int) -> int:
    """The place after the bracket that closes the one at `at`; comments count in an array only."""
    opening, closing, depth = text[at], CLOSING[text[at]], 0
    while at < len(text):
        if text[at] == opening:
            depth, at = depth + 1, at + 1
        elif text[at] == closing:
            depth, at = depth - 1, at + 1
            if depth == 0:
                return at
        elif text[at] == "#" and opening == "(" and text[at - 1] in " \t\n":
            at = _line_end(text, at)
        else:
            at = skip_unit(text, at, line)
    raise ShellError(f"line {line}: {opening} is not closed.")


# --------------------------------------------------------------------------------------------- statements
@dataclass
class Parser:
    """Reads the tokens of a script from the left to the right."""

    tokens: Sequence[Token]
    at: int = 0
    depth: int = 0

    def script(self) -> tuple[Statement, ...]:
        """All statements. Raises ShellError for a word that closes nothing."""
        body = self._body(set())
        if self._word() is not None:
            raise ShellError(f"line {self._line()}: {self._word()!r} closes no block.")
        return body

    def _line(self) -> int:
        return self.tokens[min(self.at, len(self.tokens) - 1)].line if self.tokens else 1

    def _word(self) -> str | None:
        return self.tokens[self.at].text if self.at < len(self.tokens) else None

    def _is_operator(self) -> bool:
        return self.at < len(self.tokens) and self.tokens[self.at].is_operator

    def _expect(self, word: str) -> None:
        self._skip("\n", ";")
        if self._word() != word:
            raise ShellError(f"line {self._line()}: {word!r} is missing.")
        self.at += 1

    def _skip(self, *operators: str) -> None:
        while self._is_operator() and self._word() in operators:
            self.at += 1

    def _body(self, ends: set[str]) -> tuple[Statement, ...]:
        """The statements up to one of the words, which is not consumed."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise ShellError(f"line {self._line()}: blocks are nested more than {DEEPEST} deep.")
        found: list[Statement] = []
        while True:
            self._skip("\n", ";", "&", "(")
            if self._is_operator() and self._word() == ")" and ")" not in ends:
                self.at += 1                                          # of a subshell
                continue
            if self._word() is None or self._word() in ends or self._word() in ENDS:
                self.depth -= 1
                return tuple(found)
            found.append(self._and_or())

    def _and_or(self) -> Statement:
        parts = [("", self._statement())]
        while self._is_operator() and self._word() in ("&&", "||"):
            operator = self._word()
            self.at += 1
            self._skip("\n", "(")
            parts.append((operator, self._statement()))
        return parts[0][1] if len(parts) == 1 else AndOr(tuple(parts))

    def _statement(self) -> Statement:
        word, follows = self._word(), self.tokens[self.at + 1:self.at + 3]
        if word in ("if", "for", "while", "until", "case", "function", "{"):
            self.at += 1
            return {"if": self._if, "for": self._for, "case": self._case, "function": self._function,
                    "{": self._group}.get(word, self._while)()
        if [token.text for token in follows] == ["(", ")"] and re.fullmatch(r"[\w-]+", word):
            return self._function()
        return self._pipe()

    def _if(self) -> If:
        branches = []
        while True:
            condition = self._body({"then"})
            self._expect("then")
            branches.append((condition, self._body({"elif", "else", "fi"})))
            word = self._word()
            self.at += 1
            if word == "else":
                branches.append(((), self._body({"fi"})))
                self._expect("fi")
            elif word != "elif":
                if word != "fi":
                    raise ShellError(f"line {self._line()}: 'fi' is missing.")
                return If(tuple(branches))
            if word == "else":
                return If(tuple(branches))

    def _for(self) -> For:
        if (self._word() or "").startswith("(("):
            self.at += 1
            name, words = "", []
        else:
            name, words = self._word() or "", []
            self.at += 1
            self._skip("\n")
            if self._word() == "in":
                self.at += 1
                while self._word() is not None and not self._is_operator():
                    words.append(self._word())
                    self.at += 1
        self._expect("do")
        body = self._body({"done"})
        self._expect("done")
        self._redirections()
        return For(name, tuple(words), body)

    def _while(self) -> For:
        self._body({"do"})
        self._expect("do")
        body = self._body({"done"})
        self._expect("done")
        self._redirections()
        return For("", (), body)

    def _redirections(self) -> None:
        """Skip those after a block."""
        while self._is_operator() and self._word() in (">", ">>", "<", "<<<", "&>", "|"):
            self.at += 2

    def _case(self) -> Case:
        word = self._word() or ""
        self.at += 1
        self._expect("in")
        branches = []
        while True:
            self._skip("\n", ";", ";;")
            if self._word() in ("esac", None):
                break
            patterns = []
            while self._word() is not None and self._word() != ")":
                if self._word() not in ("|", "("):
                    patterns.append(self._word())
                self.at += 1
            self._expect(")")
            branches.append((tuple(patterns), self._body({";;", "esac"})))
        self._expect("esac")
        return Case(word, tuple(branches))

    def _function(self) -> Function:
        name = self._word() or ""
        self.at += 1
        self._skip("(", ")", "\n")
        self._expect("{")
        return Function(name, self._group().body)

    def _group(self) -> For:
        """A block in braces; as a statement it is read like a loop over one value."""
        body = self._body({"}"})
        self._expect("}")
        self._redirections()
        return For("", ("once",), body)

    def _pipe(self) -> Statement:
        commands = [self._command()]
        while self._is_operator() and self._word() in ("|", "|&"):
            self.at += 1
            self._skip("\n")
            commands.append(self._command())
        return commands[0] if len(commands) == 1 else Pipe(tuple(commands))

    def _command(self) -> Command:
        words, line, writes, document, is_literal = [], self._line(), None, None, False
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if words[:1] == ["[["] and words[-1] != "]]":
                words.append(token.text)
            elif token.is_operator and token.body is not None:
                document, is_literal = token.body, not token.is_expanded
            elif token.is_operator and token.text in (">", ">>", "&>", "&>>", "<", "<<<", ">&", "<&"):
                self.at += 1
                if token.text in (">", ">>") and self.at < len(self.tokens):
                    writes = self.tokens[self.at].text
            elif token.is_operator:
                break
            else:
                words.append(token.text)
            self.at += 1
        if not words and document is None and writes is None:
            raise ShellError(f"line {line}: {self._word()!r} is not expected here.")
        return Command(tuple(words), line, writes, document, is_literal)
