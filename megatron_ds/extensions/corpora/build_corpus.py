"""Build a corpus of real English without a download, from the documentation that ships with your Python.

    megatron-ds corpus --output corpus.jsonl

Takes the running text of the topics of `help()` and of the docstrings of the standard library, read from its
source without importing it: more than a million characters in a few seconds. One JSON line per document; the
same Python gives the same bytes.
"""

import ast
import contextlib
import hashlib
import json
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ds.cli import Arguments, main_guard
from megatron_ds.errors import DataError

# Not documentation, or not part of every installation.
LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "turtledemo",
}
# Characters of a paragraph; shorter ones are captions and summaries, which are much alike.
SHORTEST = 80
LETTERS = 0.85  # share of letters and blanks in running text; tables, signatures and examples have less


def documents() -> list[str]:
    """All texts, each once, in a pseudorandom order that is always the same.

    Training and validation take consecutive documents; ordered by hash, both have text of every kind.
    """
    found = {
        prose(text)
        for text in (*help_topics(), *docstrings(Path(sysconfig.get_paths()["stdlib"])))
    }
    return sorted(found - {""}, key=lambda t: hashlib.sha256(t.encode()).digest())


def prose(text: str) -> str:
    """Return the paragraphs of running text, unwrapped. Tables and code would use up the capacity of a small
    model."""
    paragraphs = (
        " ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text)
    )
    return "\n\n".join(
        p
        for p in paragraphs
        if len(p) >= SHORTEST and p[0].isalpha() and _letters(p) >= LETTERS * len(p)
    )


def _letters(text: str) -> int:
    return sum(c.isalpha() or c == " " for c in text)


def help_topics() -> Iterator[str]:
    """Yield the text of each topic of `help()`."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # a separate package in some distributions
        return
    yield from topics.values()


def docstrings(root: Path) -> Iterator[str]:
    """One text for each module, and one for each top-level class or function, its members' docstrings
    included."""
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            yield from _docstrings_of(path)


def _docstrings_of(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old modules have invalid escapes
            module = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    yield ast.get_docstring(module) or ""
    for node in module.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield "\n\n".join(_described(node))


def _described(
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[str]:
    if text := ast.get_docstring(node):
        yield text
    if isinstance(node, ast.ClassDef):
        for member in node.body:
            if isinstance(
                member, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ):
                yield from _described(member)


def write(texts: Sequence[str], output: Path) -> None:
    """Write to a temporary name, then rename, so that an existing corpus is complete."""
    beside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "w", encoding="utf-8") as f:
            f.writelines(
                json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts
            )
        beside.replace(output)
    except OSError as e:
        raise DataError(
            f"--output {output} cannot be written: {e.strerror}. Choose another "
            "--output."
        ) from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def run(output: Path) -> None:
    """Write the corpus to `output`, and print its size."""
    texts = documents()
    if not texts:
        raise DataError(
            f"no documentation was found below {sysconfig.get_paths()['stdlib']}: this Python is "
            "installed without its sources. Use another Python, or a corpus of your own."
        )
    write(texts, output)
    print(
        f"{output}: {len(texts):,} documents, {sum(map(len, texts)) / 1e6:.2f} million characters"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    parser = Arguments(__doc__)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="JSON lines to write"
    )
    return main_guard(lambda: run(parser.parse_args(argv).output))
