"""A shell script → the training commands that it would start, and the files that it would write for them.

Assignments, arrays, conditions, `case`, functions, here-documents and `sed` over templates are followed;
commands are not run. A `for` is read with each of its values, the body of a `while` not at all. Scripts that
are sourced or started with `bash` are read, too, where they lie next to the script or were written by it, and
so is the text after `bash -c`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from .budget import MOST_LAUNCHES, MOST_WORDS, Budget, text_of_file, whole
from .shell_edits import matches
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
from .shell_tests import is_true
from .shell_tokens import ShellError
from .shell_values import (
    Scope,
    array_of,
    closed,
    fields_of,
    opened,
    shown,
    value_of,
)

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=", re.S)
TESTS = ("[", "[[", "test")
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
EDITS = ("s/", "s#", "s|", "s@", "s,", "-")  # how edits and options of sed begin
DEEPEST = 5  # scripts that start scripts
MOST = 20_000  # statements of a script; the rest is not read


@dataclass(frozen=True)
class ScriptLaunch:
    """A training command. Values that only a run of the script could know are open (`shell_values`).

    script     the Python file
    words      after it
    ranks      None if the command does not state them
    launcher   the words for DeepSpeed's launcher; None if another one starts the training
    """

    script: str
    words: tuple[str, ...]
    ranks: int | None
    line: int = 0
    launcher: tuple[str, ...] | None = None


@dataclass
class Script:
    """Reads a script.

    folder     where its neighbours lie
    files      what it would write, by name as written
    copies     names of `files` whose text is that of a neighbour: messages show no values of theirs
    launches   the trainings that it would start
    functions  name → statements
    depth      how many scripts, functions and texts the statement that is read is inside of
    read       number of statements so far
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
    is_silent: bool = True  # whether it has no other command

    def run(self, text: str) -> None:
        """Follow the statements of the text. Raises ShellError."""
        self.scope.output_of = self._output_of
        self.scope.budget.spend(len(text))
        self._all(statements_of(text))

    def _all(self, statements: Sequence[Statement]) -> bool:
        """Follow the statements; returns the status of the last."""
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
            case Pipe(parts):
                return self._pipe(parts)
            case AndOr(parts):
                status = True
                for operator, part in parts:
                    # The first part, after && a true one, after || a false one.
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
            case Case(word, cases):
                self._case(value_of(word, self.scope), cases)
            case ShellFunction(name, body):
                self.functions[name] = body
        return True

    def _case(self, value: str, branches: Sequence[tuple]) -> None:
        """Follow the first branch of which a pattern fits the value."""
        text = closed(value)
        for patterns, body in branches:
            if any(matches(text, value_of(p, self.scope)) for p in patterns):
                self._all(body)
                return

    # ---------------------------------------------------------------------------------------- commands
    def _command(self, command: ShellCommand) -> bool:
        """Follow one command; returns whether it is true, where it is a test."""
        # Tests and negations have a truth value and start nothing.
        words = list(command.words)
        negations = sum(1 for _ in takewhile("!".__eq__, words))
        if negations:
            inner = ShellCommand(tuple(words[negations:]), command.line)
            return self._command(inner) != bool(negations % 2)
        if words and (words[0] in TESTS or words[0].startswith("((")):
            return is_true(words, self.scope)
        # Assignments before a command set variables of the script.
        if words and words[0] in DECLARING:
            words = [word for word in words[1:] if not word.startswith("-")]
        while words and (match := ASSIGNMENT.match(words[0])):
            self._assign(match, words.pop(0))
        # A here-document that is redirected writes a file that trainings may read.
        if command.document is not None and command.writes:
            text = self._document(command.document, command.is_literal)
            self._write(command.writes, text)
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
        """Remove variables, elements or functions."""
        names = [word for word in words if not word.startswith("-")]
        variables = self.scope.variables
        for name in names:
            is_function = name not in variables and name in self.functions
            if "-f" in words or is_function:
                self.functions.pop(name, None)
            elif "[" in name:
                # Without one of its elements an array is not known.
                array = name.partition("[")[0]
                variables[array] = opened(f"${array}")
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
        """`NAME=…`, `NAME+=…`, `NAME=(…)`, `NAME[i]=…`. match: of ASSIGNMENT."""
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
            if adds:
                self.scope.budget.spend(len(before or ""))
            if not adds:
                variables[name] = value
            elif isinstance(before, list):
                # The first element of an array is what its name alone means.
                first = before[0] if before else ""
                variables[name] = [first + value, *before[1:]]
            else:
                variables[name] = (before or "") + value

    def _document(self, text: str, is_literal: bool) -> str:
        """Return the text of a here-document, whose values are expanded unless its mark was quoted."""
        if is_literal:
            return text
        quoted = text.replace('"', '\\"')
        return value_of(f'"{quoted}"', self.scope)

    def _write(self, target: str, text: str, is_copy: bool = False) -> None:
        """Record what a command writes to `target`. is_copy: whether the text is that of a neighbour."""
        name = value_of(target, self.scope)
        self.files[name] = text
        if is_copy:
            self.copies.add(name)
        else:
            self.copies.discard(name)

    def _fields(self, words: Sequence[str]) -> list[str]:
        """Expand the words, and return the words that result."""
        fields: list[str] = []
        for word in words:
            fields += fields_of(word, self.scope)
        return fields

    def _pipe(self, parts: Sequence[Statement]) -> bool:
        """Texts that `sed` edits into a file; otherwise each part by itself."""
        # The first command gives the text; without one nothing is piped.
        commands = [part for part in parts if isinstance(part, ShellCommand)]
        text = None
        if len(commands) == len(parts):
            text, is_copy = self._source(commands[0])
        if text is None:
            for part in parts:
                self._one(part)
            return True
        for command in commands:
            words = self._fields(command.words)
            text = edited(text, words, self.scope.budget)
        if commands[-1].writes:
            self._write(commands[-1].writes, text, is_copy)
        return True

    def _source(self, command: ShellCommand) -> tuple[str | None, bool]:
        """Return (the text that `cat FILE` or `sed … FILE` reads, None if it is not known and for other commands;
        whether it is that of a neighbour)."""
        words = self._fields(command.words)
        if not words or words[0] not in ("sed", "cat"):
            return None, False
        if command.document is not None:
            return self._document(command.document, command.is_literal), False
        # The file is the first word that is no option and no edit.
        for word in words[1:]:
            if word in self.files or not word.startswith(EDITS):
                return self.text_of(word), self.is_copy(word)
        return None, False

    def is_copy(self, name: str) -> bool:
        """Return whether the text of the file is that of a neighbour, and not one that the script itself writes."""
        return name in self.copies or name not in self.files

    def text_of(self, name: str) -> str | None:
        """Return the text of a file that the script writes, or that lies in its folder. Raises ShellError."""
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
        is_copying = name == "cat" and command.document is None
        if command.writes and (name == "sed" or is_copying):
            text, is_copy = self._source(command)
            if text is not None:
                text = edited(text, words, self.scope.budget)
                self._write(command.writes, text, is_copy)
            return None
        if name == "sed" and any(word.startswith("-i") for word in words):
            target = words[-1]
            text = self.text_of(target)
            if text is not None:
                if self.is_copy(target):
                    self.copies.add(target)
                self.files[target] = edited(text, words, self.scope.budget)
            return None
        # Text that is printed into a file, or into the value of a `$(…)`.
        if name == "echo":
            text = " ".join(word for word in words[1:] if word not in ("-n", "-e"))
            if command.writes:
                self._write(command.writes, text)
            elif self.output is not None:
                self.output.append(text)
            return None
        # Anything else may start a training: a shell's text, a Python script or another shell script.
        self.is_silent = False
        inner = text_for_a_shell(words)
        if inner is not None:
            return self._nested(inner)
        # A text with a training in it, for a launcher of its own.
        for word in words:
            if ".py" in word and re.search(r"\s--", word):
                return self._nested(word)
        # The first Python script among the words is the training.
        for at, word in enumerate(words):
            if word.endswith(".py"):
                return self._launch(words, at, command.line)
        # A script that a shell runs is followed with its arguments.
        for at, word in enumerate(words):
            if word.endswith(".sh") or word in self.files:
                keeps = name in ("source", ".")
                if at == 0 or name in SHELLS:
                    self._follow(word, words[at + 1 :], keeps)
                return None
        return None

    def _output_of(self, text: str) -> str | None:
        """Return what the commands of `$(text)` print, where all of them are `echo` or functions of it, or None."""
        if self.depth >= DEEPEST or not text.strip():
            return None
        outer = (self.output, self.is_silent)
        variables = self.scope.variables
        # A subshell has variables of its own.
        self.output = []
        self.is_silent = True
        self.scope.variables = dict(variables)
        self.depth += 1
        try:
            self._all(statements_of(text))
            return "\n".join(self.output) if self.is_silent and self.output else None
        finally:
            self.depth -= 1
            (self.output, self.is_silent), self.scope.variables = outer, variables

    def _nested(self, text: str) -> None:
        """A command in a string, such as the text after `bash -c`."""
        # A script that starts itself is not followed without end.
        if self.depth < DEEPEST:
            self.depth += 1
            self.run(text)
            self.depth -= 1

    def _inner(self, action: Callable[[], object], arguments: Sequence[str]) -> None:
        """Run the action with these arguments in place of those of the script."""
        outer = self.scope.arguments
        self.scope.arguments = list(arguments)
        self.depth += 1
        action()
        self.depth -= 1
        self.scope.arguments = outer

    def _follow(self, name: str, arguments: Sequence[str], keeps: bool) -> None:
        """Read another script. keeps: with the arguments of this one, as `source` does."""
        text = self.text_of(name)
        if text is None or self.depth >= DEEPEST:
            return
        if keeps:
            arguments = self.scope.arguments
        self._inner(lambda: self.run(text), arguments)

    def _launch(self, words: Sequence[str], at: int, line: int) -> None:
        """Record a training. A command without flags is another program."""
        after = words[at + 1 :]
        if not any(re.match(r"--?[A-Za-z]", word) for word in after):
            return
        if len(self.launches) == MOST_LAUNCHES:
            raise ShellError(
                f"more than {MOST_LAUNCHES} training commands: this is not a recipe."
            )
        if len(words) > MOST_WORDS:
            raise ShellError(
                f"line {line}: a command of {len(words):,} words: this is not a recipe."
            )
        before = words[:at]
        found = ScriptLaunch(
            words[at], tuple(after), self._ranks(before), line, deepspeed_words(before)
        )
        self.launches.append(found)

    def _ranks(self, launcher: Sequence[str]) -> int | None:
        """Return the number of processes that the launcher would start."""
        counts: dict[str, int] = {}
        for number, word in enumerate(launcher):
            name, equals, value = word.lstrip("-").partition("=")
            if not equals:
                following = launcher[number + 1 : number + 2]
                value = following[0] if following else ""
            kind = COUNTS.get(name.replace("_", "-"))
            count = whole(value)
            if word.startswith("-") and kind is not None and count is not None:
                counts[kind] = count
            if name == "include" and (devices := included_devices(value)):
                return devices
        if "world" in counts:
            return counts["world"]
        if "per_node" in counts:
            return counts["per_node"] * counts.get("nodes", 1)
        # Without flags, a variable of the script may hold it.
        known = (self.scope.get(name) for name in WORLD_NAMES)
        numbers = (whole(value) for value in known if isinstance(value, str))
        return next((number for number in numbers if number is not None), None)


def neighbour(folder: Path, name: str) -> Path | None:
    """Return the file of this name next to the script; None if there is none. Names that leave the folder's tree by
    an absolute path or an open value are looked up by their last part. A link or `..` that leaves the tree
    names no file."""
    root = folder.resolve()
    known = closed(name)
    last = known.rpartition("/")[2]
    for candidate in (known.lstrip("./"), last):
        # A name can be too long, have a zero byte, or be a loop of links.
        try:
            path = (root / candidate).resolve()
            if candidate and path.is_relative_to(root) and path.is_file():
                return path
        except (OSError, ValueError, RuntimeError):
            continue
    return None


def deepspeed_words(launcher: Sequence[str]) -> tuple[str, ...] | None:
    """Return the words for DeepSpeed's launcher before the script; None for another launcher."""
    names = [word.rpartition("/")[2] for word in launcher]
    if "deepspeed" not in names:
        return None
    return tuple(launcher[names.index("deepspeed") + 1 :])


def included_devices(text: str) -> int | None:
    """Return how many devices `--include` of DeepSpeed's launcher names: node1:0,1@node2:2,3 has four; None if a
    node has no list.
    """
    lists = [node.partition(":")[2] for node in text.split("@")]
    if not all(lists):
        return None
    return sum(len(devices.split(",")) for devices in lists)


def text_for_a_shell(words: Sequence[str]) -> str | None:
    """Return the text after `bash -c`, also where srun or a container starts the shell; None without one."""
    for shell, flag, text in zip(words, words[1:], words[2:]):
        name = shell.rpartition("/")[2]
        # -c may be joined with others, as in -lc.
        if name in ("bash", "sh") and re.fullmatch(r"-[a-z]*c", flag):
            return text
    return None


def edited(text: str, words: Sequence[str], budget: Budget) -> str:
    """Return the text after the `s/old/new/` of a `sed` command; other commands of sed are not followed."""
    for word in words[1:]:
        if not re.match(r"s\W", word):
            continue
        old, *new = word[2:].split(word[1])
        option = new.pop() if new else None
        # The new text may have the separator in it.
        if new and option in ("", "g"):
            count = -1 if option else 1
            inner = word[1].join(new)
            budget.spend(len(text))
            lines = text.split("\n")
            text = "\n".join(budget.replaced(line, old, inner, count) for line in lines)
    return text


def read_script(
    path: Path, variables: Mapping[str, str], arguments: Sequence[str] = ()
) -> Script:
    """Return the script with all that it would start. variables: of the environment. Raises ShellError."""
    script = Script(path.parent, Scope(dict(variables), list(arguments)))
    script.run(text_of_file(path, errors="replace"))
    return script


__all__ = ["ScriptLaunch", "Script", "read_script", "shown"]
