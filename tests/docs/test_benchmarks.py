"""Benchmarks, which no other test runs, fit the package: each starts, every name that they take from it exists, and
each call has the parameters of what it calls. A new file of `benchmarks/` joins by itself.

Their figures are not tested: sizes that mean something take minutes.
"""

import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness.limits import HUNG
from tests.harness.warm import warm_python

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks").glob("*.py"))
PROGRAMS = [path for path in FILES if "__main__" in path.read_text()]
NEIGHBOURS = [
    ROOT / "benchmarks",
    ROOT / "tools",
]  # programs import these by bare names
OWN = {"megatron_ds", "benchmarks", "tests"} | {
    path.stem for folder in NEIGHBOURS for path in folder.glob("*.py")
}
MISSING = object()


@pytest.mark.processes
@pytest.mark.one_in(2, together=True)
def test_every_benchmark_starts():
    """Each is started as a program with --help: it imports what it needs, and its flags are declared."""
    python = warm_python()

    def start(path: Path) -> str:
        done = subprocess.run(
            [python, str(path), "--help"],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HUNG,
        )
        is_help = done.returncode == 0 and "usage:" in done.stdout
        return "" if is_help else f"{path.name}: {done.returncode}\n{done.stderr}"

    with ThreadPoolExecutor(2) as pool:
        failed = list(filter(None, pool.map(start, PROGRAMS)))
    assert not failed, "\n".join(failed)
    assert len(PROGRAMS) > 30


@pytest.mark.processes
@pytest.mark.one_in(2, together=True)
def test_text_becomes_tokens_in_the_benchmark_of_preprocessing(tmp_path):
    """The smallest run: its own functions read this Python's documentation, and tools run."""
    words = "--megabytes 0.2 --vocab-size 400 --rounds 1 --peer-documents 5".split()
    core = min(os.sched_getaffinity(0))
    words += ["--core", str(core), "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/preprocess.py"), *words],
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0, done.stderr
    assert "MB/s on one core" in done.stdout
    lines = (tmp_path / "corpus.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert len(set(texts)) == len(texts) > 50
    assert 0.2e6 < sum(map(len, texts)) < 1e6
    assert (tmp_path / "ours_text_document.bin").stat().st_size > 1e4


# ------------------------------------------------------------------------------------------ names and calls
@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> Iterator[tuple[int, str, str, str]]:
    """(line, the name here, module, name there or "" for the module itself), of what is the project's own."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                here = alias.asname or alias.name
                if alias.name.split(".")[0] in OWN and "." not in here:
                    yield node.lineno, here, alias.name, ""
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module.split(".")[0] in OWN:
                for alias in node.names:
                    here = alias.asname or alias.name
                    yield node.lineno, here, node.module, alias.name


def found(module: str, name: str) -> object:
    """The object; MISSING if there is none."""
    whole = importlib.import_module(module)
    if not name:
        return whole
    if not hasattr(whole, name):
        try:
            return importlib.import_module(f"{module}.{name}")
        except ImportError:
            return MISSING
    return getattr(whole, name)


def resolved(node: ast.expr, known: dict[str, object]) -> object:
    """What an expression such as `own.help_topics` is; None where it is no name of the project."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = resolved(node.value, known)
    # Of modules and classes alone: what an instance has is known when it runs.
    if not isinstance(owner, ModuleType | type):
        return None
    return getattr(owner, node.attr, MISSING)


def assigned(path: Path) -> set[str]:
    """Names that the file binds itself."""
    return {
        node.id
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    } | {node.arg for node in ast.walk(tree_of(path)) if isinstance(node, ast.arg)}


def problems_of(path: Path) -> Iterator[str]:
    """Names that do not exist, and calls that do not fit."""
    known = {}
    for line, here, module, name in imported(path):
        known[here] = found(module, name)
        if known[here] is MISSING:
            yield f"{path.name}:{line}: {module} has no {name}"
    for name in assigned(path):
        known.pop(name, None)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and resolved(node, known) is MISSING:
            yield f"{path.name}:{node.lineno}: no {ast.unparse(node)}"
        if isinstance(node, ast.Call):
            yield from misfits(path, node, resolved(node.func, known))


def misfits(path: Path, call: ast.Call, function: object) -> Iterator[str]:
    """Why the arguments of a call do not fit the parameters."""
    is_starred = any(isinstance(a, ast.Starred) for a in call.args)
    if is_starred or any(keyword.arg is None for keyword in call.keywords):
        return
    if function is MISSING or not callable(function):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*call.args, **{k.arg: k.value for k in call.keywords})
    except TypeError as error:
        yield f"{path.name}:{call.lineno}: {ast.unparse(call.func)}: {error}"


@pytest.fixture
def programs_path(monkeypatch):
    """Programs import their neighbours by their bare names."""
    for folder in NEIGHBOURS:
        monkeypatch.syspath_prepend(str(folder))


@pytest.mark.plan
def test_benchmarks_name_and_call_what_the_package_has(programs_path):
    problems = [problem for path in FILES for problem in problems_of(path)]
    assert not problems, "\n".join(problems)


@pytest.mark.plan
def test_a_name_that_is_gone_and_a_call_that_does_not_fit_are_found(tmp_path):
    path = tmp_path / "old.py"
    path.write_text(
        "import megatron_ds.extensions.corpora.build_corpus as own\n"
        "from megatron_ds.config import parse, gone\n"
        "own.help_topics(3)\n"
        "own.topics()\n"
        "parse(['--lr', '1'], world_size=1)\n"
        "parse([], worlds=1)\n"
    )
    found = sorted(problem.removeprefix("old.py:") for problem in problems_of(path))
    assert [problem[:22] for problem in found] == [
        "2: megatron_ds.config ",
        "3: own.help_topics: to",
        "4: no own.topics",
        "6: parse: got an unexp",
    ]
