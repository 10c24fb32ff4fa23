"""What a reader must hold at once: nodes of the syntax tree on a line, statements that do two things, names with
two meanings, long routines without a comment, docstrings that only continue a signature.

Nodes are those of Python's `ast` without Load, Store and Del; lines are those that are not blank.
"""

import ast
import io
import re
import statistics
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.syntax import tree_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_ds"
FILES = sorted(PACKAGE.rglob("*.py"))
# Programs of a checkout.
PROGRAMS = [
    path
    for folder in (".", "tools", "benchmarks")
    for path in sorted((ROOT / folder).glob("*.py"))
]

MOST_ON_A_LINE = 5.5  # of any file
MOST_OF_MEDIAN = 4.8
MOST_OF_PACKAGE = 5.2
MOST_LINES_WITHOUT_COMMENT = 25
MOST_STATEMENTS_WITHOUT_COMMENT = 18  # one after the other
# Public names that another program gives: `zero.Init` is DeepSpeed's.
NAMES_OF_OTHERS = {"Init"}
FRAGMENT = re.compile(r"(Of|Those|That|As|See|With)\b")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def place(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def density(path: Path) -> tuple[int, int]:
    """(nodes, lines) of a file."""
    nodes = sum(
        not isinstance(node, ast.Load | ast.Store | ast.Del)
        for node in ast.walk(tree_of(path))
    )
    lines = sum(
        bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines()
    )
    return nodes, max(lines, 1)


def test_lines_hold_few_nodes():
    found = {str(path.relative_to(ROOT)): density(path) for path in (*FILES, *PROGRAMS)}
    ratios = {name: nodes / lines for name, (nodes, lines) in found.items()}
    over = {name: ratio for name, ratio in ratios.items() if ratio > MOST_ON_A_LINE}
    assert not over
    assert statistics.median(ratios.values()) <= MOST_OF_MEDIAN
    nodes, lines = (sum(column) for column in zip(*found.values()))
    assert nodes / lines <= MOST_OF_PACKAGE


# ------------------------------------------------------------------ statements
def written(nodes: Iterator[ast.AST]) -> set[str]:
    return {ast.dump(node).replace("Store()", "Load()") for node in nodes}


def assigns_unlike_values(node: ast.AST) -> bool:
    """`a, b = x, y` in which no value reads a target before it: two statements on one line."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or len(target.elts) != len(node.value.elts):
        return False
    if not all(isinstance(each, ast.Name | ast.Attribute) for each in target.elts):
        return False
    if any(isinstance(value, ast.Starred) for value in node.value.elts):
        return False
    for number, each in enumerate(target.elts):
        later = node.value.elts[number + 1 :]
        read = written(inner for value in later for inner in ast.walk(value))
        if written(iter([each])) & read:
            return False
        calls = any(
            isinstance(inner, ast.Call) for value in later for inner in ast.walk(value)
        )
        if isinstance(each, ast.Attribute) and calls:
            return False
    return True


def is_nested_conditional(node: ast.AST) -> bool:
    inner = (other for other in ast.walk(node) if other is not node)
    return isinstance(node, ast.IfExp) and any(
        isinstance(other, ast.IfExp) for other in inner
    )


def multiplies_text_by_a_condition(node: ast.AST) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    is_text = isinstance(node.left, ast.JoinedStr) or (
        isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
    )
    return is_text and isinstance(node.right, ast.Compare | ast.BoolOp)


def is_long_double_comprehension(node: ast.AST) -> bool:
    return (
        isinstance(node, COMPREHENSIONS)
        and len(node.generators) > 1
        and node.end_lineno != node.lineno
    )


RULES = {
    "unlike values assigned together": assigns_unlike_values,
    "a conditional expression inside another": is_nested_conditional,
    "text times a condition": multiplies_text_by_a_condition,
    "two `for` in a comprehension of several lines": is_long_double_comprehension,
}


@pytest.mark.parametrize("rule", RULES)
def test_a_statement_does_one_thing(rule):
    breaks = RULES[rule]
    assert not [
        f"{place(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if breaks(node)
    ]


@pytest.mark.parametrize(
    "rule, text",
    [
        ("unlike values assigned together", "a, b = 1, f(x)"),
        ("a conditional expression inside another", "a if b else c if d else e"),
        ("text times a condition", "'s' * (n > 1)"),
        (
            "two `for` in a comprehension of several lines",
            "[a\n for b in c\n for a in b]",
        ),
    ],
)
def test_the_rules_find_what_they_are_for(rule, text):
    assert any(map(RULES[rule], ast.walk(ast.parse(text))))


# ------------------------------------------------------------------ routines and names
def lines_with_comments(path: Path) -> set[int]:
    source = io.StringIO(path.read_text(encoding="utf-8"))
    return {
        token.start[0]
        for token in tokenize.generate_tokens(source.readline)
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
    }


def test_a_long_routine_has_a_comment():
    silent = []
    for path in FILES:
        comments = lines_with_comments(path)
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, FUNCTIONS):
                continue
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if not body:
                continue
            lines = range(body[0].lineno, node.end_lineno + 1)
            if len(lines) > MOST_LINES_WITHOUT_COMMENT and not comments & set(lines):
                silent.append(f"{place(path)}:{node.lineno} {node.name}")
    assert not silent


def statement_lines(body: list[ast.stmt]) -> list[int]:
    """First lines of all statements, those inside of others included. A table is one statement."""
    lines = []
    for statement in body:
        lines.append(statement.lineno)
        if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            continue
        parts = [statement]
        parts += getattr(statement, "handlers", [])
        parts += getattr(statement, "cases", [])
        for part in parts:
            for field in ("body", "orelse", "finalbody"):
                lines += statement_lines(getattr(part, field, []))
    return sorted(lines)


def longest_run(function: ast.FunctionDef, comments: set[int]) -> int:
    """The largest number of statements of a function that follow each other without a comment."""
    has_docstring = ast.get_docstring(function) is not None
    body = function.body[1:] if has_docstring else function.body
    longest = 0
    run = 0
    before = function.lineno
    for line in statement_lines(body):
        if comments & set(range(before, line)):
            run = 0
        run += 1
        longest = max(longest, run)
        before = line
    return longest


def test_phases_of_a_routine_have_comments():
    unmarked = []
    for path in (*FILES, *PROGRAMS):
        comments = lines_with_comments(path)
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, FUNCTIONS):
                continue
            run = longest_run(node, comments)
            if run > MOST_STATEMENTS_WITHOUT_COMMENT:
                where = path.relative_to(ROOT)
                unmarked.append(f"{where}:{node.lineno} {node.name}: {run}")
    assert not unmarked


def test_a_comment_divides_a_routine():
    text = "def f():\n" + "    a = 1\n" * 3 + "    # next\n" + "    b = 2\n" * 2
    (function,) = ast.parse(text).body
    assert longest_run(function, {5}) == 3
    assert longest_run(function, set()) == 5


def test_a_docstring_is_a_sentence():
    kinds = (ast.Module, ast.ClassDef, *FUNCTIONS)
    assert not [
        f"{place(path)}: {text.splitlines()[0]}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, kinds)
        and FRAGMENT.match(text := ast.get_docstring(node) or "")
    ]


def test_a_class_name_means_one_thing():
    classes = defaultdict(list)
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(f"{place(path)}:{node.lineno}")
    twice = {name: places for name, places in classes.items() if len(places) > 1}
    assert set(twice) <= NAMES_OF_OTHERS, twice
