"""A shell script → the training commands that it would start, and the files that it would write for them.

Assignments, arrays, conditions, `case`, functions, here-documents and `sed` over templates are followed;
commands are not run. A `for` is read with each of its values, the body of a `while` not at all. Scripts that
are sourced or started with `bash` are read, too, where they lie next to the script or were written by it, and
so is the text after `bash -c`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .budget import MOST_LAUNCHES, MOST_WORDS, Budget, text_of_file, whole
from .shell_loops import rounds
from .shell_syntax import (
    AndOr,
    Case,
    For,
    If,
    Pipe,
    ShellCommand,
    ShellFunction,
    Statement,
    statements_of,
)
from .shell_tokens import ShellError
from .shell_values import (
    Scope,
    array_of,
    closed,
    fields_of,
    is_true,
    matches,
    opened,
    shown,
    value_of,
)

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=", re.S)
DECLARING = {"export", "local", "readonly", "declare", "typeset"}
SHELLS = {"bash", "sh", "source", ".", "sbatch", "srun", "exec"}
COUNTS = {
    "nproc-per-node": "per_node",
    "num-gpus": "per_node",
    "nnodes": "nodes",
    "num-nodes": "nodes",
    "ntasks-per-node": "per_node",
    "nodes": "nodes",
    "np": "world",
    "n": "world",
    "ntasks": "world",
}
WORLD_NAMES = ("WORLD_SIZE", "NUM_GPUS", "num_gpus")
DEEPEST = 5  # scripts that start scripts
MOST = 20_000  # statements that are read


@dataclass(frozen=True)
class ScriptLaunch:
    """A training command. script: the Python file; words: after it; ranks: None if it does not state them.

    Values that only a run of the script could know are open (`shell_values`).
    """

    script: str
    words: tuple[str, ...]
    ranks: int | None
    line: int = 0


@dataclass
class Script:
    """Reads a script. files: what it would write, by name as written; folder: where its neighbours lie.

    copies  names of `files` whose text is that of a neighbour: messages show no values of theirs
    """

    folder: Path
    scope: Scope = field(default_factory=Scope)
    files: dict[str, str] = field(default_factory=dict)
    copies: set[str] = field(default_factory=set)
    launches: list[ScriptLaunch] = field(default_factory=list)
    functions: dict[str, tuple] = field(default_factory=dict)
    depth: int = 0
    read: int = 0
    output: list[str] | None = None  # of the commands in a `$(…)` that is followed
    is_silent: bool = True  # whether no other command was met in it

    def run(self, text: str) -> None:
        """Follow the statements of the text. Raises ShellError."""
        self.scope.output_of = self._output_of
        self.scope.budget.spend(len(text))
        self._all(statements_of(text))

    def _all(self, statements: Sequence[Statement]) -> bool:
        status = True
        for statement in statements:
            status = self._one(statement)
        return status

    def _one(self, statement: Statement) -> bool:
        """Follow a statement; returns whether it is true, where it is a test."""
        # Every statement costs budget, so loops end.
        self.read += 1
        if self.read > MOST:
            raise ShellError(f"more than {MOST} statements: this is not a recipe.")
        self.scope.budget.spend(1)
        # Each kind of statement is followed by its own rule.
        match statement:
            case ShellCommand():
                return self._command(statement)
            case Pipe(commands):
                return self._pipe(commands)
            case AndOr(parts):
                status = True
                for operator, part in parts:
                    if operator == "" or (operator == "&&") == status:
                        status = self._one(part)
                return status
            case If(branches):
                for condition, body in branches:
                    if not condition or self._all(condition):
                        return self._all(body)
            case For(name, words, body):
                for variable, value in rounds(name, words, self.scope):
                    self.scope.budget.spend(len(value))
                    if variable:
                        self.scope.variables[variable] = value
                    self._all(body)
            case Case(word, branches):
                self._case(value_of(word, self.scope), branches)
            case ShellFunction(name, body):
                self.functions[name] = body
        return True

    def _case(self, value: str, branches: Sequence[tuple]) -> None:
        for patterns, body in branches:
            if any(matches(closed(value), value_of(p, self.scope)) for p in patterns):
                self._all(body)
                return

    # ---------------------------------------------------------------------------------------- commands
    def _command(self, command: ShellCommand) -> bool:
        # Tests and negations have a truth value and start nothing.
        words = list(command.words)
        if words[:1] == ["!"]:
            return not self._command(ShellCommand(tuple(words[1:]), command.line))
        if words and (words[0] in ("[", "[[", "test") or words[0].startswith("((")):
            return is_true(words, self.scope)
        # Assignments before a command set variables of the script.
        if words and words[0] in DECLARING:
            words = [word for word in words[1:] if not word.startswith("-")]
        while words and (match := ASSIGNMENT.match(words[0])):
            self._assign(match, words.pop(0))
        # A here-document that is redirected writes a file that trainings may read.
        if command.document is not None and command.writes:
            self._write(
                command,
                command.document
                if command.is_literal
                else self._expanded(command.document),
            )
        # Commands that change no text and start no training are passed over.
        if not words or words[0] in ("exit", "return", "set", "mkdir", "cd", "wait"):
            return True
        if words[0] in ("unset", "shift"):
            done = self._unset if words[0] == "unset" else self._shift
            return done(self._fields(words[1:]))
        # The remaining words are expanded and may start a training.
        expanded = self._fields(words)
        if expanded:
            self._start(expanded, command)
        return True

    def _unset(self, words: Sequence[str]) -> bool:
        names = [word for word in words if not word.startswith("-")]
        for name in names:
            if (
                "-f" in words
                or name not in self.scope.variables
                and name in self.functions
            ):
                self.functions.pop(name, None)
            elif "[" in name:  # an element
                self.scope.variables[name.partition("[")[0]] = opened(
                    f"${name.partition('[')[0]}"
                )
            else:
                self.scope.unset(name)
        return True

    def _shift(self, words: Sequence[str]) -> bool:
        """Drop the first arguments; if there are fewer, all stay, as in bash. That is no failure here: a
        recipe is often read without its arguments.
        """
        count = whole(words[0]) if words else 1
        count = 1 if count is None else count
        if count <= len(self.scope.arguments):
            self.scope.arguments = self.scope.arguments[count:]
        return True

    def _assign(self, match: re.Match, word: str) -> None:
        name, index, adds = match.groups()
        text = word[match.end() :]
        variables = self.scope.variables
        before = variables.get(name)
        if text.startswith("("):
            values = array_of(text, self.scope)
            old = [before] if isinstance(before, str) else before or []
            variables[name] = [*old, *values] if adds else values
        elif index:
            variables[name] = opened(f"${name}")
        else:
            value = value_of(text, self.scope)
            self.scope.budget.spend(len(before or "") if adds else 0)
            if adds and isinstance(before, list):
                before, value = "", [(before[0] if before else "") + value, *before[1:]]
            variables[name] = (
                (before or "") + value if adds and isinstance(value, str) else value
            )

    def _expanded(self, document: str) -> str:
        return value_of('"' + document.replace('"', '\\"') + '"', self.scope)

    def _write(self, command: ShellCommand, text: str, is_copy: bool = False) -> None:
        name = value_of(command.writes, self.scope)
        self.files[name] = text
        (self.copies.add if is_copy else self.copies.discard)(name)

    def _fields(self, words: Sequence[str]) -> list[str]:
        """The words that these words become."""
        fields: list[str] = []
        for word in words:
            fields += fields_of(word, self.scope)
        return fields

    def _pipe(self, commands: Sequence[ShellCommand]) -> bool:
        """Texts that `sed` edits into a file; otherwise each command by itself."""
        text, is_copy = self._source(commands[0])
        if text is None:
            for command in commands:
                self._command(command)
            return True
        for command in commands:
            words = self._fields(command.words)
            text = edited(text, words, self.scope.budget)
        if commands[-1].writes:
            self._write(commands[-1], text, is_copy)
        return True

    def _source(self, command: ShellCommand) -> tuple[str | None, bool]:
        """(the text that `cat FILE` or `sed … FILE` reads, None if it is not known and for other commands;
        whether it is that of a neighbour)."""
        words = self._fields(command.words)
        if not words or words[0] not in ("sed", "cat"):
            return None, False
        if command.document is not None:
            return command.document if command.is_literal else self._expanded(
                command.document
            ), False
        for word in words[1:]:
            if word in self.files or not word.startswith(
                ("s/", "s#", "s|", "s@", "s,", "-")
            ):
                return self.text_of(word), self.is_copy(word)
        return None, False

    def is_copy(self, name: str) -> bool:
        """Whether `text_of` is the text of a neighbour, and not one that the script itself has."""
        return name in self.copies or name not in self.files

    def text_of(self, name: str) -> str | None:
        """The text of a file that the script writes, or that lies in its folder. Raises ShellError."""
        if name in self.files:
            return self.files[name]
        path = neighbour(self.folder, name)
        try:
            text = text_of_file(path) if path else None
        except (OSError, UnicodeDecodeError):
            return None
        self.scope.budget.spend(len(text or ""))
        return text

    def _start(self, words: list[str], command: ShellCommand) -> None:
        """A command that would be run: a training, another script, a function, or nothing of interest."""
        # Functions and eval run inside this script.
        name = words[0].rpartition("/")[2]
        if words[0] in self.functions and self.depth < DEEPEST:
            return self._inner(lambda: self._all(self.functions[words[0]]), words[1:])
        if name == "eval":
            return self._nested(" ".join(words[1:]))
        # Commands that edit or write files are applied to the known texts.
        if (
            name == "sed"
            and command.writes
            or name == "cat"
            and command.writes
            and command.document is None
        ):
            text, is_copy = self._source(command)
            if text is not None:
                self._write(command, edited(text, words, self.scope.budget), is_copy)
            return None
        if name == "sed" and any(word.startswith("-i") for word in words):
            target = words[-1]
            text = self.text_of(target)
            if text is not None:
                self.copies |= {target} if self.is_copy(target) else set()
                self.files[target] = edited(text, words, self.scope.budget)
            return None
        if name == "echo" and (command.writes or self.output is not None):
            text = " ".join(word for word in words[1:] if word not in ("-n", "-e"))
            return (
                self._write(command, text)
                if command.writes
                else self.output.append(text)
            )
        if name == "echo":
            return None
        # Anything else may start a training: a shell's text, a Python script or another shell script.
        self.is_silent = False
        if (inner := text_for_a_shell(words)) is not None:
            return self._nested(inner)
        texts = [word for word in words if ".py" in word and re.search(r"\s--", word)]
        if texts:
            return self._nested(texts[0])
        # The first Python script among the words is the training.
        script = next(
            (at for at, word in enumerate(words) if word.endswith(".py")), None
        )
        if script is not None:
            return self._launch(words, script, command.line)
        # A script that a shell runs is followed with its arguments.
        scripts = (
            at
            for at, word in enumerate(words)
            if word.endswith(".sh") or word in self.files
        )
        other = next(scripts, None)
        if other is not None and (other == 0 or name in SHELLS):
            self._follow(
                words[other], words[other + 1 :], keeps=name in ("source", ".")
            )
        return None

    def _output_of(self, text: str) -> str | None:
        """What the commands of `$(text)` print, where all of them are `echo` or functions of it, or None."""
        if self.depth >= DEEPEST or not text.strip():
            return None
        outer = (self.output, self.is_silent)
        variables = self.scope.variables
        self.output, self.is_silent, self.scope.variables = (
            [],
            True,
            dict(variables),
        )  # of a subshell
        self.depth += 1
        try:
            self._all(statements_of(text))
            return "\n".join(self.output) if self.is_silent and self.output else None
        finally:
            self.depth -= 1
            (self.output, self.is_silent), self.scope.variables = outer, variables

    def _nested(self, text: str) -> None:
        """A command in a string."""
        if self.depth < DEEPEST:
            self.depth += 1
            self.run(text)
            self.depth -= 1

    def _inner(self, action, arguments: Sequence[str]) -> None:
        outer = self.scope.arguments
        self.scope.arguments = list(arguments)
        self.depth += 1
        action()
        self.depth -= 1
        self.scope.arguments = outer

    def _follow(self, name: str, arguments: Sequence[str], keeps: bool) -> None:
        text = self.text_of(name)
        if text is None or self.depth >= DEEPEST:
            return
        self._inner(
            lambda: self.run(text), self.scope.arguments if keeps else arguments
        )

    def _launch(self, words: Sequence[str], at: int, line: int) -> None:
        flags = [word for word in words[at + 1 :] if re.match(r"--?[A-Za-z]", word)]
        if flags:
            if len(self.launches) == MOST_LAUNCHES:
                raise ShellError(
                    f"more than {MOST_LAUNCHES} training commands: this is not a recipe."
                )
            if len(words) > MOST_WORDS:
                raise ShellError(
                    f"line {line}: a command of {len(words):,} words: this is not a recipe."
                )
            self.launches.append(
                ScriptLaunch(
                    words[at], tuple(words[at + 1 :]), self._ranks(words[:at]), line
                )
            )

    def _ranks(self, launcher: Sequence[str]) -> int | None:
        """The number of processes that the launcher would start."""
        counts: dict[str, int] = {}
        for number, word in enumerate(launcher):
            name, equals, value = word.lstrip("-").partition("=")
            if not equals:
                following = launcher[number + 1 : number + 2]
                value = following[0] if following else ""
            if (
                word.startswith("-")
                and name.replace("_", "-") in COUNTS
                and whole(value) is not None
            ):
                counts[COUNTS[name.replace("_", "-")]] = whole(value)
            if name == "include" and (devices := included_devices(value)):
                return devices
        if "world" in counts:
            return counts["world"]
        if "per_node" in counts:
            return counts["per_node"] * counts.get("nodes", 1)
        known = (self.scope.get(name) for name in WORLD_NAMES)
        numbers = (whole(value) for value in known if isinstance(value, str))
        return next((number for number in numbers if number is not None), None)


def neighbour(folder: Path, name: str) -> Path | None:
    """The file of this name next to the script; None if there is none. Names that leave the folder's tree by
    an absolute path or an open value are looked up by their last part. A link or `..` that leaves the tree
    names no file."""
    root = folder.resolve()
    last = closed(name).rpartition("/")[2]
    for candidate in (closed(name).lstrip("./"), last):
        try:
            path = (root / candidate).resolve()
            if candidate and path.is_relative_to(root) and path.is_file():
                return path
        except (
            OSError,
            ValueError,
            RuntimeError,
        ):  # too long, with a zero byte, a loop of links
            continue
    return None


def included_devices(text: str) -> int | None:
    """How many devices `--include` of DeepSpeed's launcher names: node1:0,1@node2:2,3 has four; None if a
    node has no list.
    """
    nodes = [node.partition(":")[2] for node in text.split("@")]
    return sum(len(node.split(",")) for node in nodes) if all(nodes) else None


def text_for_a_shell(words: Sequence[str]) -> str | None:
    """The text after `bash -c`, also where srun or a container starts the shell; None without one."""
    for shell, flag, text in zip(words, words[1:], words[2:]):
        if shell.rpartition("/")[2] in ("bash", "sh") and re.fullmatch(
            r"-[a-z]*c", flag
        ):
            return text
    return None


def edited(text: str, words: Sequence[str], budget: Budget) -> str:
    """The text after the `s/old/new/` of a `sed` command; other commands of sed are not followed."""
    for word in words[1:]:
        if not re.match(r"s\W", word):
            continue
        old, *new = word[2:].split(word[1])
        option = new.pop() if new else None
        if new and option in ("", "g"):
            count = -1 if option else 1
            inner = word[1].join(new)
            budget.spend(len(text))
            text = "\n".join(
                budget.replaced(line, old, inner, count) for line in text.split("\n")
            )
    return text


def read_script(
    path: Path, variables: Mapping[str, str], arguments: Sequence[str] = ()
) -> Script:
    """The script with all that it would start. variables: of the environment. Raises ShellError."""
    script = Script(path.parent, Scope(dict(variables), list(arguments)))
    script.run(text_of_file(path, errors="replace"))
    return script


__all__ = ["ScriptLaunch", "Script", "read_script", "shown"]
