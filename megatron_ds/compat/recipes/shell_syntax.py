"""The text of a shell script → its statements, as far as training recipes need them. Nothing is executed.

ShellCommand   words as written, with quotes and `$`; the texts that redirections read and the files they write
Pipe           statements joined by `|`
AndOr          statements joined by `&&` and `||`
If, For, Case, ShellFunction   with their bodies; a `while` is a For without words, whose body is not read
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from .shell_tokens import ShellError, Token, tokens_of

BRANCH_ENDS = {
    ";;",
    ";&",
    ";;&",
}  # of `case`; the second and third are read like the first
ENDS = {"fi", "done", "esac", "then", "do", "elif", "else", "}", ")", *BRANCH_ENDS}
COUNTING = "(("  # the name of a `for ((…))`, whose only word is the counting
DEEPEST = 60  # nested blocks of a script; more is not a recipe
REDIRECTIONS = {">", ">>", "&>", "&>>", "<", "<<<", ">&", "<&"}  # each before a file
DOCUMENTS = {"<<", "<<-"}


@dataclass(frozen=True)
class ShellCommand:
    """words as written; writes: the target of `>`; document: its here-document."""

    words: tuple[str, ...]
    line: int
    writes: str | None = None
    document: str | None = None
    is_literal: bool = False


@dataclass(frozen=True)
class Pipe:
    """Statements joined by `|`."""

    parts: tuple["Statement", ...]


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
    """name takes the values of the words; () for a `while`. name is COUNTING for `for ((i=0; i<n; i++))`."""

    name: str
    words: tuple[str, ...]
    body: tuple


@dataclass(frozen=True)
class Case:
    """branches: (patterns, body)."""

    word: str
    branches: tuple[tuple[tuple[str, ...], tuple], ...]


@dataclass(frozen=True)
class ShellFunction:
    """A definition."""

    name: str
    body: tuple


Statement = ShellCommand | Pipe | AndOr | If | For | Case | ShellFunction


def statements_of(text: str) -> tuple[Statement, ...]:
    """Return the statements of a script. Raises ShellError."""
    return Parser(tokens_of(text)).script()


# --------------------------------------------------------------------------------------------- statements
@dataclass
class Parser:
    """Reads the tokens of a script from the left to the right."""

    tokens: Sequence[Token]
    at: int = 0
    depth: int = 0

    def script(self) -> tuple[Statement, ...]:
        """Return all statements. Raises ShellError for a word that closes nothing."""
        body = self._body()
        if self._word() is not None:
            raise ShellError(f"line {self._line()}: {self._word()!r} closes no block.")
        return body

    def _line(self) -> int:
        return (
            self.tokens[min(self.at, len(self.tokens) - 1)].line if self.tokens else 1
        )

    def _word(self) -> str | None:
        return self.tokens[self.at].text if self.at < len(self.tokens) else None

    def _is_operator(self) -> bool:
        return self.at < len(self.tokens) and self.tokens[self.at].is_operator

    def _expect(self, word: str) -> None:
        self._skip("\n", ";")
        if self._word() != word:
            raise ShellError(f"line {self._line()}: {word!r} is missing.")
        self.at += 1

    def _is_next(self, operators: Collection[str]) -> bool:
        # A word of these characters has quotes around it.
        return self._word() in operators

    def _skip(self, *operators: str) -> None:
        while self._is_next(operators):
            self.at += 1

    def _body(self) -> tuple[Statement, ...]:
        """Return the statements up to a word of ENDS, which is not consumed."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise ShellError(
                f"line {self._line()}: blocks are nested more than {DEEPEST} deep."
            )
        found: list[Statement] = []
        while True:
            self._skip("\n", ";", "&")
            if self._word() is None or self._word() in ENDS:
                self.depth -= 1
                return tuple(found)
            found.append(self._and_or())

    def _and_or(self) -> Statement:
        parts: list[tuple[str, Statement]] = [("", self._pipe())]
        while self._is_next(("&&", "||")):
            operator = self.tokens[self.at].text
            self.at += 1
            self._skip("\n")
            parts.append((operator, self._pipe()))
        return parts[0][1] if len(parts) == 1 else AndOr(tuple(parts))

    def _pipe(self) -> Statement:
        parts = [self._statement()]
        while self._is_next(("|", "|&")):
            self.at += 1
            self._skip("\n")
            parts.append(self._statement())
        return parts[0] if len(parts) == 1 else Pipe(tuple(parts))

    def _statement(self) -> Statement:
        word = self._word() or ""
        blocks: dict[str, Callable[[], Statement]] = {
            "if": self._if,
            "for": self._for,
            "while": self._while,
            "until": self._while,
            "case": self._case,
            "function": self._function,
            "{": lambda: self._group("}"),
            "(": lambda: self._group(")"),
        }
        # A block can have redirections behind it.
        if word in blocks:
            self.at += 1
            block = blocks[word]()
            self._redirections()
            return block
        if self._is_empty_list(self.at + 1) and re.fullmatch(r"[\w-]+", word):
            return self._function()
        return self._command()

    def _is_empty_list(self, at: int) -> bool:
        """Return whether `()` is at this place, as after the name of a function."""
        return [token.text for token in self.tokens[at : at + 2]] == ["(", ")"]

    def _if(self) -> If:
        branches: list[tuple[tuple, tuple]] = []
        word: str | None = "elif"
        while word == "elif":
            condition = self._body()
            self._expect("then")
            branches.append((condition, self._body()))
            word = self._word()
            self.at += 1
        # The last branch has no condition.
        if word == "else":
            branches.append(((), self._body()))
            self._expect("fi")
        elif word != "fi":
            raise ShellError(f"line {self._line()}: 'fi' is missing.")
        return If(tuple(branches))

    def _for(self) -> For:
        name = self._word() or ""
        self.at += 1
        if name.startswith("(("):
            words = [name]
            name = COUNTING
        else:
            words = self._words_of_for()
        self._expect("do")
        body = self._body()
        self._expect("done")
        return For(name, tuple(words), body)

    def _words_of_for(self) -> list[str]:
        """Read the words after `in`, if there are any."""
        words: list[str] = []
        self._skip("\n")
        if self._word() == "in":
            self.at += 1
            while (word := self._word()) is not None and not self._is_operator():
                words.append(word)
                self.at += 1
        return words

    def _while(self) -> For:
        self._body()
        self._expect("do")
        body = self._body()
        self._expect("done")
        return For("", (), body)

    def _redirections(self) -> None:
        """Skip those after a block."""
        while self._is_next(REDIRECTIONS | DOCUMENTS):
            # The text of a here-document is part of its token.
            self._skip(*DOCUMENTS)
            if self._is_next(REDIRECTIONS):
                self.at += 2

    def _case(self) -> Case:
        word = self._word() or ""
        self.at += 1
        self._expect("in")
        branches = []
        while True:
            self._skip("\n", ";", *BRANCH_ENDS)
            if self._word() in ("esac", None):
                break
            patterns = []
            while (pattern := self._word()) is not None and pattern != ")":
                if pattern not in ("|", "("):
                    patterns.append(pattern)
                self.at += 1
            self._expect(")")
            branches.append((tuple(patterns), self._body()))
        self._expect("esac")
        return Case(word, tuple(branches))

    def _function(self) -> ShellFunction:
        name = self._word() or ""
        self.at += 1
        if self._is_empty_list(self.at):
            self.at += 2
        self._skip("\n")
        return ShellFunction(name, (self._statement(),))

    def _group(self, end: str) -> For:
        """Return a block in braces, or of a subshell; it is read like a loop over one value."""
        body = self._body()
        self._expect(end)
        return For("", ("once",), body)

    def _command(self) -> ShellCommand:
        words: list[str] = []
        line = self._line()
        writes = None
        document = None
        is_literal = False
        # Words and redirections alternate until an operator ends the command.
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if words[:1] == ["[["] and words[-1] != "]]":
                words.append(token.text)
            elif token.text in DOCUMENTS:
                document = token.body
                is_literal = not token.is_expanded
            elif token.text in REDIRECTIONS:
                self.at += 1
                if token.text in (">", ">>") and self.at < len(self.tokens):
                    writes = self.tokens[self.at].text
            elif token.is_operator:
                break
            else:
                words.append(token.text)
            self.at += 1
        # A command needs words, a document or a file to write.
        if not words and document is None and writes is None:
            found = "the end" if self._word() is None else repr(self._word())
            raise ShellError(f"line {line}: {found} is not expected here.")
        return ShellCommand(tuple(words), line, writes, document, is_literal)
